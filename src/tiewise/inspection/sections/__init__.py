"""The sections of an inspection, one file each: see `tiewise.inspection.inspection`."""
