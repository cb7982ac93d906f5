"""Options that make a run of a second."""

TINY = [f"--set={item}" for item in ("width=16", "layers=1", "heads=2", "length=16", "batch=4")]
TINY += ["--steps=12", "--tokenizer=bytes"]
