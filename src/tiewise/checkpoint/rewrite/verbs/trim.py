"""`trim`: a smaller vocabulary in tables, tokenizer and configs, of the tokens that a text needs.

Rows that stay keep their bytes and their order; ids close ranks. Text that was made of the tokens that stay alone is
cut into them as before (`tokenizer_file.py`, and docs/trim.md for the proof). Other text takes more tokens. How many
more is measured on the last tenth of the text, with tokens that the rest of it alone chose.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import CONFIG, json_object, open_folder
from tiewise.checkpoint.rewrite.change import Change, NothingToDo, Pieces, gathered
from tiewise.checkpoint.rewrite.config_ids import renumbered, values_with_ids
from tiewise.checkpoint.rewrite.json_edits import edited_file
from tiewise.checkpoint.rewrite.kept_tokens import TextUse, choose_tokens, cost_on_text, listed_tokens, read_use
from tiewise.checkpoint.rewrite.registry import Option, verb
from tiewise.checkpoint.rewrite.token_rows import ROWS_STAY, parts_of_tokens, sizes_of, unknown_tables, with_rows
from tiewise.checkpoint.rewrite.tokenizer_file import Noted, TokenizerFile, tokens_with_new_ids
from tiewise.checkpoint.rewrite.tokenizer_text import loaded
from tiewise.checkpoint.rewrite.vocabulary_files import trimmed_vocabularies
from tiewise.checkpoint.stored import Reader, Stored
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError

MOST_LISTED = 8  # tokens in one line
CONFIGS = ("generation_config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
OTHER_TOKENIZERS = re.compile(r"\.(model(\.v\d+)?|spm|tiktoken)$|^tekken\.json$")  # which nothing here rewrites

Configs = Mapping[str, Mapping[str, Any]]  # {file: its JSON object}


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
    if (text, keep, size) == (None, None, None):
        raise CheckpointError("nothing says which tokens stay", "give text, keep or size")
    if facts.folder.single or not facts.folder.has(CONFIG):
        what = f"{facts.path}: no folder with config.json and tokenizer.json"
        raise CheckpointError(what, "give the checkpoint's own folder, with both")
    parts = _parts(facts)
    words = TokenizerFile(facts.folder.path)
    configs = {name: json_object(facts.folder.path, name) for name in (CONFIG, *CONFIGS) if facts.folder.has(name)}
    must = _tokens_that_must_stay(facts, words, configs, keep)
    _require_sizes(facts, words, must, parts[0].rows, size)

    use = TextUse()
    if text is not None:
        use = read_use(words, text)
    stay = choose_tokens(words, must, use.counts, size)
    if len(stay) == parts[0].rows:
        what = f"{facts.path}: all {len(stay):,} tokens would stay"
        raise NothingToDo(what, "give a smaller text, or a size")
    result = _Trimmed(facts, parts, words, configs, sorted(stay))
    notes = [_note_on_rows(result, must)]
    if text is not None:
        notes.append(_note_on_text(result, use.counts, text))
    notes += _notes_on_cost(words, must, use, size)
    notes += _notes_on_other_tokenizers(result)
    texts = result.texts()
    notes.append(f"{', '.join([CONFIG, *texts])}: written with the new ids")
    return Change(
        ROWS_STAY,
        put=with_rows(facts, parts, len(stay), result.pieces),
        config=result.config(),
        texts=texts,
        leave=result.other_tokenizers(),
        notes=tuple(notes),
        flaws=result.flaws,
    )


class _Trimmed:
    """Tensors, tokenizer and configs with the tokens that stay, and a check of the result."""

    def __init__(
        self, facts: Facts, parts: tuple[Stored, ...], words: TokenizerFile, configs: Configs, stay: list[int]
    ) -> None:
        """Number the tokens that stay in the order of their old ids; `stay` ascends."""
        self.facts = facts
        self.parts = parts
        self.words = words
        self.configs = configs
        self.rows = stay
        self.new_ids = {old: number for number, old in enumerate(stay)}

    def pieces(self, part: Stored) -> Pieces:
        """Yield the bytes of a part's rows that stay."""
        return gathered(part, self.rows)

    def texts(self) -> dict[str, bytes]:
        """Return {file: new content} of every file next to the tensors that changes, but config.json."""
        texts = {"tokenizer.json": self.words.without(self.new_ids)}
        texts |= trimmed_vocabularies(self.facts, self.words, self.new_ids)
        for name, record in self.configs.items():
            if name == CONFIG:
                continue
            changes = renumbered(record, self.new_ids)
            if changes:
                texts[name] = edited_file(self.facts.folder, name, changes)
        return texts

    def config(self) -> dict[str, Any]:
        """Return {dotted path: new value} of config.json."""
        sizes = sizes_of(self.facts, self.parts[0].rows, len(self.rows))
        return renumbered(self.configs[CONFIG], self.new_ids) | sizes

    def other_tokenizers(self) -> frozenset[str]:
        """Return the names of tokenizer files in other formats, which know the old tokens only."""
        return frozenset(name for name in self.facts.folder.files if OTHER_TOKENIZERS.search(name))

    def flaws(self, folder: Path) -> Iterator[str]:
        """Yield how the finished result differs from the plan: its tokenizer, and every row that stays."""
        expected = tokens_with_new_ids(self.words.ids, self.new_ids)
        tokenizer = loaded((folder / "tokenizer.json").read_bytes(), "the result was not kept: its tokenizer")
        if tokenizer.get_vocab(with_added_tokens=True) != expected:
            yield "its tokenizer has other tokens than planned"
        tensors = open_folder(folder).tensors
        for part in self.parts:
            yield from self._changed_rows(part, tensors[part.name])

    def _changed_rows(self, part: Stored, result: Stored) -> Iterator[str]:
        """Yield a sentence for each piece of a part's rows that the result stores otherwise."""
        offset = 0
        with Reader(result) as reader:
            for piece in self.pieces(part):
                written = bytearray(len(piece))
                reader.into(memoryview(written), offset)
                offset += len(piece)
                if written != piece:
                    yield f"a row of {short(part.name)} differs"


