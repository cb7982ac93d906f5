"""Hashes of folders, for tests of verbs that import no torch."""

import hashlib
import json


def hash_files(path):
    """Return {path below: SHA-256} of every file; None for a folder."""
    digest = {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.rglob("*") if file.is_file()}
    return {str(file.relative_to(path)): digest.get(file) for file in path.rglob("*")}


def hash_without_times(path):
    """Return the hashes of a result, with its provenance as a record without times."""
    record = json.loads((path / "tiewise.json").read_text())
    for operation in record["operations"]:
        operation.pop("time")
    return hash_files(path) | {"tiewise.json": record}
