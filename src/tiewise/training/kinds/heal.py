"""Healing: a rewritten model learns from its original what the rewrite cost it.

    same vocabulary      KL(teacher ‖ student) of every next token, fused: logits of neither are stored. If one of the
                         two has padding rows that the other lacks, over the rows that both have
    another vocabulary   cross-entropy on the text, since the teacher predicts other tokens

Either the tables and their maps learn, or the whole model. Everything else is a decoder's run.
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
from torch import Tensor, nn

import tiewise.boundary.hf
from tiewise.boundary.installation import Installed, installed
from tiewise.boundary.ops.soft_targets import linear_divergence
from tiewise.boundary.recorded_logits import head_of
from tiewise.checkpoint.claims import SPEC, positive_int
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.numeric_ends import require_readable_tables
from tiewise.core.errors import DataError, RunError
from tiewise.core.written_options import written_option
from tiewise.training.data.corpus import Blocks, PreparedText
from tiewise.training.kinds.decoder import Decoders
from tiewise.training.run import prepare_blocks
from tiewise.training.settings import Settings
from tiewise.training.trainer import Job, TiewiseTrainer

HEAL = "heal"  # this kind's name
TABLES, ALL = "tables", "all"
RATE, SEEN = 0.03, 4096  # learning rate ÷ root mean square of the input table's first rows; number of rows
LENGTH = 128  # tokens of a block, if the model has as many positions
LEAST_HELDOUT_CHARACTERS = 2000  # fewest characters that a loss is measured on
_POSITIONS = ("max_position_embeddings", "n_positions")  # config keys of the number of positions


@dataclass(frozen=True)
class HealOptions:
    """Settings of a healing alone; `model` is the folder of the model to heal."""

    teacher: str = ""  # folder of the model that it was rewritten from
    what: str = TABLES  # parameters that learn: tables or all

    @classmethod
    def of(cls, settings: Settings) -> HealOptions:
        """Return the options among the settings of a healing."""
        assert isinstance(settings.kind_options, cls), "settings of a healing have its options"
        return settings.kind_options


def healing_settings(model: str | os.PathLike[str] | None, teacher: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return the settings of a run that heals a model.

    These are its folders, boundary, length of blocks, and a learning rate of 3 % of its tables' root mean square. Adam
    moves each number by about the learning rate in a step, whatever the gradient.
    """
    if model is None:
        raise RunError(
            "no model to heal",
            f"give its folder, and {written_option('teacher')}: the folder of the model that it was rewritten from",
        )
    if teacher is None:
        raise RunError(
            "no teacher", f"give {written_option('teacher')}: the folder of the model that {model} was rewritten from"
        )
    path = os.path.abspath(model)  # absolute, since a resume may start in another folder
    facts = Facts(open_folder(path))
    rows = require_readable_tables(facts, HEAL)[0].read(0, SEEN).astype(np.float64)
    root_mean_square = math.sqrt(np.square(rows).mean())
    return {
        "kind": HEAL,
        "model": path,
        "tokenizer": path,
        "teacher": os.path.abspath(teacher),
        "arms": [_boundary_of(facts)],
        "learning_rate": float(f"{RATE * root_mean_square:.1e}"),
        "length": _block_length(facts),
    }


def _boundary_of(facts: Facts) -> str:
    """Return the boundary of a checkpoint as a spec."""
    if facts.is_tiewise_type:
        return str(facts.config[SPEC])
    return "tied" if facts.tied else "untied"


def _block_length(facts: Facts) -> int:
    """Return the tokens of a block: `LENGTH`, or the smallest limit in the config."""
    lengths = [LENGTH]
    for level in facts.levels.values():
        for key in _POSITIONS:
            limit = positive_int(level.get(key))
            if limit:
                lengths.append(limit)
    return min(lengths)


class SharedVocabulary(NamedTuple):
    """Rows that model and teacher both have, and whether one has padding rows beyond."""

    rows: int
    has_padding: bool


def shared_vocabulary(settings: Settings) -> SharedVocabulary | None:
    """Return the rows that model and teacher both have; None if their tokens differ.

    Rows beyond the shared ones are padding, which only one of the two has.

    Raises:
        RunError: the shared rows lack a token.
    """
    paths = {"model": settings.model, "teacher": HealOptions.of(settings).teacher}
    facts = {name: Facts(open_folder(path)) for name, path in paths.items()}
    tokenizer, teachers = facts["model"].tokenizer, facts["teacher"].tokenizer
    if tokenizer is None or teachers is None:
        return None
    if (tokenizer.base, tokenizer.added) != (teachers.base, teachers.added):
        return None
    rows = {name: require_readable_tables(one, HEAL)[0].rows for name, one in facts.items()}
    shared = min(rows.values())
    has_padding = max(rows.values()) > shared
    if has_padding and tokenizer.max_id >= shared:
        shorter = min(rows, key=rows.__getitem__)
        what = f"{paths[shorter]} has {shared:,} rows, and the tokenizer of both has token {tokenizer.max_id:,}"
        raise RunError(what, f"run tiewise vocab resize on the {shorter} first")
    return SharedVocabulary(shared, has_padding)


