"""Check every checkpoint below a folder; print its first fault and the command that repairs it."""

import sys
from pathlib import Path

import tiewise

for config in sorted(Path(sys.argv[1] if len(sys.argv) > 1 else ".").rglob("config.json")):
    if not list(config.parent.glob("*.safetensors")):
        continue
    audit = tiewise.check(config.parent)
    findings = audit.at_least("warning")
    print(f"{config.parent}: {f'{findings[0].rule}: {findings[0].repair}' if findings else 'sound'}")