def _parts(facts: Facts) -> tuple[Stored, ...]:
    """Return every tensor with a row for each token, as [V, …].

    Refuse a checkpoint with one that nothing can trim.
    """
    parts = parts_of_tokens(facts, "trim")
    for other in facts.roles.others:
        if not other.by_id:
            what = f"{facts.path}: {short(other.tensor.name)} is a {other.role}, which other ids would read wrongly"
            raise CheckpointError(what, "nothing here trims it: train the model with the vocabulary that it shall have")
    for what in unknown_tables(facts, parts.names, parts.rows):
        raise CheckpointError(what, "nothing here trims it, and its rows may belong to tokens")
    return parts.all


def _tokens_that_must_stay(
    facts: Facts, words: TokenizerFile, configs: Configs, keep: str | os.PathLike[str] | None
) -> set[int]:
    """Return the closed set of tokens that must stay.

    The tokenizer needs them, a config names them, or the file `keep` lists them.

    Raises:
        CheckpointError: a config that is nested too deep, or one that names every token.
    """
    in_configs = Noted()
    for name, record in configs.items():
        try:
            renumbered(record, in_configs)
        except RecursionError:
            what = f"{facts.folder.path / name}: it is nested deeper than any config"
            raise CheckpointError(what, "take it from its source again") from None
    for name, record in configs.items():
        _require_no_vocabulary(facts.folder.path / name, record, words)
    must = words.always | in_configs.keys()
    if keep is not None:
        must |= listed_tokens(Path(keep), words)
    return words.closed(must)


def _require_no_vocabulary(path: Path, config: Mapping[str, Any], words: TokenizerFile) -> None:
    """Raise if a config, the file `path`, names every token."""
    for place, value in values_with_ids(config):
        if isinstance(value, Mapping) and len(value) >= len(words.ids):
            what = f"{path}: {place} names every token, those of pictures among them"
            raise CheckpointError(what, "it does not say which may go: this model is not trimmed")


def _require_sizes(facts: Facts, words: TokenizerFile, must: set[int], rows: int, size: int | None) -> None:
    """Raise if a token lacks a row, or if `size` cannot be reached."""
    for number in must.union(words.ids.values()):
        if not 0 <= number < rows:
            what = f"{facts.path}: its tokenizer or config names token {number}, and its tables have {rows:,} rows"
            raise CheckpointError(what, "tiewise resize makes rows for all, or take it out of the file that names it")
    if size is not None and not len(must) <= size < rows:
        what = f"{facts.path}: size is {size:,}, of {rows:,} rows"
        raise CheckpointError(what, f"choose {len(must):,}, which must stay, up to {rows - 1:,}")


def _note_on_rows(result: _Trimmed, must: set[int]) -> str:
    """Say how many tokens stay."""
    stay = f"{len(result.rows):,} of {result.parts[0].rows:,} tokens stay, {len(must):,} of them in any case"
    return f"{stay}; their rows keep every byte, and text that was made of them alone is cut into the same tokens"


def _note_on_text(result: _Trimmed, counts: Counter[int], text: str | os.PathLike[str]) -> str:
    """Say which share of the text's tokens are gone, and name the most frequent of these."""
    gone = [token for token, _ in counts.most_common() if token not in result.new_ids]
    if not gone:
        return f"{short(text)}: each of its tokens stays"
    share = sum(counts[token] for token in gone) / max(1, counts.total())
    decode = result.words.engine.decode
    listed = ", ".join(f"{decode([token])!r} {counts[token]:,} times" for token in gone[:MOST_LISTED])
    return f"{short(text)}: {share:.2%} of its tokens are gone, most often {short(listed, 200)}"


def _notes_on_cost(words: TokenizerFile, must: set[int], use: TextUse, size: int | None) -> list[str]:
    """Return a note on the tokens that the end of a text takes more, if the text is long enough.

    The tokens that stay are chosen for this by the rest of the text alone.
    """
    if not use.early_counts or not use.last_pieces:
        return []
    early_choice = choose_tokens(words, must, use.early_counts, size)
    return [cost_on_text(words, early_choice, use.last_pieces)]


def _notes_on_other_tokenizers(result: _Trimmed) -> list[str]:
    """Return a note on the tokenizer files that stay behind, if there are any."""
    names = sorted(result.other_tokenizers())
    if not names:
        return []
    return [f"{', '.join(map(short, names))}: stays behind, since it knows the old tokens only"]
