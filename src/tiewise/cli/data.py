"""`tiewise data show`: rows of a text as an ALBERT is trained on them."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import typer

from tiewise.cli import options as o
from tiewise.core.errors import RunError

if TYPE_CHECKING:
    from tiewise.training.data.training_rows import PairRows


def show(
    text: list[str] = o.TEXT,
    tokenizer: str = typer.Option("bpe:4096", help="Tokenizer, as in tiewise train."),
    objective: str = typer.Option("sop", help="Objective of the pairs: sop, nsp or none."),
    length: int = typer.Option(128, help="Tokens of a row."),
    count: int = typer.Option(3, "--count", "-n", help="Rows to print."),
    seed: int = typer.Option(1, help="Seed of the rows, as in tiewise train."),
    split: str = typer.Option("train", help="train, tune or heldout."),
    ratio: float = typer.Option(0.5, help="Share of pairs as in the text."),
    masking: float = typer.Option(0.15, help="Share of tokens that are predicted."),
    ngram: int = typer.Option(3, help="Words of the longest masked run."),
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Print rows for pretraining: two segments with masked tokens, and the pair's label.

    A masked token is shown as \\[MASK|word], one replaced at random as \\[other|word], one that stays as \\[=|word];
    ↵ is the end of a line.
    """
    if count < 1 or seed < 0:
        raise RunError(f"{count} rows of seed {seed}", "use 1 row or more, and a seed of 0 or more")
    o.need("torch", "transformers")
    o.hush_libraries()
    from tiewise.training.data.corpus import prepare
    from tiewise.training.data.sentence_pairs import Packing
    from tiewise.training.data.training_rows import Masking, PairRows, add_marks, split_sentences

    masks, packing = Masking(share=masking, longest=ngram), Packing(length, objective, ratio)
    with TemporaryDirectory() as folder:
        prepared = add_marks(prepare(text or ["builtin"], tokenizer, Path(folder) / "data", length=length, apart=True))
        sentences = split_sentences(prepared, split)
        rows = PairRows(sentences, packing, masks, seed=seed, count=count)
        examples = [_row(rows, index, prepared.tokenizer) for index in range(count)]
    documents = len(sentences.documents) - 1
    facts = {"documents": documents, "sentences": len(sentences), "rows_per_epoch": rows.rows_per_epoch}
    if json_:
        return o.print_json({**facts, "rows": examples})
    print(", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in facts.items()))
    for row in examples:
        print(f"\n{row['says']}\n  A: {row['a']}\n  B: {row['b']}")


def _row(rows: PairRows, index: int, words: Any) -> dict[str, Any]:
    """Return one row as JSON; `words` is the tokenizer."""
    from tiewise.training.data.training_rows import IGNORED

    row = rows[index]
    size = int(row["attention_mask"].sum())
    inputs, labels = row["input_ids"].tolist()[:size], row["labels"].tolist()
    parts = [_written_token(token, label, words) for token, label in zip(inputs, labels, strict=False)]
    second = row["token_type_ids"].tolist()[:size].index(1)
    pair_label = int(row["pair_labels"]) if "pair_labels" in row else None
    return {
        "label": pair_label,
        "says": _label_words(pair_label, rows.packing.objective),
        "a": "".join(parts[:second]).replace("\n", "↵"),
        "b": "".join(parts[second:]).replace("\n", "↵"),
        "tokens": size,
        "input_ids": inputs,
        "labels": labels[:size],
        "predicted": sum(label != IGNORED for label in labels),
    }


def _written_token(token: int, label: int, words: Any) -> str:
    """Return a token's text, and the text to predict if it has a label."""
    from tiewise.training.data.training_rows import IGNORED

    text: str = words.decode([token])
    if label == IGNORED:
        return text
    visible = "=" if token == label else text.strip()
    return f"[{visible}|{words.decode([label])}]".replace("[[MASK]|", "[MASK|")


def _label_words(label: int | None, objective: str) -> str:
    """Return a pair's label in words."""
    if label is None:
        return "no label"
    if label:
        return f"label {label}: as in the text"
    reasons = {"sop": "swapped", "nsp": "B is from another document"}
    return f"label {label}: {reasons.get(objective)}"
