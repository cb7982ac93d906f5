"""Catalogue of public models: `tiewise.lab.public_models`."""

from __future__ import annotations

from tiewise.planning.catalogue import Model, select


def public_models(
    family: str = "",
    *,
    tied: bool | None = None,
    min_vocab: int = 0,
    min_size: float | None = None,
    max_size: float | None = None,
    sort: str | None = None,
) -> list[Model]:
    """Return the public models that pass all filters, as `tiewise plan --list` prints them.

    Args:
        family: prefix of a model's name or type, for example "qwen".
        tied: True for tied models, False for untied ones, None for both.
        min_vocab: least number of tokens V.
        min_size: least number of parameters.
        max_size: parameters that a model must stay below.
        sort: "name", "size", "vocab", "width", "layers", "ratio" or "share"; None for the catalogue's order.

    Returns:
        Models with `.name`, `.vocab`, `.width`, `.layers`, `.tied` and `.parameters`. None is an unknown figure.

    Raises:
        PlanError: the sort key is unknown, or no model belongs to this family.

    >>> [model.name for model in public_models("gpt2", sort="size")][:2]
    ['gpt2', 'gpt2-medium']
    """
    return select(tied, family, min_vocab, min_size, max_size, sort)
