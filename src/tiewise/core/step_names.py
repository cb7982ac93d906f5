"""Names of the step whose model a run keeps."""

BEST = "best"  # the step with the lowest loss on the tuning split
LAST = "last"  # the last step
