"""Parts of `tools/mutate.py`: operators, choice of lines and tests, the process that runs them, results."""
