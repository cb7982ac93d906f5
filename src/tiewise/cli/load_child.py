"""Child process of `verify_load.py`, which loads two folders with transformers and compares them.

It reads a request from stdin and writes one line of JSON to stdout. The process has limits of memory and time, because
the folders may be untrusted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tiewise.core.json_child import describe_error, limit_process, read_request, write_reply

TOKENS = 24  # ids in the text that both models read


def main() -> None:
    """Answer one request."""
    request = read_request()
    limit_process(request["memory"], 4 * request["seconds"])
    _silence()
    write_reply(compare_folders(request["paths"], request["rows"]))


def _silence() -> None:
    """Keep transformers from writing progress and warnings to the terminal."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def compare_folders(paths: list[str], rows: str | None) -> dict[str, Any]:
    """Load the source, then the result, and compare missing tensors and logits.

    `rows` names the rows whose logits should stay the same; None skips the logits.
    """
    import transformers

    reply: dict[str, Any] = {"version": transformers.__version__, "tokens": TOKENS}
    try:
        source, missing = _load(paths[0])
    except Exception as error:
        return reply | {"not_loaded": describe_error(error)}
    try:
        result, result_missing = _load(paths[1])
    except Exception as error:
        return reply | {"result_error": describe_error(error)}
    reply["missing"] = [sorted(missing), sorted(result_missing)]
    if rows is None or missing or result_missing:
        return reply
    return reply | _compared_logits(source, result, rows)


def _compared_logits(source: Any, result: Any, rows: str) -> dict[str, Any]:
    """Run both models on the same text; return the change of their logits.

    If they cannot run, the reply says why.
    """
    import torch

    class_name = type(source).__name__
    old, new = _tables(source), _tables(result)
    if all(table is None for table in (*old, *new)):
        return {"not_run": f"{class_name} names no table of tokens"}
    retained = _retained_rows(old, new, rows)
    ids = _plain_ids(source.config.to_dict(), result.config.to_dict(), retained)
    if len(ids) < 2:
        return {"not_run": "no token is left to compare"}
    source_ids = torch.tensor([source_id for source_id, _ in ids])[None]
    result_ids = torch.tensor([result_id for _, result_id in ids])[None]
    try:
        with torch.no_grad():
            was, now = _logits(source, source_ids), _logits(result, result_ids)
    except Exception as error:
        return {"not_run": f"{class_name} does not run on token ids alone ({describe_error(error)})"}
    if was.shape[-1] <= max(row for row, _ in retained):  # a discriminator: one number for each token of the text
        return {"not_run": f"{class_name} gives no logits over the vocabulary"}
    row_pairs = torch.tensor(retained)
    return _change(was[..., row_pairs[:, 0]], now[..., row_pairs[:, 1]])


def _load(path: str) -> tuple[Any, set[str]]:
    """Return (the model in fp32, names of tensors that were drawn at random).

    The model's class is the class of transformers that its config names.
    """
    import torch
    import transformers

    with open(f"{path}/config.json", encoding="utf-8") as file:
        name = json.load(file)["architectures"][0]
    model_class: Any = getattr(transformers, name, None)
    built_in = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
    if not built_in:
        raise ValueError(f"transformers has no class {name}")
    torch.manual_seed(0)
    model, info = model_class.from_pretrained(
        path,
        output_loading_info=True,
        dtype=torch.float32,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        attn_implementation="eager",  # a config may name a kernel that is fetched
    )
    if info["mismatched_keys"]:
        raise ValueError(f"{len(info['mismatched_keys'])} tensors have another shape than the class gives them")
    return model.eval(), set(info["missing_keys"])


def _tables(model: Any) -> tuple[Any, Any]:
    """Return (input table, output table); None for one that the class lacks."""
    return _table(model, "get_input_embeddings"), _table(model, "get_output_embeddings")


def _table(model: Any, method: str) -> Any:
    """Return the weight of the module that a model's method returns; None if it has none."""
    try:
        module = getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None
    return getattr(module, "weight", None)


def _retained_rows(old: tuple[Any, Any], new: tuple[Any, Any], rows: str) -> list[tuple[int, int]]:
    """Return [(row of the source, row of the result)] of the tokens that both have."""
    if rows == "same bytes":
        return _equal_rows(_row_bytes(old), _row_bytes(new))
    shortest = min(len(table) for table in (*old, *new) if table is not None)
    return [(row, row) for row in range(shortest)]


def _equal_rows(source: list[bytes], result: list[bytes]) -> list[tuple[int, int]]:
    """Return [(row of the source, equal row of the result)].

    The list is empty if the result has a row that the source lacks.
    """
    pairs, row = [], 0
    for result_row, content in enumerate(result):  # rows that stay keep their order
        while row < len(source) and source[row] != content:
            row += 1
        if row == len(source):
            return []
        pairs.append((row, result_row))
        row += 1
    return pairs


def _row_bytes(tables: tuple[Any, Any]) -> list[bytes]:
    """Return the bytes of each token in both tables."""
    parts = [table.detach().contiguous().numpy() for table in tables if table is not None]
    return [b"".join(part[row].tobytes() for part in parts) for row in range(min(map(len, parts)))]


def _plain_ids(old: Mapping[str, Any], new: Mapping[str, Any], pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return a few pairs of ordinary tokens, spread over the vocabulary.

    Tokens to which a config gives a special meaning are left out.
    """
    old_special, new_special = set(_ids_of(old)), set(_ids_of(new))
    plain = [(was, now) for was, now in pairs if was not in old_special and now not in new_special]
    return plain[:: max(1, len(plain) // TOKENS)][:TOKENS]


def _ids_of(config: Mapping[str, Any]) -> Iterator[int]:
    """Yield the token ids that a config names at any level."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _ids_of(value)
        elif str(key).endswith(("token_id", "token_ids", "token_index")):
            numbers = value if isinstance(value, list) else [value]
            yield from (number for number in numbers if type(number) is int)


def _logits(model: Any, ids: Any) -> Any:
    """Return the logits [1, T, V] of a text; an encoder reads it too."""
    import torch

    torch.manual_seed(0)  # some classes draw numbers at every run: Reformer's hashes
    extra = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    output = model(input_ids=ids, use_cache=False, **extra)
    logits = getattr(output, "logits", None)
    return output.prediction_logits if logits is None else logits


def _change(was: Any, now: Any) -> dict[str, Any]:
    """Return the largest logit and the largest change of a logit.

    The change is None if a logit is finite in only one of the two.
    """
    import torch

    finite = torch.isfinite(was)
    if was.shape != now.shape or not torch.equal(finite, torch.isfinite(now)):
        return {"largest": 0.0, "change": None}
    was, now = was[finite], now[finite]
    if not was.numel():
        return {"largest": 0.0, "change": 0.0}
    return {"largest": float(was.abs().max()), "change": float((was - now).abs().max())}