class Heal(Decoders):
    """Runs that train an existing decoder with another as teacher."""

    where = "in a healing"
    options = HealOptions
    defaults: Mapping[str, object] = {"steps": 300, "weight_decay": 0.0}
    lacks: Mapping[str, tuple[object, str]] = {"init": (None, "leave init out: the model has its weights")}
    shards = False
    alone = ("a healing", "run it on one process")

    def check(self, settings: Settings) -> HealOptions:
        """Return the options of a healing, after a check that both models exist."""
        super().check(settings)
        options = HealOptions.of(settings)
        if settings.seed is None:
            raise RunError("a comparison of healings", "use tiewise heal for each")
        if options.what not in (TABLES, ALL):
            raise RunError(f"what = {options.what!r}", f"choose {TABLES} or {ALL}")
        for name, path in (("model", settings.model), ("teacher", options.teacher)):
            if not (Path(path) / "config.json").is_file():
                raise RunError(f"{name} = {path!r} is no folder with a config.json", f"name the folder of the {name}")
        return options

    def prepare(self, settings: Settings, folder: Path) -> PreparedText:
        """Read a text with the model's tokenizer."""
        text = prepare_blocks(settings, folder)
        heldout_characters = text.facts["splits"]["heldout"]["characters"]
        if heldout_characters < LEAST_HELDOUT_CHARACTERS:
            problem = f"{heldout_characters:,} characters of the text are held out, too few to measure the loss on"
            raise DataError(problem, f"give more text: {LEAST_HELDOUT_CHARACTERS:,} or more must be held out")
        return text

    def describe(self, settings: Settings, text: PreparedText) -> str:
        """Return one line that also names the learning parameters and the target."""
        shared = shared_vocabulary(settings)
        if shared is None:
            how = "from the text alone, because the teacher has another vocabulary"
        else:
            how = "from the teacher's probabilities (KL)"
            if shared.has_padding:
                how += f" of the {shared.rows:,} tokens that both models have, without padding rows"
        learner = "the tables learn" if HealOptions.of(settings).what == TABLES else "the whole model learns"
        return f"{super().describe(settings, text)}; {learner}, {how}"

    def build(self, job: Job) -> Installed:
        """Load the model in fp32, and freeze the parameters that do not learn."""
        installed = _load_installed(job.settings.model)
        _refuse_unfit(installed, job)
        if HealOptions.of(job.settings).what == TABLES:
            model = installed.model
            model.requires_grad_(False)
            for end in (model.get_input_embeddings(), model.get_output_embeddings()):
                end.requires_grad_(True)
        return installed

    def table_std(self, job: Job) -> float:
        """Return nan: no table is drawn."""
        return math.nan

    def first_loss(self, job: Job) -> float:
        """Return nan: the first loss is measured, not predicted."""
        return math.nan

    def trainer(self, job: Job, installed: Installed) -> TiewiseTrainer:
        """Make a trainer that learns from the teacher if both have the same tokens.

        Otherwise it is a decoder's trainer.
        """
        shared = shared_vocabulary(job.settings)
        if shared is None:
            return super().trainer(job, installed)
        rows = Blocks(job.text.split("train"), job.settings.length)
        trainer = HealTrainer(installed, **self.trainer_parts(job, installed, rows))
        teacher = _load_installed(HealOptions.of(job.settings).teacher)
        teacher.model.requires_grad_(False).eval().to(trainer.args.device)
        trainer.teacher, trainer.shared = teacher, shared.rows
        return trainer


def _load_installed(path: str) -> Installed:
    """Load a model in fp32 from a folder, with its boundary."""
    return installed(tiewise.boundary.hf.load(path, dtype=torch.float32, local_files_only=True))


def _refuse_unfit(installed: Installed, job: Job) -> None:
    """Refuse a model with an encoder, or with too few positions or rows for the text."""
    path, length = job.settings.model, job.settings.length
    config, rows = installed.model.config, len(installed.tables()[1])
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or length
    if config.is_encoder_decoder:
        raise RunError(f"{path} has an encoder", "only models that read and write one text are healed")
    if positions < length:
        what = f"{path} has {positions} positions, blocks are {length} long"
        raise RunError(what, f"use --set length={positions} or less")
    if rows < job.text.vocab:
        what = f"{path}: its tokenizer needs {job.text.vocab:,} rows, and its tables have {rows:,}"
        raise DataError(what, "name its end of text in tokenizer_config.json, or run tiewise vocab resize on it first")


class HealTrainer(TiewiseTrainer):
    """Trainer whose student learns a teacher's distribution instead of the text."""

    teacher: Installed
    shared: int  # number of rows that both tables have; further rows are padding

    def loss_of(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return KL(teacher ‖ student) over the shared rows.

        It is the mean over all tokens that have a next one.
        """
        ids = inputs["input_ids"]
        with torch.no_grad(), self.teacher.deferred():
            teacher_logits = self.teacher.model(input_ids=ids, use_cache=False).logits[:, :-1]
            teacher_features, teacher_table, teacher_bias, teacher_options = head_of(teacher_logits)
        with self.installed.deferred():
            features, table, bias, options = head_of(model(input_ids=ids, use_cache=False).logits[:, :-1])
        loss = linear_divergence(
            features,
            self._cut(table),
            teacher_features,
            self._cut(teacher_table),
            beta=0.0,
            bias=self._cut(bias),
            teacher_bias=self._cut(teacher_bias),
            options=options,
            teacher_options=teacher_options,
        )
        return self.share_of_step(loss, kwargs.get("num_items_in_batch"))

    def _cut(self, rows: Tensor | None) -> Any:
        """Return the shared rows of a table or a bias.

        Without other rows it is the same tensor.
        """
        if rows is None or len(rows) == self.shared:
            return rows
        return rows[: self.shared]


KIND = Heal()
