"""`trim`: a smaller vocabulary, of the tokens that a text needs, in tables, tokenizer and configs alike.

Rows that stay keep their bytes and their order; ids close ranks. Text that was made of kept tokens alone is cut into
them as before (`tokenizer_file.py`, and docs/trim.md for the proof). Other text takes more tokens. How many more is
measured on the last tenth of the text, with tokens that the rest of it alone chose.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import CONFIG, json_object, open_folder
from tiewise.checkpoint.rewrite.change import Change, NothingToDo, gathered
from tiewise.checkpoint.rewrite.config_ids import values_with_ids, with_ids
from tiewise.checkpoint.rewrite.file_plan import edited_file
from tiewise.checkpoint.rewrite.registry import Option, verb
from tiewise.checkpoint.rewrite.token_rows import KEPT, parts_of_tokens, sizes_of, unknown_tables, with_rows
from tiewise.checkpoint.rewrite.tokenizer_file import Noted, TokenizerFile, encoded, loaded
from tiewise.checkpoint.stored import Reader, Stored
from tiewise.checkpoint.untrusted import MOST_BYTES, read_whole, short
from tiewise.core.errors import CheckpointError

HELD = 0.1  # of the text, at its end, is what the measured choice does not see
MOST_HELD = 4 << 20  # characters that are measured at most
SHOWN = 8  # tokens in one line
CONFIGS = ("generation_config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
OTHER_TOKENIZERS = re.compile(r"\.(model(\.v\d+)?|spm|tiktoken)$|^tekken\.json$")  # which nothing here rewrites


@verb(
    order=60,
    details="Text that is made of the tokens that stay is cut into the same tokens as before.",
    keeps_logits="same bytes",
    example="tied --size=35",
)
def trim(
    facts: Facts,
    *,
    text: Annotated[
        str | os.PathLike[str] | None, Option("Tokens that occur in this text stay.", metavar="FILE")
    ] = None,
    keep: Annotated[
        str | os.PathLike[str] | None, Option("These stay too: a token, or an id, on each line.", metavar="FILE")
    ] = None,
    size: Annotated[int | None, Option("So many stay: the text's most frequent, then the smallest ids.")] = None,
    force: bool = False,
) -> Change:
    """Drop the tokens that a text does not need: rows at both ends, the tokenizer, and ids in configs.

    Special and added tokens, bytes and whatever a config names always stay, and so do the ancestors of all that stay.

    Args:
        text: a text file; the tokens that occur in it stay.
        keep: a file with a token, or with an id, on each line; these stay too.
        size: how many tokens stay: the most frequent of the text, then those of the smallest ids.
    """
    if text is None and keep is None and size is None:
        raise CheckpointError("nothing says which tokens stay", "give text, keep or size")
    if facts.folder.single or not facts.folder.has(CONFIG):
        what = f"{facts.path}: no folder with config.json and tokenizer.json"
        raise CheckpointError(what, "give the checkpoint's own folder, with both")
    parts = _parts(facts)
    before = parts[0].rows
    words = TokenizerFile(facts.folder.path)

    # everything beside the tensors that names a token
    records = {name: json_object(facts.folder.path, name) for name in (CONFIG, *CONFIGS) if facts.folder.has(name)}
    named = Noted()
    for name, record in records.items():
        try:
            _config_changes(record, named)
        except RecursionError:
            what = f"{facts.folder.path / name}: it is nested deeper than any config"
            raise CheckpointError(what, "take it from its source again") from None
    for name, record in records.items():
        for path, value in values_with_ids(record):
            if isinstance(value, Mapping) and len(value) >= len(words.ids):
                what = f"{facts.folder.path / name}: {path} names every token, those of pictures among them"
                raise CheckpointError(what, "it does not say which may go: this model is not trimmed")
    must = words.closed(words.always | named.keys() | (set() if keep is None else _kept_by(Path(keep), words)))
    for number in must.union(words.ids.values()):
        if not 0 <= number < before:
            what = f"{facts.path}: its tokenizer or config names token {number}, and its tables have {before:,} rows"
            raise CheckpointError(what, "tiewise resize makes rows for all, or take it out of the file that names it")
    if size is not None and not len(must) <= size < before:
        what = f"{facts.path}: size is {size:,}, of {before:,} rows"
        raise CheckpointError(what, f"choose {len(must):,}, which must stay, up to {before - 1:,}")

    seen, first = Counter[int](), Counter[int]()  # in the text, and before its end
    held: list[tuple[str, list[int]]] = []
    letters = 0
    if text is not None:
        end = (1 - HELD) * (os.path.getsize(text) if os.path.isfile(text) else 0)
        for at, piece, ids in encoded(words.engine, Path(text), f"counting {short(text)}"):
            seen.update(ids)
            if at < end:
                first.update(ids)
            elif ids and letters < MOST_HELD:
                held.append((piece, ids))
                letters += len(piece)
    kept = _chosen(words, must, seen, size)
    if len(kept) == before:
        raise NothingToDo(f"{facts.path}: all {before:,} tokens would stay", "give a smaller text, or a size")
    new = {old: number for number, old in enumerate(sorted(kept))}
    tokenizer = words.without(new)
    wanted = {token: new[number] for token, number in words.ids.items() if number in new}

    stay = f"{len(new):,} of {before:,} tokens stay, {len(must):,} of them in any case"
    notes = [f"{stay}; their rows keep every byte, and text that was made of them alone is cut into the same tokens"]
    if text is not None:
        gone = [(token, count) for token, count in seen.most_common() if token not in new]
        listed = ", ".join(f"{words.engine.decode([token])!r} {count:,} times" for token, count in gone[:SHOWN])
        share = sum(count for _, count in gone) / max(1, seen.total())
        most = f"{share:.2%} of its tokens are gone, most often {short(listed, 200)}"
        notes.append(f"{short(text)}: {most if gone else 'each of its tokens stays'}")
        if first and held:
            notes.append(_measured(words, _chosen(words, must, first, size), held))
    behind = frozenset(filter(OTHER_TOKENIZERS.search, facts.folder.files))
    if behind:
        notes.append(f"{', '.join(map(short, sorted(behind)))}: stays behind, since it knows the old tokens only")

    rows = sorted(new)
    put = with_rows(facts, parts, len(new), lambda part: gathered(part, rows))
    texts = {"tokenizer.json": tokenizer, **_beside(facts, words, new)}
    for name, record in records.items():
        if name != CONFIG and (changes := _config_changes(record, new)):
            texts[name] = edited_file(facts.folder, name, changes)
    config = _config_changes(records[CONFIG], new) | sizes_of(facts, before, len(new))
    notes.append(f"{', '.join([CONFIG, *texts])}: written with the new ids")

    def flaws(made: Path) -> Iterator[str]:
        words = loaded((made / "tokenizer.json").read_bytes(), "the result was not kept: its tokenizer")
        if words.get_vocab(with_added_tokens=True) != wanted:
            yield "its tokenizer has other tokens than planned"
        result = open_folder(made).tensors
        for part in parts:
            at = 0
            with Reader(result[part.name]) as reader:
                for piece in gathered(part, rows):
                    again = bytearray(len(piece))
                    reader.into(memoryview(again), at)
                    at += len(piece)
                    if again != piece:
                        yield f"a row of {short(part.name)} differs"

    return Change(KEPT, put=put, config=config, texts=texts, leave=behind, notes=tuple(notes), flaws=flaws)


def _parts(facts: Facts) -> tuple[Stored, ...]:
    """Everything with a row for each token, as [V, …]; refuse where something is that cannot be trimmed with it."""
    tables, biases, beside = parts_of_tokens(facts, "trim")
    parts = (*tables, *biases, *beside)
    for other in facts.roles.others:
        if not other.by_id:
            what = f"{facts.path}: {short(other.tensor.name)} is a {other.role}, which other ids would read wrongly"
            raise CheckpointError(what, "nothing here trims it: train the model with the vocabulary that it shall have")
    for what in unknown_tables(facts, {part.name for part in parts}, tables[0].rows):
        raise CheckpointError(what, "nothing here trims it, and its rows may belong to tokens")
    return parts


def _kept_by(path: Path, words: TokenizerFile) -> set[int]:
    """Ids of the tokens that a file names: all of its lines are ids, or all are tokens as the vocabulary has them."""
    fix = "write a token on each line as tokenizer.json has it (Ġword, ▁word), or on each line an id"
    try:
        lines = [line.rstrip("\r") for line in read_whole(path, MOST_BYTES).decode().split("\n") if line.rstrip("\r")]
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: not UTF-8 text", fix) from None
    numbers = all(re.fullmatch("[0-9]+", line) for line in lines)  # and no ², which is a token
    known = {str(number): number for number in words.ids.values()} if numbers else words.ids
    wrong = next((line for line in lines if line not in known), None)
    if wrong is not None or not lines:
        what = f"{short(wrong)!r} is no token of this tokenizer" if lines else "empty"
        raise CheckpointError(f"{path}: {what}", fix)
    return {known[line] for line in lines}


def _chosen(words: TokenizerFile, must: set[int], seen: Counter[int], size: int | None) -> set[int]:
    """The tokens that stay, closed under ancestors: those of the text, or as many as `size` says."""
    if size is None:
        return must | words.closed(seen)
    kept = set(must)
    for token in sorted(words.ids.values(), key=lambda token: (-seen[token], token)):
        if len(kept) == size:
            break
        if token not in kept and len(kept) + len(more := words.closed([token]) - kept) <= size:
            kept |= more
    return kept


def _measured(words: TokenizerFile, kept: set[int], held: list[tuple[str, list[int]]]) -> str:
    """What a choice of tokens costs on text that it was not made by, in one sentence; raise where text is lost."""
    new = {old: number for number, old in enumerate(sorted(kept))}
    trial = loaded(words.without(new), "the trimmed tokenizer")
    length = {number: len(token) for token, number in words.ids.items()}
    before = after = letters = missed = 0
    for piece, old in held:
        ids = trial.encode(piece, add_special_tokens=False).ids
        otherwise = all(token in new for token in old) and ids != [new[token] for token in old]
        # a word that WordPiece did not know may be known without a piece that led it astray
        if otherwise or (words.kind != "WordPiece" and trial.decode(ids) != words.engine.decode(old)):
            what = f"{words.where}: without some tokens a text is cut or read otherwise"
            raise CheckpointError(what, "it is not trimmed: report this with the tokenizer's name")
        before, after = before + len(old), after + len(ids)
        letters += sum(length[token] for token in old)
        missed += sum(length[token] for token in old if token not in new)
    end = f"the text's last {sum(len(piece) for piece, _ in held):,} letters, with tokens that only its start chose"
    return f"{end}: {after / before - 1:.2%} more tokens; {missed / letters:.2%} of it stood in tokens that are gone"


# what else names tokens


def _config_changes(record: Mapping[str, Any], new: Mapping[int, int]) -> dict[str, Any]:
    """{dotted path: new value} of what names tokens in a config; negative numbers name none."""
    changes: dict[str, Any] = {}
    for path, value in values_with_ids(record):
        after = with_ids(path, value, new.__getitem__)
        changes |= {path: after} if after != value else {}
    if isinstance(decoder := record.get("added_tokens_decoder"), dict):
        digits = {key for key in decoder if key.isascii() and key.isdigit() and len(key) < 19}
        listed = ((str(new[int(key)]) if key in digits else key, entry) for key, entry in decoder.items())
        changes["added_tokens_decoder"] = dict(listed)
    return changes


def _beside(facts: Facts, words: TokenizerFile, new: Mapping[int, int]) -> dict[str, bytes]:
    """{file: new content} of the files that repeat the vocabulary."""

    read = facts.folder.read("vocab.txt", "merges.txt")
    texts = {name: text.decode("utf-8", "replace") for name, text in read.items()}
    made: dict[str, str] = {}
    names = filter(facts.folder.has, ("vocab.json", "added_tokens.json"))
    listed: dict[str, dict[str, Any]] = {name: json_object(facts.folder.path, name) for name in names}
    if "vocab.txt" in texts:
        lines = texts["vocab.txt"].removesuffix("\n").split("\n")
        listed["vocab.txt"] = {line.rstrip("\r"): number for number, line in enumerate(lines)}
    for name, ids in listed.items():
        other = next((token for token, number in ids.items() if words.ids.get(token, -1) != number), None)
        if other is not None:
            what = f"{facts.folder.path / name}: it gives {short(other)!r} another id than tokenizer.json"
            raise CheckpointError(what, "take away the one that is not this model's")
        left = {token: new[number] for token, number in ids.items() if number in new}
        made[name] = "".join(f"{token}\n" for token in left) if name == "vocab.txt" else json.dumps(left)
    if "merges.txt" in texts:
        kept = {"", *(piece for piece, number in words.pieces.items() if number in new)}
        lines = texts["merges.txt"].split("\n")
        lines = [ln for ln in lines if ln.startswith("#version") or {*ln.split(" "), ln.replace(" ", "")} <= kept]
        made["merges.txt"] = "\n".join(lines)
    return {name: content.encode() for name, content in made.items()}
