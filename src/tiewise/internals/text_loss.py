"""The loss of a text under a checkpoint, as its family is trained: next token, hidden tokens, or second half.

What a model is asked to predict is found by asking it, not by its name: it predicts the next token where no position
sees a later one.

    next token    position i predicts token i + 1
    hidden        15 % of a window's tokens are replaced by the mask token and predicted (no random replacements)
    second half   the encoder reads the first half of a window, the decoder predicts the second
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tiewise.checkpoint.hf_folder import read_tokenizer
from tiewise.core.errors import DataError, UnsupportedError
from tiewise.data.tokenizer import Ids
from tiewise.internals.loaded import Opened

NEXT, HIDDEN, HALF = "next token", "hidden", "second half"
HIDDEN_SHARE = 0.15  # of a window's tokens, as BERT hides (arXiv:1810.04805, §3.1)
_MASKS = ("[MASK]", "<mask>")
_MOST_LOGITS = 1 << 26  # in one forward: 256 MB of fp32
_PROBED = 8


class TextLoss:
    """Negative log-likelihood of windows of a text, and how many tokens it predicts.

    Args:
        opened: the checkpoint.
        windows: token ids [n, T], T ≥ 2.
        seed: of which tokens are hidden, where they are.

    Raises:
        DataError: windows that this model cannot be run on, or a masked model without a mask token in its tokenizer.
        UnsupportedError: an encoder-decoder that cannot shift its own labels.
    """

    def __init__(self, opened: Opened, windows: Ids, seed: int = 0) -> None:
        _check(opened, windows)
        self.model: Any = opened.model
        self.windows = torch.from_numpy(np.ascontiguousarray(windows, dtype=np.int64))
        self.kind = _kind(opened, self.windows)
        length = self.windows.shape[1]
        if self.kind == HIDDEN:
            self._mask = _mask_token(opened)
            draws = np.random.default_rng(seed).random(windows.shape)  # the lowest of each window are hidden
            self._hidden = torch.from_numpy(draws.argsort(1).argsort(1) < max(1, round(HIDDEN_SHARE * length)))
        self.per_window = {NEXT: length - 1, HIDDEN: max(1, round(HIDDEN_SHARE * length)), HALF: length - length // 2}[
            self.kind
        ]
        rows = int(opened.ends.head.weight.shape[0])
        self.at_once = max(1, _MOST_LOGITS // (length * rows))  # windows in one forward

    def total(self, which: Tensor) -> Tensor:
        """Sum of −ln p over the tokens that the windows `which` [b] predict: a scalar, in nats."""
        ids = self.windows[which]
        if self.kind == NEXT:
            logits, targets = self.model(input_ids=ids).logits[:, :-1], ids[:, 1:]
        elif self.kind == HIDDEN:
            hidden = self._hidden[which]
            logits = self.model(input_ids=ids.masked_fill(hidden, self._mask)).logits[hidden]
            targets = ids[hidden]
        else:
            first, targets = ids[:, : ids.shape[1] // 2], ids[:, ids.shape[1] // 2 :]
            shifted = self.model.prepare_decoder_input_ids_from_labels(labels=targets)
            logits = self.model(input_ids=first, decoder_input_ids=shifted).logits
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def _check(opened: Opened, windows: Ids) -> None:
    if windows.ndim != 2 or not len(windows) or windows.shape[1] < 2:
        raise DataError(f"windows of shape {windows.shape}", "give at least one window of two tokens or more")
    rows = min(opened.vocab, int(opened.ends.head.weight.shape[0]))
    if int(windows.max()) >= rows or int(windows.min()) < 0:
        raise DataError(f"token {int(windows.max())} in tables of {rows:,} rows", "use the tokenizer of this model")
    if opened.longest is not None and windows.shape[1] > opened.longest:
        what = f"windows of {windows.shape[1]} tokens, and the model has {opened.longest} positions"
        raise DataError(what, "give shorter windows")


def _kind(opened: Opened, windows: Tensor) -> str:
    model: Any = opened.model
    if getattr(model.config, "is_encoder_decoder", False):
        if not hasattr(model, "prepare_decoder_input_ids_from_labels"):
            what = f"{type(model).__name__} does not say how its decoder's input is made from labels"
            raise UnsupportedError(what, "give a decoder-only or an encoder-only model")
        return HALF
    looked_up: list[Tensor] = []

    def watch(module: Any, given: Any, rows: Tensor) -> Tensor:
        looked_up.append(rows.detach().requires_grad_())
        return looked_up[-1].clone()

    with torch.enable_grad(), model.get_input_embeddings().register_forward_hook(watch):
        logits = model(input_ids=windows[:1, :_PROBED]).logits
    if not logits.isfinite().all():
        raise DataError(f"{opened.folder.path}: logits that are no numbers", "`tiewise check --deep` names the rows")
    # where no position sees a later one, the last token's gradient from the logits before it is 0 and not merely small
    earlier = logits[:, :-1]
    upstream = torch.randn(earlier.shape, generator=torch.Generator().manual_seed(0)).to(earlier)
    return HIDDEN if torch.autograd.grad(earlier, looked_up[0], upstream)[0][:, -1].any() else NEXT


def _mask_token(opened: Opened) -> int:
    found = read_tokenizer(opened.folder)
    ids = {} if found is None else {**found.base, **{text: number for number, text in found.added.items()}}
    for text in _MASKS:
        if text in ids:
            return ids[text]
    what = f"{opened.folder.path}: the model predicts hidden tokens, and its tokenizer has no {' or '.join(_MASKS)}"
    raise DataError(what, "put the model's own tokenizer beside it")
