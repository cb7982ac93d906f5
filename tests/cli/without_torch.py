"""Run the command line as where only the base install is: torch and what needs it cannot be imported."""

import sys

from tiewise.cli.main import main

for name in ("torch", "transformers", "datasets", "accelerate", "plotly"):
    sys.modules[name] = None
main()
