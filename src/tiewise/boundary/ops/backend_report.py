"""Explanation of `backend="auto"`: the time of each backend, or the reason against it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from tiewise.boundary.ops.backend_table import DESCRIBED, KERNELS
from tiewise.boundary.ops.gpu_kernels import COMPILE, find_trial, reason_against
from tiewise.boundary.ops.problem import LossTensors, check_problem, compute_dtype, flat_rows
from tiewise.core.backends import LossOptions

_DEFAULT = LossOptions()
NOT_TRIED = "supports this call; no trial has timed it in this process"


def explain_backends(
    features: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    options: LossOptions = _DEFAULT,
    **overrides: Any,
) -> dict[str, str]:
    """Return the time of each backend in a trial, or the reason against it.

    No kernel runs: a time is known after a call with `backend="auto"`, whose trial is that of a problem like this one.

    >>> import torch
    >>> reasons = explain_backends(torch.zeros(2, 4), torch.zeros(8, 4), torch.tensor([1, 5]))
    >>> reasons["liger"]
    'runs on a GPU, and the features are on a cpu'

    Args:
        features: [..., E], as in `linear_cross_entropy`.
        weight: [V, E].
        targets: [...] class indices.
        bias: [V] or None.
        options: see `LossOptions`; `backend` is ignored.
        **overrides: single options by name, e.g. `softcap=30.0`.

    Returns:
        a time in milliseconds or a reason, by backend.

    Raises:
        TypeError: as `linear_cross_entropy`.
        ValueError: as `linear_cross_entropy`.
        UnsupportedError: as `linear_cross_entropy`.
    """
    options = replace(options, **{**overrides, "backend": None})
    check_problem(features, weight, targets, bias, options)
    tensors = LossTensors(flat_rows(features), weight, bias, targets.reshape(-1).long())
    product_dtype = compute_dtype(tensors.features, weight)
    trial = find_trial(options, tensors, product_dtype)
    states = {}
    for name in ("tiewise", COMPILE, *KERNELS):
        if name in trial.milliseconds:
            states[name] = f"{trial.milliseconds[name]:.3g} ms"
        else:
            states[name] = trial.reasons.get(name) or reason_against(name, options, tensors, product_dtype) or NOT_TRIED
    return states | {name: reason_against(name, options, tensors, product_dtype) for name in DESCRIBED}
