"""Every checkpoint below a folder, one line each: what is wrong with it, and the command that mends it."""

import sys
from pathlib import Path

import tiewise

for config in sorted(Path(sys.argv[1] if len(sys.argv) > 1 else ".").rglob("config.json")):
    if not list(config.parent.glob("*.safetensors")):
        continue
    audit = tiewise.check(config.parent)
    found = audit.at_least("warning")
    print(f"{config.parent}: {f'{found[0].rule}: {found[0].repair}' if found else 'sound'}")
