"""Published claims as data, each with a small test, a rule and a verdict.

The rule is written before the run.

- `claims.yaml`: all claims, and the grids that test them.
- `registry`: the claims as dataclasses, and the hash of a rule.
- `expected`: the range of outcomes that a claim predicts, and the verdict on an interval.
- `outcome`: measures of an outcome, with an interval over seeds.
- `texts`: texts that are written before a run.
- `recorded`: results of runs. `recorded.json` has those that were run for this version.
- `run`: one claim from its grid to its verdict.
"""
