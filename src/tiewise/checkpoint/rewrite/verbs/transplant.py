"""`transplant`: another tokenizer's vocabulary, without training.

    token of the new vocabulary                        its row, at both ends and in every head bias
    in both vocabularies (it writes the same bytes)    the old token's, bit for bit
    special, of a role that the old one has too        that token's, bit for bit
    with a donor                                       Σ cⱼ rowⱼ over a few shared tokens j: what its row is of
                                                       theirs in the donor, by matching pursuit (arXiv:2506.06607)
    else                                               halfway from m to the mean of the rows of its pieces: the
                                                       longest old tokens that write it, from the left
    what is left                                       m, the mean of the rows of all shared tokens

A donor is a model that has the new vocabulary. One set of coefficients serves input, output and bias, so what was tied
stays tied. Halfway: a mean of pieces has their logits, and a long token is rarer than its pieces (docs/transplant.md
has the figures). Rows are made as they are written; of the donor, the rows of its input table are held.

Orthogonal matching pursuit finds each target as a combination of few anchors (Pati, Rezaiifar & Krishnaprasad 1993):

    r = x, S = {}           repeat: S ∪= {argmaxⱼ |⟨aⱼ, r⟩| / ‖aⱼ‖},  c = argmin ‖x − Σ_S cⱼ aⱼ‖,  r = x − Σ_S cⱼ aⱼ

The chosen anchors are kept as an orthonormal basis (Gram–Schmidt, twice, which is enough: Giraud et al. 2005), so that
a step costs its products with the anchors and no new solution; coefficients come from one triangular system at the end.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import TOKENIZER_FILES, Folder, open_folder
from tiewise.checkpoint.numeric_ends import readable
from tiewise.checkpoint.rewrite.change import Change, Pieces, require_plain_head
from tiewise.checkpoint.rewrite.config_ids import values_with_ids, with_ids
from tiewise.checkpoint.rewrite.file_plan import edited_file
from tiewise.checkpoint.rewrite.registry import Option, verb
from tiewise.checkpoint.rewrite.token_rows import KEPT, parts_of_tokens, sizes_of, still_to_do, with_rows
from tiewise.checkpoint.stored import CHUNK_BYTES, Reader, Stored, rounded, widened
from tiewise.checkpoint.token_bytes import ROLES, TokenBytes, read_token_bytes
from tiewise.checkpoint.untrusted import require_memory, short
from tiewise.core.errors import CheckpointError, progress

GENERATION = "generation_config.json"
AT_ONCE = 256  # rows that are made at a time
BLOCK_BYTES = 64 * 2**20  # held at a time beside the anchors
SMALL = 1e-6  # a residual or a new direction below this share of its vector is rounding


@dataclass(frozen=True)
class Recipe:
    """What each new row is made of."""

    copied: NDArray[np.int64]  # [V'] the old row that it equals; -1 where it is made
    middle: NDArray[np.float64]  # [V'] coefficient of m in a row that is made
    mixed: dict[int, tuple[NDArray[np.int64], NDArray[np.float64]]]  # new id → (old rows, their coefficients)


@verb(
    order=70,
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
    """Give a checkpoint another tokenizer's vocabulary: tokens that both have keep their rows.

    The rows of other tokens are made of these, without training. With `force` other tables with as many rows are left
    as they are.

    Args:
        tokenizer: folder of the new tokenizer; its files come with the result, and the old ones stay behind.
        donor: a model that has this tokenizer: rows of new tokens are then combined as they are in it.
        atoms: k, shared tokens in one combination at most; and no more than an eighth of the donor's width, for as many
            as it is wide make any row, and say nothing.
    """
    if atoms < 1:
        raise CheckpointError(f"atoms is {atoms}", "it must be 1 or more")
    forced = require_plain_head(facts, "transplant", force)
    for other in facts.roles.others:
        what = f"{facts.path}: {short(other.tensor.name)} ({other.role}) is made for the old vocabulary"
        raise CheckpointError(what, "only models whose two ends alone are indexed by tokens are transplanted")
    tables, biases, _ = parts_of_tokens(facts, "transplant")
    before = tables[0].rows
    others = still_to_do(facts, {part.name for part in (*tables, *biases)}, before, force)
    given = open_folder(tokenizer)
    old, new = read_token_bytes(facts.folder), read_token_bytes(given)
    if old.rows > before:
        what = f"{facts.path}: its tokenizer gives ids up to {old.rows - 1:,}, and its tables have {before:,} rows"
        raise CheckpointError(what, "tiewise check says what is wrong with it")
    recipe = Recipe(shared_rows(old, new), np.ones(new.rows), {})
    shared = int((recipe.copied >= 0).sum())
    if not shared:
        raise CheckpointError(f"{given.path}: no token writes what one of {facts.path} does", "choose another")
    notes = [f"{shared:,} of {len(new.pieces):,} tokens are in both vocabularies and keep their rows bit for bit"]
    if donor is not None:
        notes.append(_by_donor(recipe, new, open_folder(donor), atoms))
    combined, known = len(recipe.mixed), {writes: number for number, writes in old.writes.items()}
    longest = max(map(len, known), default=0)
    for number, writes in new.writes.items():
        if recipe.copied[number] < 0 and number not in recipe.mixed and (its := spelled(writes, known, longest)):
            recipe.mixed[number] = np.array(its), np.full(len(its), 0.5 / len(its))
            recipe.middle[number] = 0.5
    if made := len(recipe.mixed) - combined:
        notes.append(f"{made:,} get the mean of the old tokens that spell them, halfway to the mean of all shared rows")
    if rest := len(new.pieces) - shared - len(recipe.mixed):
        notes.append(f"{rest:,} are nothing that the old vocabulary spells: they get the mean of all shared rows")
    if holes := new.rows - len(new.pieces):
        notes.append(f"{holes:,} rows have no token, for the new vocabulary leaves out ids: they get that mean too")
    put = with_rows(facts, (*tables, *biases), new.rows, lambda part: _pieces(part, recipe))

    becomes = {int(row): number for number, row in reversed(list(enumerate(recipe.copied))) if row >= 0}
    config = renamed(facts.config, new, becomes)
    files = given.read(*TOKENIZER_FILES)
    lost = {path for path, value in config.items() if value is None}
    if isinstance(facts.generation, dict) and facts.generation:
        ids = renamed(facts.generation, new, becomes)
        files[GENERATION] = edited_file(facts.folder, GENERATION, ids)
        lost |= {path for path, value in ids.items() if value is None}
    if lost:
        notes.append(f"{', '.join(sorted(lost))}: null now, for the new vocabulary has no such token")
    config |= sizes_of(facts, before, new.rows)
    left = frozenset(filter(facts.folder.has, TOKENIZER_FILES)) - files.keys()
    return Change(KEPT, put=put, config=config, texts=files, leave=left, notes=(*forced, *notes, *others))


def shared_rows(old: TokenBytes, new: TokenBytes) -> NDArray[np.int64]:
    """Return for each new id the old one whose row it takes, -1 where there is none.

    Of two old tokens that write the same the one counts that is spelled alike, else the later: SentencePiece's letters
    come after the bytes that they are.
    """
    found = np.full(new.rows, -1, np.int64)
    by_bytes = {writes: number for number, writes in old.writes.items()}
    by_piece = {piece: number for number, piece in old.pieces.items()}
    for number, piece in new.pieces.items():
        alike, writes = by_piece.get(piece, -1), new.writes.get(number)
        if writes is not None:
            found[number] = alike if old.writes.get(alike) == writes else by_bytes.get(writes, -1)
        elif alike >= 0 and alike not in old.writes:
            found[number] = alike
        else:  # one token may have several roles; an end is what most models have and need
            roles = (role for role in ROLES if new.roles.get(role) == number and role in old.roles)
            found[number] = old.roles.get(next(roles, ""), -1)
    return found


def spelled(writes: bytes, known: dict[bytes, int], longest: int) -> list[int]:
    """Return tokens that together write these bytes, each the longest that goes on; bytes that none writes are left."""
    found, at = list[int](), 0
    while at < len(writes):
        end = next((end for end in range(min(len(writes), at + longest), at, -1) if writes[at:end] in known), at + 1)
        found += [known[writes[at:end]]] if writes[at:end] in known else []
        at = end
    return found


def _by_donor(recipe: Recipe, new: TokenBytes, folder: Folder, atoms: int) -> str:
    """Add to a recipe what new rows are of shared ones in a donor; return a note."""
    if read_token_bytes(folder).pieces != new.pieces:
        raise CheckpointError(f"{folder.path}: its vocabulary is not the new tokenizer's", "give a model that has it")
    theirs = readable(Facts(folder), "take rows from")[0]
    # shared rows, the same with length 1, and the others
    require_memory(8 * theirs.shape[1] * theirs.rows, f"{folder.path}: the rows of its table")
    ids = np.array([number for number in new.writes if number < theirs.rows], np.int64)
    with Reader(theirs) as reader:
        rows = widened(reader.take(ids))
    sound = np.isfinite(rows).all(axis=1) & rows.any(axis=1)
    anchors, targets = (sound & mask for mask in (recipe.copied[ids] >= 0, recipe.copied[ids] < 0))
    if not anchors.any():
        raise CheckpointError(f"{folder.path}: no shared token has a row in use", "leave --donor out")
    most = min(atoms, max(1, theirs.shape[1] // 8))
    places, coefficients = pursue(rows[anchors], rows[targets], most, "matching rows of the donor")
    left = [0.0]
    for number, row, its, c in zip(ids[targets], rows[targets], ids[anchors][places], coefficients, strict=True):
        recipe.mixed[int(number)] = recipe.copied[its], c
        recipe.middle[number] = 0.0
        left.append(float(np.linalg.norm(row - c @ rows[np.searchsorted(ids, its)]) / np.linalg.norm(row)))
    how = f"combine the rows of at most {places.shape[1]} shared tokens, as they do in {short(folder.path.name)}"
    return f"{len(places):,} {how}; there {np.median(left[1:] or left):.0%} of a row's length is left over (median)"


def renamed(record: Any, new: TokenBytes, becomes: dict[int, int]) -> dict[str, Any]:
    """{dotted path: new value} of every token id in a config; None where the new vocabulary has no such token."""
    found = dict[str, Any]()
    for path, value in values_with_ids(record):
        key = path.rpartition(".")[2]
        if key.endswith(("token_id", "token_ids", "token_index")) and value is not None:
            ids = value if isinstance(value, list) else [value]
            role = [new.roles[key[:-3]]] if key[:-3] in new.roles else []
            made = role + [becomes[n] for n in ids[len(role) :] if type(n) is int and n in becomes]
            found[path] = (made if isinstance(value, list) else made[0]) if made else None
        elif value is not None:  # lists and maps lose the entries whose tokens are gone
            made = with_ids(path, value, becomes.get)
            found[path] = made if made else None
    return found


def _pieces(part: Stored, recipe: Recipe) -> Pieces:
    """Yield the bytes of a part's new rows [V', …], in order."""
    with Reader(part) as reader:
        shared = np.unique(recipe.copied[recipe.copied >= 0])
        spans = np.array_split(shared, -(-len(shared) // AT_ONCE))
        mean = sum(widened(reader.take(ids)).sum(axis=0, dtype=np.float64) for ids in spans) / len(shared)
        step = max(1, min(AT_ONCE, CHUNK_BYTES // max(1, reader.row_bytes)))
        for start in range(0, len(recipe.copied), step):
            copied = recipe.copied[start : start + step]
            rows = reader.take(np.maximum(copied, 0))
            for at in np.flatnonzero(copied < 0):
                made = recipe.middle[start + at] * mean
                if mix := recipe.mixed.get(start + int(at)):
                    made = made + np.tensordot(mix[1], widened(reader.take(mix[0])).astype(np.float64), 1)
                rows[at] = rounded(np.atleast_1d(made), part.dtype).reshape(np.shape(made))
            yield rows.tobytes()


# matching pursuit


def pursue(
    anchors: NDArray, targets: NDArray, most: int, what: str = "matching"
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Write targets [n, D] as combinations of at most `most` anchors [S, D], none of which is zero.

    Those are chosen in fp32, and combined in fp64: (places among the anchors [n, k], coefficients [n, k], 0 where fewer
    were needed), k ≤ S and k ≤ D. `what` names the work in progress.
    """
    most = min(most, *anchors.shape)
    lengths = np.sqrt(np.einsum("sd,sd->s", anchors, anchors, dtype=np.float64))
    unit = (anchors / lengths[:, None]).astype(np.float32)
    chosen = np.zeros((len(targets), most), np.int64)
    coefficients = np.zeros((len(targets), most))
    step = max(1, BLOCK_BYTES // (4 * len(anchors) + 8 * most * (anchors.shape[1] + most)))
    for start in range(0, len(targets), step):
        block = slice(start, start + step)
        chosen[block], coefficients[block] = _block(anchors, lengths, unit, targets[block].astype(np.float64), most)
        progress(what, min(start + step, len(targets)), len(targets))
    return chosen, coefficients


def _block(
    anchors: NDArray, lengths: NDArray[np.float64], unit: NDArray[np.float32], x: NDArray[np.float64], most: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """As `pursue`; `unit` [S, D] are the anchors with length 1."""
    n, rest, least = np.arange(len(x)), x.copy(), SMALL * np.linalg.norm(x, axis=1)
    basis, triangle = np.zeros((len(x), most, x.shape[1])), np.tile(np.eye(most), (len(x), 1, 1))
    places, along = np.zeros((len(x), most), np.int64), np.zeros((len(x), most))
    for k in range(most):
        alike = np.abs(rest.astype(np.float32) @ unit.T)
        alike[n[:, None], places[:, :k]] = -1
        places[:, k] = alike.argmax(axis=1)
        new = anchors[places[:, k]] / lengths[places[:, k], None]
        for _ in range(2):
            part = np.einsum("nkd,nd->nk", basis[:, :k], new)
            new -= np.einsum("nk,nkd->nd", part, basis[:, :k])
            triangle[:, :k, k] += part
        length = np.linalg.norm(new, axis=1)
        # what the anchors so far hold already, and what is no longer needed, gets the coefficient 0
        useful = (length > SMALL) & (np.linalg.norm(rest, axis=1) > least)
        triangle[:, :k, k] *= useful[:, None]
        triangle[:, k, k] = np.where(useful, length, 1.0)
        basis[:, k] = np.where(useful[:, None], new / np.where(useful, length, 1.0)[:, None], 0.0)
        along[:, k] = np.einsum("nd,nd->n", basis[:, k], rest)
        rest -= along[:, k, None] * basis[:, k]
    return places, np.linalg.solve(triangle, along[:, :, None])[:, :, 0] / lengths[places]
