"""Most frequent tokens of a text, as the vocabulary of a draft model: `tiewise.lab.hot_vocabulary`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tiewise.core.errors import RunError
from tiewise.training.data.hot_tokens import LAYOUTS, HotTokens, hot_tokens


def hot_vocabulary(
    text: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = "builtin",
    *,
    tokenizer: str | os.PathLike[str],
    size: int = 32_768,
    vocab: int | None = None,
    to: str | os.PathLike[str] | None = None,
) -> HotTokens:
    """Choose a draft model's tokens, and measure how much of held-out text they cover.

    Special tokens are always among the chosen ones.

    Args:
        text: texts such as the target model writes; names as of `tiewise vocab hot --text`.
        tokenizer: folder of the target model, its `tokenizer.json`, or a name on the Hub.
        size: number of tokens N to choose.
        vocab: rows V of the target's tables; None reads them from its config.
        to: file to write: `.safetensors` for EAGLE-3, `.pt` for FR-Spec, or `.json`.

    Returns:
        The chosen tokens. `.token_ids` [N] are in rising order, and `.coverage` is their share of the held-out tokens.

    Raises:
        TiewiseError: a text or tokenizer cannot be used, or the file cannot be written.

    >>> hot = hot_vocabulary("synthetic:words=20000", tokenizer="bytes", size=40)
    >>> len(hot.token_ids), hot.coverage.value > 0.5
    (40, True)
    """
    if to is not None and Path(to).suffix not in LAYOUTS:  # reported before the text is read
        raise RunError(f"{to}: no layout has this ending", f"choose one of {', '.join(LAYOUTS)}")
    if isinstance(text, str | os.PathLike):
        text = [text]
    with TemporaryDirectory() as folder:
        names = [os.fspath(name) for name in text]
        hot = hot_tokens(names, os.fspath(tokenizer), size, Path(folder) / "data", vocab=vocab)
    if to is not None:
        hot.write(Path(to))
    return hot
