"""Parts of `tools/fuzz.py`: files in memory, readers with their seeds, mutators, the fuzzed process, and the record."""
