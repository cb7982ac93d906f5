"""Healing: a rewritten model learns back what it lost, from the model that it was made of.

    same vocabulary      KL(teacher ‖ student) of every next token, fused: no logits of either exist; where one of the
                         two has padding rows that the other lacks, over the rows that both have
    another vocabulary   cross-entropy on the text, for the teacher says nothing of these tokens

Only the tables and their maps learn, or the whole model. Everything else is a decoder's run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import tiewise.boundary.hf
from tiewise.boundary.install import Installed, installed
from tiewise.boundary.ops.soft_targets import linear_divergence
from tiewise.boundary.recorded_logits import head_of
from tiewise.checkpoint.claims import count
from tiewise.checkpoint.facts import SPEC, Facts
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.numeric_ends import readable
from tiewise.core.errors import DataError, RunError
from tiewise.training.data.corpus import Blocks, PreparedText
from tiewise.training.kinds.decoder import Decoders
from tiewise.training.run import prepared_blocks
from tiewise.training.settings import Settings
from tiewise.training.trainer import Job, TiewiseTrainer

HEAL = "heal"  # this kind's name
TABLES, ALL = "tables", "all"
RATE, SEEN = 0.03, 4096  # of the root mean square of so many rows of the input table: the learning rate
LENGTH = 128  # of blocks, where the model has as many positions
HELD_OUT = 2000  # characters that a loss can be measured on


@dataclass(frozen=True)
class HealOptions:
    """What a healing has beyond other runs; `model` is the folder of the model that is healed."""

    teacher: str = ""  # folder of the model that it was made of
    what: str = TABLES  # what learns


def healing(model: str | os.PathLike[str] | None, teacher: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return the settings of a run that heals a model: folders, boundary, length, and a rate of its tables' scale.

    Adam moves each number by about the learning rate in a step, whatever the gradient: 3 % of the numbers' own size.
    """
    if model is None:
        raise RunError("no model to heal", "give its folder, and --teacher DIR, the folder of the model it was made of")
    if teacher is None:
        raise RunError("no teacher", f"give --teacher DIR (teacher= in Python), the model that {model} was made of")
    facts = Facts(open_folder(path := os.path.abspath(model)))  # whole, for a resume may be elsewhere
    size = math.sqrt(np.square(readable(facts, "heal")[0].read(0, SEEN).astype(np.float64)).mean())
    keys = ("max_position_embeddings", "n_positions")
    limits = (count(level.get(key)) for level in facts.levels.values() for key in keys)
    boundary = str(facts.config[SPEC]) if facts.is_own else "tied" if facts.tied else "untied"
    found = {"kind": HEAL, "model": path, "tokenizer": path, "teacher": os.path.abspath(teacher), "arms": [boundary]}
    return {**found, "learning_rate": float(f"{RATE * size:.1e}"), "length": min([LENGTH, *filter(None, limits)])}


class SharedVocabulary(NamedTuple):
    """Rows that model and teacher both have, and whether one of them has padding rows beyond."""

    rows: int
    has_padding: bool


def shared_vocabulary(settings: Settings) -> SharedVocabulary | None:
    """Return the rows that model and teacher both have, if they have the same tokens; None if they do not.

    Rows beyond the shared ones are padding, which one of the two may have been given.

    Raises:
        RunError: a token's row is not among the shared ones.
    """
    models = {"model": settings.model, "teacher": settings.own.teacher}
    facts = {name: Facts(open_folder(path)) for name, path in models.items()}
    words = [one.tokenizer for one in facts.values() if one.tokenizer is not None]
    if len(words) != 2 or (words[0].base, words[0].added) != (words[1].base, words[1].added):
        return None
    rows = {name: readable(one, HEAL)[0].rows for name, one in facts.items()}
    shared = min(rows.values())
    has_padding = max(rows.values()) > shared
    if has_padding and words[0].max_id >= shared:
        shorter = min(rows, key=rows.__getitem__)
        what = f"{models[shorter]} has {shared:,} rows, and the tokenizer of both has token {words[0].max_id:,}"
        raise RunError(what, f"tiewise resize the {shorter} first")
    return SharedVocabulary(shared, has_padding)


