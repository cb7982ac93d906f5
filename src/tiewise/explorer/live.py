"""A live model as the page takes it: for a moment its ends lie beside its config in a folder, read as any folder is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save_file

from tiewise.boundary.locate import locate
from tiewise.boundary.saved import is_family
from tiewise.checkpoint.claims import in_layer
from tiewise.core.errors import RunError, UnsupportedError
from tiewise.explorer.embedded import embedded


def live(model: Any, tokenizer: Any = None, words: Sequence[str] = (), texts: Sequence[str] = ()) -> dict[str, Any]:
    """Return what `embedded` returns of a folder, of a model in memory.

    Args:
        model: a Hugging Face model with a token head.
        tokenizer: whose texts name the rows.
        words, texts: as `embedded` takes them.

    Raises:
        InstallError: it has no two ends of tokens.
        UnsupportedError: a boundary is installed whose tables alone do not say what it does.
        RunError: the disk for temporary files takes no more.
    """
    locate(model)
    name = type(model).__name__
    if is_family(model.config):
        what = f"{name} does more at its ends than its tables say"
        raise UnsupportedError(what, "explore the folder that its save_pretrained writes")
    outer: dict[int, tuple[str, Any]] = {}  # a table of both ends once, as save_pretrained writes it
    for key, tensor in model.state_dict().items():
        if not in_layer(key):
            outer.setdefault(tensor.data_ptr(), (key, tensor))
    with TemporaryDirectory(prefix="tiewise-") as made:
        folder = Path(made) / name
        folder.mkdir()
        config = json.loads(model.config.to_json_string()) | {"architectures": [name]}
        try:
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
            save_file(
                {key: tensor.detach().cpu().contiguous() for key, tensor in outer.values()},
                folder / "model.safetensors",
            )
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
        except OSError as error:
            raise RunError(f"cannot write to {made}: {error.strerror}", "name another disk in TMPDIR") from None
        return embedded(folder, words, texts)
