"""`trim`: drop the tokens that a text does not need from tables, tokenizer and configs.

Retained rows keep their bytes and their order, and get consecutive ids. A text whose tokens are all retained is cut
into the same tokens as before (`tokenizer_file.py`; docs/dev/details.md has the proof). Other text takes more tokens.
`trim` measures how many more on the last tenth of the text, with a vocabulary chosen from the first nine tenths.
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
from tiewise.checkpoint.rewrite.change import Change, NothingToDo, Pieces, gather_rows
from tiewise.checkpoint.rewrite.config_ids import id_values, padding_ids, renumber_config
from tiewise.checkpoint.rewrite.json_edits import edit_json_file
from tiewise.checkpoint.rewrite.registry import Option, verb
from tiewise.checkpoint.rewrite.retained_tokens import (
    CostOnText,
    TextUse,
    choose_tokens,
    cost_on_text,
    listed_tokens,
    read_use,
)
from tiewise.checkpoint.rewrite.token_rows import (
    ROWS_STAY,
    parts_of_tokens,
    resized_tensors,
    shift_of_positions,
    unknown_tables,
    vocab_size_changes,
)
from tiewise.checkpoint.rewrite.tokenizer_file import IdRecorder, TokenizerFile, renumber_tokens
from tiewise.checkpoint.rewrite.tokenizer_text import load_tokenizer
from tiewise.checkpoint.rewrite.vocabulary_files import trimmed_vocabularies
from tiewise.checkpoint.rules.rule import counted
from tiewise.checkpoint.stored import Reader, Stored
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError
from tiewise.core.measurement import percent
from tiewise.core.written_options import written_option

MOST_LISTED = 8  # tokens named in one line
CONFIGS = ("generation_config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
OTHER_TOKENIZERS = re.compile(r"\.(model(\.v\d+)?|spm|tiktoken)$|^tekken\.json$")  # formats that `trim` cannot rewrite

Configs = Mapping[str, Mapping[str, Any]]  # {file: its JSON object}


@verb(
    order=60,
    group="vocab",
    details="Text that is made of the tokens that stay is cut into the same tokens as before.",
    keeps_logits="same bytes",
    example="tied --size=35",
)
def trim(
    facts: Facts,
    *,
    text: Annotated[str | os.PathLike[str] | None, Option("Keep the tokens of this text.", metavar="FILE")] = None,
    keep: Annotated[
        str | os.PathLike[str] | None, Option("Also keep these: a token, or an id, on each line.", metavar="FILE")
    ] = None,
    size: Annotated[int | None, Option("Number of tokens to keep: the most frequent, then the smallest ids.")] = None,
    force: bool = False,
) -> Change:
    """Drop the tokens that a text does not need. Both ends lose their rows; tokenizer and configs get new ids.

    Special and added tokens, byte tokens and tokens that a config names are always retained. So are the ancestors of
    every retained token: the parts from which BPE merges it.

    >>> import tiewise  # `tied` is a folder with a vocabulary of 40
    >>> receipt = tiewise.checkpoint.trim("tied", "smaller", size=35)
    >>> receipt.bytes_before - receipt.bytes_after
    192

    Args:
        text: a text file; the tokens that occur in it are retained.
        keep: a file that lists further tokens to retain: a token on each line, or an id on each line.
        size: number of tokens to retain: first the most frequent of the text, then those with the smallest ids.
    """
    if (text, keep, size) == (None, None, None):
        options = [written_option(name) for name in ("text", "keep", "size")]
        raise CheckpointError("the tokens to keep are missing", f"give {options[0]}, {options[1]} or {options[2]}")
    if facts.folder.single or not facts.folder.has(CONFIG):
        problem = f"{facts.path}: config.json or tokenizer.json is missing"
        raise CheckpointError(problem, "give a folder that has both")
    parts = _parts(facts)
    tokenizer_file = TokenizerFile(facts.folder.path)
    configs = {name: json_object(facts.folder.source, name) for name in (CONFIG, *CONFIGS) if facts.folder.has(name)}
    required_ids = _tokens_that_must_stay(facts, tokenizer_file, configs, keep)
    _require_sizes(facts, tokenizer_file, required_ids, parts[0].rows, size)

    use = TextUse()
    if text is not None:
        use = read_use(tokenizer_file, text)
    retained_ids = choose_tokens(tokenizer_file, required_ids, use.counts, size)
    if len(retained_ids) == parts[0].rows:
        problem = f"{facts.path}: all {len(retained_ids):,} tokens would stay"
        raise NothingToDo(problem, "give a smaller text, or a size")
    result = _TrimmedCheckpoint(facts, parts, tokenizer_file, configs, sorted(retained_ids))
    _require_positions(facts, result.new_ids)
    notes = [_note_on_rows(required_ids)]
    if text is not None:
        notes.append(_note_on_text(result, use.counts, text))
    cost = _cost(tokenizer_file, required_ids, use, size)
    if cost is not None:
        notes.append(cost.details())
    notes += _notes_on_other_tokenizers(result)
    texts = result.texts()
    notes.append(f"new ids are written into {', '.join([CONFIG, *texts])}")
    return Change(
        ROWS_STAY,
        put=resized_tensors(facts, parts, len(retained_ids), result.pieces),
        config=result.config(),
        texts=texts,
        leave=result.other_tokenizers(),
        notes=tuple(notes),
        summary=_summary(result, cost),
        flaws=result.flaws,
    )


class _TrimmedCheckpoint:
    """Tensors, tokenizer and configs with the retained tokens, and a check of the result."""

    def __init__(
        self,
        facts: Facts,
        parts: tuple[Stored, ...],
        tokenizer_file: TokenizerFile,
        configs: Configs,
        retained_ids: list[int],
    ) -> None:
        """Give the retained tokens new ids in the order of their old ids.

        Args:
            retained_ids: old ids of the retained tokens, in ascending order.
        """
        self.facts = facts
        self.parts = parts
        self.tokenizer_file = tokenizer_file
        self.configs = configs
        self.rows = retained_ids
        self.new_ids = {old: number for number, old in enumerate(retained_ids)}

    def pieces(self, part: Stored) -> Pieces:
        """Yield the bytes of the retained rows of a tensor."""
        return gather_rows(part, self.rows)

    def texts(self) -> dict[str, bytes]:
        """Return {file: new content} of every changed text file except config.json."""
        texts = {"tokenizer.json": self.tokenizer_file.without(self.new_ids)}
        texts |= trimmed_vocabularies(self.facts, self.tokenizer_file, self.new_ids)
        for name, record in self.configs.items():
            if name == CONFIG:
                continue
            changes = renumber_config(record, self.new_ids)
            if changes:
                texts[name] = edit_json_file(self.facts.folder, name, changes)
        return texts

    def config(self) -> dict[str, Any]:
        """Return the changes of config.json, as {dotted path: new value}."""
        sizes = vocab_size_changes(self.facts, self.parts[0].rows, len(self.rows))
        return renumber_config(self.configs[CONFIG], self.new_ids) | sizes

    def other_tokenizers(self) -> frozenset[str]:
        """Return the names of tokenizer files in other formats, which have only the old ids."""
        return frozenset(name for name in self.facts.folder.files if OTHER_TOKENIZERS.search(name))

    def flaws(self, folder: Path) -> Iterator[str]:
        """Yield each difference between the finished result and the plan.

        The check covers the tokenizer and every retained row.
        """
        expected = renumber_tokens(self.tokenizer_file.ids, self.new_ids)
        tokenizer = load_tokenizer((folder / "tokenizer.json").read_bytes(), "the result was not kept: its tokenizer")
        if tokenizer.get_vocab(with_added_tokens=True) != expected:
            yield "its tokenizer has other tokens than planned"
        tensors = open_folder(folder).tensors
        for part in self.parts:
            yield from self._changed_rows(part, tensors[part.name])

    def _changed_rows(self, part: Stored, result: Stored) -> Iterator[str]:
        """Yield a sentence for each piece of a tensor that the result stores with other bytes."""
        offset = 0
        with Reader(result) as reader:
            for piece in self.pieces(part):
                written = bytearray(len(piece))
                reader.read_into(memoryview(written), offset)
                offset += len(piece)
                if written != piece:
                    yield f"a row of {short(part.name)} differs"


def _parts(facts: Facts) -> tuple[Stored, ...]:
    """Return every tensor with a row for each token, as [V, …].

    Raise if `trim` cannot change one of them.
    """
    parts = parts_of_tokens(facts, "trim")
    for other in facts.roles.indexed_tensors:
        if not other.has_row_per_token:
            problem = f"{facts.path}: {short(other.tensor.name)} is a {other.role}, which other ids would read wrongly"
            raise CheckpointError(
                problem, "nothing here trims it: train the model with the vocabulary that it shall have"
            )
    for problem in unknown_tables(facts, parts.names, parts.rows):
        raise CheckpointError(problem, "trim cannot change it: its rows may belong to tokens")
    return parts.all


def _require_positions(facts: Facts, new_ids: Mapping[int, int]) -> None:
    """Raise if the id of padding changes and the class counts positions from it."""
    change = shift_of_positions(facts, lambda path, number: new_ids.get(number))
    if change is not None:
        raise CheckpointError(change.problem, "nothing here trims it: some ids before padding have no token")


def _tokens_that_must_stay(
    facts: Facts, tokenizer_file: TokenizerFile, configs: Configs, keep: str | os.PathLike[str] | None
) -> set[int]:
    """Return the closed set of tokens that must be retained.

    The tokenizer needs them, a config names them, or the file `keep` lists them.

    Raises:
        CheckpointError: a config is nested too deep, or it names every token.
    """
    in_configs = IdRecorder()
    for name, record in configs.items():
        try:
            renumber_config(record, in_configs)
        except RecursionError:
            problem = f"{facts.folder.path / name}: it is nested deeper than any config"
            raise CheckpointError(problem, "take it from its source again") from None
    for name, record in configs.items():
        _require_no_vocabulary(facts.folder.path / name, record, tokenizer_file)
    required_ids = tokenizer_file.always | in_configs.keys()
    if facts.class_ends.counts_from_pad:  # positions start after this id, so it must stay as it is
        for number in padding_ids(facts.config).values():
            required_ids |= {token_id for token_id in tokenizer_file.ids.values() if token_id < number}
    if keep is not None:
        required_ids |= listed_tokens(Path(keep), tokenizer_file)
    return tokenizer_file.closed(required_ids)


def _require_no_vocabulary(path: Path, config: Mapping[str, Any], tokenizer_file: TokenizerFile) -> None:
    """Raise if the config in the file `path` names every token."""
    for place, value in id_values(config):
        if isinstance(value, Mapping) and len(value) >= len(tokenizer_file.ids):
            problem = f"{path}: {place} names every token, those of pictures among them"
            raise CheckpointError(problem, "this model cannot be trimmed")


def _require_sizes(
    facts: Facts, tokenizer_file: TokenizerFile, required_ids: set[int], rows: int, size: int | None
) -> None:
    """Raise if a token lacks a row, or if `size` cannot be reached."""
    for number in required_ids.union(tokenizer_file.ids.values()):
        if not 0 <= number < rows:
            problem = f"{facts.path}: its tokenizer or config names token {number}, and its tables have {rows:,} rows"
            raise CheckpointError(
                problem, "tiewise vocab resize makes rows for all, or take it out of the file that names it"
            )
    if size is not None and not len(required_ids) <= size < rows:
        problem = f"{facts.path}: size is {size:,}, of {rows:,} rows"
        raise CheckpointError(problem, f"choose {len(required_ids):,}, which must stay, up to {rows - 1:,}")


def _summary(result: _TrimmedCheckpoint, cost: CostOnText | None) -> str:
    """Return the change in one clause: retained tokens, and any measured cost."""
    summary = f"{len(result.rows):,} of {result.parts[0].rows:,} tokens stay"
    if cost is None:
        return summary
    return f"{summary}. {cost.sentence()}"


def _note_on_rows(required_ids: set[int]) -> str:
    """Return a sentence on the tokens that always stay, and on text of retained tokens."""
    always = f"{counted(len(required_ids), 'token')} must always stay (bytes, special tokens, tokens in configs)"
    return f"{always}; a text that consists of retained tokens is cut into the same tokens as before"


def _note_on_text(result: _TrimmedCheckpoint, counts: Counter[int], text: str | os.PathLike[str]) -> str:
    """Return a sentence on the dropped tokens of the text: their share, and the most frequent."""
    gone = [token for token, _ in counts.most_common() if token not in result.new_ids]
    if not gone:
        return f"every token of {short(text)} stays"
    share = sum(counts[token] for token in gone) / max(1, counts.total())
    decode = result.tokenizer_file.engine.decode
    listed = ", ".join(f"{decode([token])!r} {counts[token]:,} times" for token in gone[:MOST_LISTED])
    return f"{percent(share)} of the tokens of {short(text)} are removed ones, most often {short(listed, 200)}"


def _cost(tokenizer_file: TokenizerFile, required_ids: set[int], use: TextUse, size: int | None) -> CostOnText | None:
    """Return the cost on the end of the text; None if the text is too short.

    For this measurement, the retained tokens are chosen from the rest of the text.
    """
    if not use.early_counts or not use.last_pieces:
        return None
    early_choice = choose_tokens(tokenizer_file, required_ids, use.early_counts, size)
    return cost_on_text(tokenizer_file, early_choice, use.last_pieces)


def _notes_on_other_tokenizers(result: _TrimmedCheckpoint) -> list[str]:
    """Return a note on the tokenizer files that the result lacks, if there are any."""
    names = sorted(result.other_tokenizers())
    if not names:
        return []
    return [f"left out, because they have only the old ids: {', '.join(map(short, names))}"]