class Heal(Decoders):
    """A decoder that is there already, and another that teaches it."""

    where = "in a healing"
    options = HealOptions
    defaults: Mapping[str, Any] = {"steps": 300, "weight_decay": 0.0}
    lacks: Mapping[str, tuple[Any, str]] = {"init": (None, "leave init out: the model has its weights")}
    shards = False
    alone = ("a healing", "run it on one process")

    def check(self, settings: Settings) -> HealOptions:
        """See that both models are there."""
        own: HealOptions = super().check(settings)
        if settings.seed is None:
            raise RunError("a comparison of healings", "use tiewise heal for each")
        if own.what not in (TABLES, ALL):
            raise RunError(f"what = {own.what!r}", f"choose {TABLES} or {ALL}")
        for name, path in (("model", settings.model), ("teacher", own.teacher)):
            if not (Path(path) / "config.json").is_file():
                raise RunError(f"{name} = {path!r} is no folder with a config.json", f"name the folder of the {name}")
        return own

    def prepare(self, settings: Settings, folder: Path) -> PreparedText:
        """Read a text with the model's own tokenizer."""
        text = prepared_blocks(settings, folder)
        held_out = text.facts["splits"]["heldout"]["characters"]
        if held_out < HELD_OUT:
            what = f"{held_out:,} characters of the text are held out"
            raise DataError(what, f"what came back is measured on {HELD_OUT:,} or more: give more text")
        return text

    def described(self, settings: Settings, text: PreparedText) -> str:
        """Say also what is learnt, and from what."""
        shared = shared_vocabulary(settings)
        how = "by its teacher's probabilities (KL)"
        if shared is not None and shared.has_padding:
            how += f" over the {shared.rows:,} rows that both have: "
            how += "rows beyond are padding, and are left out of both softmaxes"
        if shared is None:
            how = "by cross-entropy on the text: its teacher has another vocabulary and says nothing of these tokens"
        what = "the tables learn" if settings.own.what == TABLES else "the whole model learns"
        return f"{super().described(settings, text)}; {what}, {how}"

    def build(self, job: Job) -> Installed:
        """Load the model in fp32; what does not learn is frozen."""
        path, length = job.settings.model, job.settings.length
        found = _loaded(path)
        model, rows = found.model, len(found.tables()[1])
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or length
        if model.config.is_encoder_decoder:
            raise RunError(f"{path} has an encoder", "only models that read and write one text are healed")
        if positions < length:
            what = f"{path} has {positions} positions, blocks are {length} long"
            raise RunError(what, f"use --set length={positions} or less")
        if rows < job.text.vocab:
            what = f"{path}: its tokenizer needs {job.text.vocab:,} rows, and its tables have {rows:,}"
            raise DataError(what, "name its end of text in tokenizer_config.json, or tiewise resize it first")
        if job.settings.own.what == TABLES:
            model.requires_grad_(False)
            for end in (model.get_input_embeddings(), model.get_output_embeddings()):
                end.requires_grad_(True)
        return found

    def table_std(self, job: Job) -> float:
        """None is drawn."""
        return math.nan

    def first_loss(self, job: Job) -> float:
        """It is measured, and not predicted."""
        return math.nan

    def trainer(self, job: Job, installed: Installed) -> TiewiseTrainer:
        """A decoder's, with a teacher where both have one vocabulary."""
        shared = shared_vocabulary(job.settings)
        if shared is None:
            return super().trainer(job, installed)
        rows = Blocks(job.text.split("train"), job.settings.length)
        found = HealTrainer(installed, **self.given(job, installed, rows))
        found.teacher, found.shared = _loaded(job.settings.own.teacher), shared.rows
        found.teacher.model.requires_grad_(False).eval().to(found.args.device)
        return found


def _loaded(path: str) -> Installed:
    return installed(tiewise.boundary.hf.load(path, dtype=torch.float32, local_files_only=True))


class HealTrainer(TiewiseTrainer):
    """Has the distribution of a teacher learnt in place of the text."""

    teacher: Installed
    shared: int  # rows that both tables have; further ones are padding

    def loss_of(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """KL(teacher ‖ student) over the shared rows, the mean over all tokens that have a next one."""
        ids = inputs["input_ids"]
        with torch.no_grad(), self.teacher.deferred():
            theirs = head_of(self.teacher.model(input_ids=ids, use_cache=False).logits[:, :-1])
        with self.installed.deferred():
            features, table, bias, options = head_of(model(input_ids=ids, use_cache=False).logits[:, :-1])
        more = {"bias": self._cut(bias), "teacher_bias": self._cut(theirs[2])}
        more |= {"options": options, "teacher_options": theirs[3]}
        loss = linear_divergence(features, self._cut(table), theirs[0], self._cut(theirs[1]), beta=0.0, **more)
        return self.share_of_step(loss, kwargs.get("num_items_in_batch"))

    def _cut(self, rows: Any) -> Any:
        """The shared rows of a table or a bias; the same tensor where it has no others."""
        return rows if rows is None or len(rows) == self.shared else rows[: self.shared]


KIND = Heal()
