"""`transplant`: replace a checkpoint's vocabulary by another tokenizer's, without training.

    token of the new vocabulary                        its row, at both ends and in every head bias
    shared: an old token writes the same bytes         the old token's row, bit for bit
    special, with a role that an old token has         that token's row, bit for bit
    other, with a donor                                Σ cⱼ rowⱼ over a few shared tokens j; the cⱼ fit its row in the
                                                       donor by matching pursuit (arXiv:2506.06607)
    other, without a donor                             halfway from m to the mean of the rows of its pieces: the
                                                       longest old tokens that write it, from the left
    other, without pieces                              m, the mean of the rows of all shared tokens

A donor is a model that has the new vocabulary. One set of coefficients serves input, output and bias, so a tied model
stays tied. The reason for halfway: the mean of the pieces has their logits, and a long token is rarer than its pieces
(docs/dev/details.md has the figures). Rows are computed while they are written. Memory holds the rows of the donor's
input table.

Orthogonal matching pursuit finds each target as a combination of few anchors (Pati, Rezaiifar & Krishnaprasad 1993):

    r = x, S = {}           repeat: S ∪= {argmaxⱼ |⟨aⱼ, r⟩| / ‖aⱼ‖},  c = argmin ‖x − Σ_S cⱼ aⱼ‖,  r = x − Σ_S cⱼ aⱼ

The chosen anchors form an orthonormal basis (Gram–Schmidt, twice, which is enough: Giraud et al. 2005). A step then
costs only products with the anchors. One triangular system at the end gives the coefficients.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import Folder, open_folder
from tiewise.checkpoint.numeric_ends import require_readable_tables
from tiewise.checkpoint.rewrite.change import Change, Pieces, refuse, require_plain_head
from tiewise.checkpoint.rewrite.config_ids import id_values, replace_ids
from tiewise.checkpoint.rewrite.json_edits import edit_json_file
from tiewise.checkpoint.rewrite.registry import Option, verb
from tiewise.checkpoint.rewrite.token_rows import (
    ROWS_STAY,
    notes_on_other_tables,
    parts_of_tokens,
    resized_tensors,
    shift_of_positions,
    vocab_size_changes,
)
from tiewise.checkpoint.rules.rule import counted
from tiewise.checkpoint.stored import CHUNK_BYTES, Reader, Stored, rounded, widened
from tiewise.checkpoint.token_bytes import ROLES, TokenBytes, read_token_bytes
from tiewise.checkpoint.tokenizer_ids import TOKENIZER_FILES
from tiewise.checkpoint.untrusted import items_of, require_memory, short
from tiewise.core.errors import CheckpointError
from tiewise.core.measurement import percent
from tiewise.core.progress import report_progress

GENERATION = "generation_config.json"
ROWS_AT_ONCE = 256  # rows computed in one block
BLOCK_BYTES = 64 * 2**20  # memory for one block of targets, in addition to the anchors
ROUNDING_SHARE = 1e-6  # a residual or direction shorter than this share of its vector is rounding error

Floats = NDArray[np.float32] | NDArray[np.float64]
Row = NDArray[np.float64] | np.float64  # a row [E] of a table, or a number of a bias


@dataclass(frozen=True)
class Mix:
    """A combination of old rows."""

    rows: NDArray[np.int64]  # numbers of the old rows
    coefficients: NDArray[np.float64]  # one for each of these rows


@dataclass(frozen=True)
class Recipe:
    """Sources of all new rows: copies and combinations of old rows.

    A new row is an old row, or middle · m + its mix, where m is the mean of all old rows that are copied.
    """

    copied: NDArray[np.int64]  # [V'] number of the old row that the new row equals; -1 for a computed row
    middle: NDArray[np.float64]  # [V'] coefficient of m in a computed row
    mixed: dict[int, Mix]  # by new id; a computed row without an entry is middle · m

    @property
    def shared(self) -> int:
        """Number of new rows that equal an old one."""
        return int((self.copied >= 0).sum())

    def lacks(self, number: int) -> bool:
        """Return True if the row of a new id is neither copied nor mixed yet."""
        return bool(self.copied[number] < 0) and number not in self.mixed

    def pieces(self, part: Stored) -> Pieces:
        """Yield the bytes of the new rows [V', …] of a tensor, in order."""
        with Reader(part) as reader:
            mean = self._mean(reader)
            step = max(1, min(ROWS_AT_ONCE, CHUNK_BYTES // max(1, reader.row_bytes)))
            for start in range(0, len(self.copied), step):
                copied = self.copied[start : start + step]
                rows = reader.take(np.maximum(copied, 0))
                for at in np.flatnonzero(copied < 0):
                    row = self._mixed_row(reader, start + int(at), mean)
                    rows[at] = rounded(np.atleast_1d(row), part.dtype).reshape(np.shape(row))
                yield rows.tobytes()

    def _mean(self, reader: Reader) -> Row:
        """Return m, the mean of all old rows that are copied."""
        shared = np.unique(self.copied[self.copied >= 0])
        spans = np.array_split(shared, -(-len(shared) // ROWS_AT_ONCE))
        total: Row = sum(widened(reader.take(ids)).sum(axis=0, dtype=np.float64) for ids in spans)
        mean: Row = total / len(shared)
        return mean

    def _mixed_row(self, reader: Reader, number: int, mean: Row) -> Row:
        """Return a computed row: its share of the mean plus its mix of old rows."""
        row: Row = self.middle[number] * mean
        mix = self.mixed.get(number)
        if mix is not None:
            old_rows = widened(reader.take(mix.rows)).astype(np.float64)
            row = row + np.tensordot(mix.coefficients, old_rows, 1)
        return row


@verb(
    order=70,
    group="vocab",
    details="The rows of the others are made of these, without training; `tiewise heal` trains them.",
    logits_differ="the vocabulary is another one",
    measures_text=True,
    example="tied --tokenizer=untied",
)
def transplant(
    facts: Facts,
    *,
    tokenizer: Annotated[str | os.PathLike[str], Option("Folder of the new tokenizer.", metavar="DIR")],
    donor: Annotated[
        str | os.PathLike[str] | None, Option("A model that has it: rows combine as there.", metavar="MODEL")
    ] = None,
    atoms: Annotated[int, Option("With --donor: shared tokens in one combination at most.")] = 64,
    force: bool = False,
) -> Change:
    """Replace a checkpoint's vocabulary by another tokenizer's. Tokens of both vocabularies keep their rows.

    The rows of other tokens are combinations of these, without training (Goddard and Fernandes Neto 2025,
    arXiv:2506.06607). With `force`, other tables with as many rows stay as they are.

    >>> import tiewise  # the tokenizers of `tied` and `untied` have the same tokens
    >>> print(tiewise.checkpoint.transplant("tied", "other-tokenizer", tokenizer="untied").summary)
    34 of 34 tokens keep their rows; 0 get new rows

    Args:
        tokenizer: folder of the new tokenizer; its files replace the old tokenizer's in the result.
        donor: a model with this tokenizer. The row of a new token then combines shared rows as its row in the donor
            does.
        atoms: the largest number of shared tokens in one combination. It is at most an eighth of the donor's width,
            because as many rows as the width reproduce any row exactly, and thus carry no information.
    """
    if atoms < 1:
        raise CheckpointError(f"atoms is {atoms}", "it must be 1 or more")
    forced = require_plain_head(facts, "transplant", force)
    parts = _parts(facts)
    other_notes = notes_on_other_tables(facts, {part.name for part in parts}, parts[0].rows, force)
    new_folder = open_folder(tokenizer)
    old, new = read_token_bytes(facts.folder), read_token_bytes(new_folder)
    if old.rows > parts[0].rows:
        rows = f"its tables have {parts[0].rows:,} rows"
        problem = f"{facts.path}: its tokenizer gives ids up to {old.rows - 1:,}, and {rows}"
        raise CheckpointError(problem, "run tiewise check on it")
    recipe = Recipe(shared_rows(old, new), np.ones(new.rows), {})
    if not recipe.shared:
        raise CheckpointError(
            f"{new_folder.path}: its vocabulary shares no token with {facts.path}", "choose another tokenizer"
        )
    notes = [*forced]
    if donor is not None:
        notes.append(_mix_by_donor(recipe, new, open_folder(donor), atoms))
    notes += _mix_by_spelling(recipe, old, new)
    notes += _notes_on_rest(recipe, new)

    configs = _with_new_ids(facts, recipe, new)
    notes += _require_positions(facts, configs.config, force)
    notes += configs.notes()
    texts = new_folder.read(*TOKENIZER_FILES) | configs.texts
    old_files = frozenset(name for name in TOKENIZER_FILES if facts.folder.has(name))
    return Change(
        ROWS_STAY,
        put=resized_tensors(facts, parts, new.rows, recipe.pieces),
        config=configs.config | vocab_size_changes(facts, parts[0].rows, new.rows),
        texts=texts,
        leave=old_files - texts.keys(),
        notes=(*notes, *other_notes),
        summary=_summary(recipe, new),
    )


def _require_positions(facts: Facts, changes: Mapping[str, Any], force: bool) -> tuple[str, ...]:
    """Raise if the new vocabulary would shift the positions of all tokens.

    With `force`, return the problem as a note instead.

    Args:
        changes: {dotted path in config.json: new value}.
    """
    change = shift_of_positions(facts, lambda path, number: changes.get(path, number))
    if change is None:
        return ()
    return refuse(change.problem, f"give a tokenizer whose padding token is {change.old}", force)


def _parts(facts: Facts) -> tuple[Stored, ...]:
    """Return the tables of both ends and the biases, as [V, …].

    Raise if the model has further tables of tokens.
    """
    for other in facts.roles.indexed_tensors:
        problem = f"{facts.path}: {short(other.tensor.name)} ({other.role}) is made for the old vocabulary"
        raise CheckpointError(problem, "transplant works only if no further table has a row for each token")
    return parts_of_tokens(facts, "transplant").all


# sources of new rows


def shared_rows(old: TokenBytes, new: TokenBytes) -> NDArray[np.int64]:
    """Return the old id whose row each new id takes, as [V'].

    It is -1 if there is none.

    If two old tokens write the same bytes, the one with the same spelling is taken, else the later one. SentencePiece
    lists letters after the byte tokens that write the same bytes.
    """
    copied = np.full(new.rows, -1, np.int64)
    by_bytes = {writes: number for number, writes in old.writes.items()}
    by_piece = {piece: number for number, piece in old.pieces.items()}
    for number, piece in new.pieces.items():
        alike, writes = by_piece.get(piece, -1), new.writes.get(number)
        if writes is None:
            copied[number] = _shared_special(number, alike, old, new)
        elif old.writes.get(alike) == writes:
            copied[number] = alike
        else:
            copied[number] = by_bytes.get(writes, -1)
    return copied


def _shared_special(number: int, alike: int, old: TokenBytes, new: TokenBytes) -> int:
    """Return the old id whose row a new special token takes, -1 if there is none.

    Args:
        number: id of the new token.
        alike: id of the old token with the same spelling, -1 if there is none.
    """
    if alike >= 0 and alike not in old.writes:
        return alike
    for role in ROLES:  # a token may have several roles; `ROLES` begins with the one that most models have
        if new.roles.get(role) == number and role in old.roles:
            return old.roles[role]
    return -1


def _mix_by_spelling(recipe: Recipe, old: TokenBytes, new: TokenBytes) -> list[str]:
    """Add the rows of new tokens that old tokens spell to a recipe.

    Return a note on them; the list is empty if there are none.
    """
    id_of = {writes: number for number, writes in old.writes.items()}
    longest = max(map(len, id_of), default=0)
    count = 0
    for number, writes in new.writes.items():
        if not recipe.lacks(number):
            continue
        pieces = spell(writes, id_of, longest)
        if pieces:
            share = 0.5 / len(pieces)
            recipe.mixed[number] = Mix(np.array(pieces), np.full(len(pieces), share))
            recipe.middle[number] = 0.5
            count += 1
    if not count:
        return []
    return [f"{counted(count, 'row')}: the mean of the old tokens that spell it, halfway to the mean of shared rows"]


def spell(writes: bytes, id_of: dict[bytes, int], longest: int) -> list[int]:
    """Return the ids of old tokens that together write these bytes.

    From the left, each token is the longest that continues the bytes. Bytes that no token writes are skipped.

    Args:
        writes: bytes of the new token.
        id_of: {bytes that an old token writes: its id}.
        longest: number of bytes of the longest old token.
    """
    tokens: list[int] = []
    start = 0
    while start < len(writes):
        for end in range(min(len(writes), start + longest), start, -1):
            if writes[start:end] in id_of:
                tokens.append(id_of[writes[start:end]])
                start = end
                break
        else:
            start += 1
    return tokens


def _summary(recipe: Recipe, new: TokenBytes) -> str:
    """Return the change in one clause: tokens with their old rows, tokens with new ones."""
    rest = len(new.pieces) - recipe.shared
    return f"{recipe.shared:,} of {len(new.pieces):,} tokens keep their rows; {rest:,} get new rows"


def _notes_on_rest(recipe: Recipe, new: TokenBytes) -> list[str]:
    """Return notes on new rows that are neither copied nor mixed."""
    notes = []
    residual = len(new.pieces) - recipe.shared - len(recipe.mixed)
    if residual:
        notes.append(
            f"{counted(residual, 'row')}: the mean of shared rows, as the old vocabulary cannot spell the token"
        )
    holes = new.rows - len(new.pieces)
    if holes:
        notes.append(f"{counted(holes, 'row')} without a token: that mean too; the new vocabulary leaves out ids")
    return notes


def _mix_by_donor(recipe: Recipe, new: TokenBytes, folder: Folder, atoms: int) -> str:
    """Add rows that combine shared rows as the donor's do to a recipe.

    Return a note on them.
    """
    ids, rows = _rows_of_donor(new, folder)
    is_sound = np.isfinite(rows).all(axis=1) & rows.any(axis=1)
    is_shared = recipe.copied[ids] >= 0
    anchors, targets = is_sound & is_shared, is_sound & ~is_shared
    if not anchors.any():
        raise CheckpointError(f"{folder.path}: no shared token has a row in use", "leave --donor out")
    most = min(atoms, max(1, rows.shape[1] // 8))
    chosen, coefficients = pursue(rows[anchors], rows[targets], most, "matching rows of the donor")
    left = []  # for each target, the residual as a share of its length
    for number, row, shared, c in zip(ids[targets], rows[targets], ids[anchors][chosen], coefficients, strict=True):
        recipe.mixed[int(number)] = Mix(recipe.copied[shared], c)
        recipe.middle[number] = 0.0
        difference = row - c @ rows[np.searchsorted(ids, shared)]
        left.append(float(np.linalg.norm(difference) / np.linalg.norm(row)))
    how = f"combine the rows of at most {chosen.shape[1]} shared tokens, as they do in {short(folder.path.name)}"
    residual = percent(float(np.median(left or [0.0])), digits=0)
    return f"{len(chosen):,} {how}; there {residual} of a row's length is left over (median)"


def _rows_of_donor(new: TokenBytes, folder: Folder) -> tuple[NDArray[np.int64], Floats]:
    """Return the ids [n] of tokens that write bytes, and their donor rows [n, D].

    The rows are those of the donor's input table.

    Raises:
        CheckpointError: the donor has another vocabulary, or its rows do not fit in memory.
    """
    if read_token_bytes(folder).pieces != new.pieces:
        raise CheckpointError(
            f"{folder.path}: its vocabulary differs from the new tokenizer's", "give a donor with the same vocabulary"
        )
    table = require_readable_tables(Facts(folder), "take rows from")[0]
    # memory for the shared rows, for these with length 1, and for the other rows
    require_memory(8 * table.shape[1] * table.rows, f"{folder.path}: the rows of its table")
    ids = np.array([number for number in new.writes if number < table.rows], np.int64)
    with Reader(table) as reader:
        return ids, widened(reader.take(ids))


# token ids in configs


@dataclass(frozen=True)
class ConfigChanges:
    """Changes of the configs to the ids of the new vocabulary."""

    config: dict[str, Any]  # {dotted path: new value} of config.json
    texts: dict[str, bytes]  # {file: new content} of other configs
    lost: set[str]  # dotted paths whose token the new vocabulary lacks

    def notes(self) -> list[str]:
        """Return a note on the paths whose token the new vocabulary lacks, if there are any."""
        if not self.lost:
            return []
        return [f"{', '.join(sorted(self.lost))}: null now, because the new vocabulary lacks the token"]


def _with_new_ids(facts: Facts, recipe: Recipe, new: TokenBytes) -> ConfigChanges:
    """Return the changes of the token ids in config.json and generation_config.json."""
    new_ids: dict[int, int] = {}  # {old id: the first new id that takes its row}
    for number, row in enumerate(recipe.copied.tolist()):
        if row >= 0:
            new_ids.setdefault(row, number)
    changes = new_id_values(facts.config, new, new_ids)
    lost = _paths_of_none(changes)
    texts: dict[str, bytes] = {}
    if isinstance(facts.generation, dict) and facts.generation:
        ids = new_id_values(facts.generation, new, new_ids)
        texts[GENERATION] = edit_json_file(facts.folder, GENERATION, ids)
        lost |= _paths_of_none(ids)
    return ConfigChanges(changes, texts, lost)


def _paths_of_none(changes: Mapping[str, Any]) -> set[str]:
    """Return the paths whose new value is None."""
    return {path for path, value in changes.items() if value is None}


def new_id_values(record: Mapping[str, Any], new: TokenBytes, new_ids: dict[int, int]) -> dict[str, Any]:
    """Return {dotted path: new value} of every token id in a config.

    The value is None if the new vocabulary lacks the token.

    Args:
        new_ids: {old id: new id} of shared tokens.
    """
    changes: dict[str, Any] = {}
    for path, value in id_values(record):
        if value is None:
            continue
        key = path.rpartition(".")[2]
        if key.endswith(("token_id", "token_ids", "token_index")):
            changes[path] = _new_role_value(key.removesuffix("_id"), value, new, new_ids)
        else:  # lists and maps lose the entries whose tokens are gone
            changes[path] = replace_ids(path, value, new_ids.get) or None
    return changes


def _new_role_value(role: str, value: Any, new: TokenBytes, new_ids: dict[int, int]) -> Any:
    """Return the new value of a key such as `eos_token_id`.

    Its first id is the id of the role in the new vocabulary.

    Args:
        role: the key without its ending, for example "eos_token".
        value: one old id, or a list of old ids.
        new_ids: {old id: new id} of shared tokens.
    """
    old_ids = value
    if not isinstance(value, list):
        old_ids = [value]
    ids = []
    if role in new.roles:
        ids.append(new.roles[role])
        old_ids = old_ids[1:]
    ids += [new_ids[number] for number in items_of(int, old_ids) if number in new_ids]
    if not ids:
        return None
    if isinstance(value, list):
        return ids
    return ids[0]


# matching pursuit


def pursue(
    anchors: Floats, targets: Floats, most: int, task: str = "matching"
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Approximate each target by a combination of a few anchors (matching pursuit).

    Anchors are chosen in fp32, and combined in fp64.

    Args:
        anchors: [S, D], none of them zero.
        targets: [n, D].
        most: largest number of anchors for one target.
        task: name of the work, for the progress display.

    Returns:
        Indices of the chosen anchors [n, atoms], and coefficients [n, atoms] with atoms ≤ S and atoms ≤ D. A
        coefficient is 0 if a target needs fewer anchors.
    """
    most = min(most, *anchors.shape)
    lengths = np.sqrt(np.einsum("sd,sd->s", anchors, anchors, dtype=np.float64))
    unit = (anchors / lengths[:, None]).astype(np.float32)
    chosen = np.zeros((len(targets), most), np.int64)
    coefficients = np.zeros((len(targets), most))
    step = max(1, BLOCK_BYTES // (4 * len(anchors) + 8 * most * (anchors.shape[1] + most)))
    for start in range(0, len(targets), step):
        block = slice(start, start + step)
        x = targets[block].astype(np.float64)
        chosen[block], coefficients[block] = _pursue_block(anchors, lengths, unit, x, most)
        report_progress(task, min(start + step, len(targets)), len(targets))
    return chosen, coefficients


def _pursue_block(
    anchors: Floats, lengths: NDArray[np.float64], unit: NDArray[np.float32], x: NDArray[np.float64], most: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the result of `pursue` for a block of targets x [n, D].

    Args:
        anchors: [S, D].
        lengths: Euclidean lengths of the anchors, [S].
        unit: the anchors divided by their lengths, [S, D].
        most: largest number of anchors for one target.
    """
    n = np.arange(len(x))
    residual = x.copy()  # r
    least = ROUNDING_SHARE * np.linalg.norm(x, axis=1)
    basis = np.zeros((len(x), most, x.shape[1]))  # orthonormal basis of the chosen anchors
    triangle = np.tile(np.eye(most), (len(x), 1, 1))  # column j: coordinates of chosen anchor j in that basis
    chosen = np.zeros((len(x), most), np.int64)
    projections = np.zeros((len(x), most))  # coordinates of the targets in that basis
    for j in range(most):
        similarity = np.abs(residual.astype(np.float32) @ unit.T)
        similarity[n[:, None], chosen[:, :j]] = -1  # an anchor is chosen once
        chosen[:, j] = similarity.argmax(axis=1)
        new = anchors[chosen[:, j]] / lengths[chosen[:, j], None]
        for _ in range(2):
            part = np.einsum("njd,nd->nj", basis[:, :j], new)
            new -= np.einsum("nj,njd->nd", part, basis[:, :j])
            triangle[:, :j, j] += part
        length = np.linalg.norm(new, axis=1)
        # an anchor gets the coefficient 0 if the basis already contains it, or if the residual is small enough
        is_useful = (length > ROUNDING_SHARE) & (np.linalg.norm(residual, axis=1) > least)
        triangle[:, :j, j] *= is_useful[:, None]
        triangle[:, j, j] = np.where(is_useful, length, 1.0)
        basis[:, j] = np.where(is_useful[:, None], new / np.where(is_useful, length, 1.0)[:, None], 0.0)
        projections[:, j] = np.einsum("nd,nd->n", basis[:, j], residual)
        residual -= projections[:, j, None] * basis[:, j]
    solution = np.linalg.solve(triangle, projections[:, :, None])[:, :, 0]
    return chosen, solution / lengths[chosen]
