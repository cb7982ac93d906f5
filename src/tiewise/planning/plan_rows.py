"""Rows and sentences of a plan for terminal, page and notebook, made from its record.

Counts are exact to the parameter, and bytes follow from counts. An estimate is marked ≈ and rounded (`certainty`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tiewise.core.errors import PlanError
from tiewise.core.files import format_bytes
from tiewise.core.measurement import MINUS, NONE, Listing, Quantity, count, percent, plain, signed
from tiewise.core.spec import BoundarySpec
from tiewise.planning.architecture import COMPONENTS
from tiewise.planning.catalogue import find
from tiewise.planning.config import GENERIC
from tiewise.planning.costs import FSDP, FSDP_SHARDED
from tiewise.planning.evidence import KIND, in_words
from tiewise.planning.read_config import unknown_family

Record = Mapping[str, Any]
Show = Callable[[Any], str]
NOT_COUNTED = "not counted"
percent_to_tenths = partial(percent, digits=1)
OPTIMIZERS = {
    "sgd": "SGD",
    "momentum": "SGD with momentum",
    "adamw": "AdamW",
    "adamw-bf16-master": "AdamW, bf16, fp32 master",
}
DTYPE_ROWS = ("float32", "bfloat16", "float8_e4m3fn")  # dtypes of checkpoints that have a row
NATS = "nats per token"
RARELY_USED = {"experts", "other_tables", "towers"}  # components of which a token uses a part or nothing
EVIDENCE_HEADER = ["tokens of text", "times seen", "loss, tied − untied, nats/token [95 %]", "tying", "seeds"]
NEIGHBOUR_HEADER = ["model", "V", "D", "L", "V/D", "ties", "checked"]


def columns(record: Record) -> list[str]:
    """Return the name of every choice, in two lines; without the sharing if all share alike."""
    choices = record["choices"]
    boundaries = [choice["boundary"] for choice in choices]
    if len({choice["share"] for choice in choices}) == 1:
        return boundaries
    return [f"{choice['boundary']}\nshare {choice['share']}" for choice in choices]


def rows(record: Record) -> list[list[str]]:
    """Return the name of every figure with its values by choice.

    A row of one cell is the heading of the rows below it.
    """
    choices, setting = record["choices"], record["setting"]
    table = _PlanRows(choices)
    table.add_parameters()
    table.add_checkpoints()
    table.add_training(setting["dtype"])
    table.add_step(record["activation_bytes"])
    table.add_tables()
    table.add_work_and_loss(math.log(record["model"]["vocab"]))
    if choices and setting["world"]["size"] > 1:
        for index, layout in enumerate(choices[0]["ranks"]):
            table.add_layout(index, layout)
    return table.rows


def main_rows(record: Record) -> list[list[str]]:
    """Return the rows of the short table: parameters, saving, bytes, first loss, and ranks."""
    setting, table = record["setting"], _PlanRows(record["choices"])
    table.add_count("parameters", "total")
    table.add_active()
    table.add_savings()
    table.add("checkpoint, bfloat16", format_bytes, table.part("checkpoint_bytes"), "bfloat16", "checkpoint_bytes")
    table.add_optimizer("adamw", f"training, AdamW, {setting['dtype']}")
    table.add_first_loss(math.log(record["model"]["vocab"]))
    if table.choices and setting["world"]["size"] > 1:
        for index, layout in enumerate(table.choices[0]["ranks"]):
            table.add_layout_in_short(index, layout)
    return table.rows


class _PlanRows:
    """Rows of a plan: a name, and a cell for each choice."""

    def __init__(self, choices: Sequence[Record]) -> None:
        self.choices = choices
        self.rows: list[list[str]] = []

    def add_heading(self, name: str) -> None:
        """Add a row of one cell, the heading of the rows below it."""
        self.rows.append([name])

    def add(
        self, name: str, show: Show, parts: Sequence[Record | None], key: str, path: str, about: Show | None = None
    ) -> None:
        """Add a figure of every choice.

        Args:
            name: name of the row.
            show: formats an exact value.
            parts: by choice, the record that contains the figure; None if the model lacks it.
            key: key of the figure in that record.
            path: path of the figure in the choice, for its certainty.
            about: formats an estimate; by default as `show`.
        """
        cells = [name]
        for choice, part in zip(self.choices, parts, strict=True):
            value = None if part is None else part.get(key)
            cells.append(_cell(choice, path, value, show, about or show))
        self.rows.append(cells)

    def part(self, name: str) -> list[Any]:
        """Return one part of the record of every choice."""
        return [choice[name] for choice in self.choices]

    def add_count(self, name: str, key: str) -> None:
        """Add a count of parameters."""
        self.add(name, count, self.part("parameters"), key, f"parameters.{key}", short)

    def add_parameters(self) -> None:
        """Add parameters by component, their sums, and the savings."""
        self.add_heading("parameters")
        for name in COMPONENTS:
            if any(name in parameters for parameters in self.part("parameters")):
                self.add_count(component(name), name)
        self.add_count("total", "total")
        if any(_is_partly_frozen(parameters) for parameters in self.part("parameters")):
            self.add_count("of it trained", "trainable")
        self.add_savings()

    def add_active(self) -> None:
        """Add the parameters that one token uses, if the model has parts that few tokens use."""
        if any(RARELY_USED & parameters.keys() for parameters in self.part("parameters")):
            self.add_count("parameters, active per token", "active")

    def add_savings(self) -> None:
        """Add what each choice saves, compared with the untied model."""
        self.add("saved", _signed_count, self.choices, "saved", "saved", signed_short)
        self.add("saved, share", percent_to_tenths, self.choices, "saved_share", "saved_share")

    def add_checkpoints(self) -> None:
        """Add bytes of checkpoints by dtype."""
        self.add_heading("checkpoint")
        for dtype in DTYPE_ROWS:
            self.add(dtype, format_bytes, self.part("checkpoint_bytes"), dtype, "checkpoint_bytes")

    def add_training(self, dtype: str) -> None:
        """Add bytes of training by optimizer."""
        self.add_heading(f"training, {dtype}")
        for optimizer, label in OPTIMIZERS.items():
            self.add_optimizer(optimizer, label)

    def add_optimizer(self, optimizer: str, label: str) -> None:
        """Add bytes of training with one optimizer."""
        of_optimizer = [training[optimizer] for training in self.part("training_bytes")]
        self.add(label, format_bytes, of_optimizer, "total", "training_bytes")

    def add_step(self, activations: Record) -> None:
        """Add bytes of logits and activations in a step."""
        self.add_heading("further memory of a step")
        logits = self.part("logits_bytes")
        self.add("logits, plain loss", format_bytes, logits, "plain", "logits_bytes")
        self.add("logits, fused loss (GPU)", format_bytes, logits, "fused_cuda", "logits_bytes")
        if activations["kept"]:  # 0 or None if the layers are not counted one by one
            for name, key in (("activations, an estimate", "kept"), ("with checkpointing", "checkpointed")):
                estimate = f"≈ {format_bytes(activations[key])}"
                self.rows.append([name, *[estimate] * len(self.choices)])
        steps = self.part("step_bytes")
        if any(steps):
            self.add("peak of a step, plain loss", _about_bytes, steps, "plain", "step_bytes")
            self.add("peak of a step, fused loss", _about_bytes, steps, "fused_cuda", "step_bytes")

    def add_tables(self) -> None:
        """Add bytes of the tables by precision."""
        self.add_heading("tables, by bits of a number")
        names = self.choices[0]["table_bytes"] if self.choices else ()
        for name in names:
            self.add(name, format_bytes, self.part("table_bytes"), name, "table_bytes")

    def add_work_and_loss(self, log_vocab: float) -> None:
        """Add operations, bytes of decoding, and the first loss next to ln V."""
        self.add_heading("work and loss")
        self.add_active()
        flops, decoding = self.part("flops_per_token"), self.part("decode_bytes")
        self.add("forward, per token", operations, flops, "forward", "flops_per_token")
        self.add("backward, per token", operations, flops, "backward", "flops_per_token")
        if any(decoding):
            self.add("read per decoded token", format_bytes, decoding, "weights", "decode_bytes")
            self.add("cache added per token", format_bytes, decoding, "cache_per_token", "decode_bytes")
        self.add_first_loss(log_vocab)

    def add_first_loss(self, log_vocab: float) -> None:
        """Add the expected loss of the first step, next to ln V."""
        label, losses = f"first loss (ln V = {log_vocab:.2f})", self.part("first_loss")
        self.add(label, lambda nll: plain(nll, 2), losses, "nll", "first_loss", lambda nll: f"{nll:.3g}")

    def add_layout_in_short(self, index: int, layout: Record) -> None:
        """Add memory and traffic of one rank in a layout, the `index`-th in every choice's list."""
        self.add_heading(layout_with_axes(layout))
        ranks = [of_choice[index] for of_choice in self.part("ranks")]
        self.add("memory of a rank", format_bytes, ranks, "memory", "ranks.memory")
        self.add("sent per step", format_bytes, ranks, "sent", "ranks.sent")

    def add_layout(self, index: int, layout: Record) -> None:
        """Add memory and traffic of a layout of ranks, the `index`-th in every choice's list."""
        self.add_heading(layout_with_axes(layout))
        ranks = [of_choice[index] for of_choice in self.part("ranks")]
        tables = [rank["table_memory"] for rank in ranks]
        self.add("weights, gradients, AdamW", format_bytes, ranks, "memory", "ranks.memory")
        self.add("tables alone", format_bytes, tables, "total", "ranks.table_memory")
        if layout["axes"]["fsdp"] > 1:
            self.add("tables or states gathered", format_bytes, tables, "gathered", "ranks.table_memory")
        self.add("logits and loss", format_bytes, ranks, "loss", "ranks.loss")
        self.add("sent per step", format_bytes, ranks, "sent", "ranks.sent")
        self.add("of it for tables", format_bytes, ranks, "sent_for_tables", "ranks.sent_for_tables")
        if layout["break_even_tokens"] is not None:
            label, path = "sends less below, tokens a rank", "ranks.break_even_tokens"
            self.add(label, count, ranks, "break_even_tokens", path)


def _about_bytes(value: float) -> str:
    """Return an estimate of bytes as text."""
    return f"≈ {format_bytes(value)}"


def _is_partly_frozen(parameters: Record) -> bool:
    """Return whether some parameters get no gradient; false if they are not counted."""
    trainable = parameters["trainable"]
    return trainable is not None and bool(trainable < parameters["total"])


def _signed_count(saved: float) -> str:
    """Return a count, with its sign if it is negative."""
    return signed(saved, 0).removeprefix("+")


def _cell(choice: Record, path: str, value: Any, show: Show, about: Show) -> str:
    """Return a figure as text. An estimate is marked ≈, and an uncounted figure is named so."""
    if path in choice["not_counted"]:
        return NOT_COUNTED
    if value is None:
        return NONE
    if path in choice["estimated"]:
        return f"≈ {about(value)}"
    return show(value)


def signed_short(count: float) -> str:
    """Return a count in short form, with its sign: 494 M or −494 M."""
    return short(count).replace("-", MINUS)


def layout_with_axes(rank: Record) -> str:
    """Return a layout's name and its division of the world: fsdp: 4 shards × 2 replicas."""
    axes, words = rank["axes"], {"fsdp": "{} shards", "tp": "tp {}", "replicas": "{} replicas"}
    cuts = [word.format(axes[name]) for name, word in words.items() if axes[name] > 1]
    return f"{rank['layout']}: {' × '.join(cuts)}"


def layout_sentences(record: Record) -> list[str]:
    """Return sentences about the layout of the first choice.

    They name the layout that `tiewise train` takes, and compare the bytes that FSDP sends with gathered and with
    sharded tables.
    """
    choices, world = record["choices"], record["setting"]["world"]["size"]
    if not choices or world == 1:
        return []
    layouts = {rank["layout"]: rank for rank in choices[0]["ranks"]}
    if len(layouts) < 2:
        return []
    taken = next(rank for rank in layouts.values() if rank["taken"])
    sentences = [f"`tiewise train` on {world} processes uses {layout_with_axes(taken)}."]
    gathered, sharded = layouts.get(FSDP), layouts.get(FSDP_SHARDED)
    if gathered is not None and sharded is not None:
        tokens = record["setting"]["tokens"]["count"]
        sentences += _gathered_or_sharded(choices[0]["boundary"], gathered, sharded, tokens)
    return sentences


def _gathered_or_sharded(boundary: str, gathered: Record, sharded: Record, tokens: int) -> list[str]:
    """Compare bytes that FSDP sends and stores with gathered and with sharded tables.

    `tokens` are those of one rank.
    """
    shards = sharded["axes"]["fsdp"]
    group_tokens, limit = shards * tokens, shards * sharded["break_even_tokens"]
    better = "keep the tables sharded" if group_tokens < limit else "gather the tables"
    return [
        f"{boundary}, FSDP over {shards} ranks: {better} to send less. "
        f"Gathered tables send {format_bytes(gathered['sent_for_tables'])} a step, "
        f"sharded ones {format_bytes(sharded['sent_for_tables'])}.",
        f"Sharded tables send less below {count(limit)} tokens a step; this plan has {count(group_tokens)}.",
        f"Besides its shards and with the loss, a rank stores {_bytes_next_to_shards(gathered)} if it gathers, "
        f"{_bytes_next_to_shards(sharded)} if not.",
    ]


def _bytes_next_to_shards(rank: Record) -> str:
    """Return a rank's bytes for data of other ranks, and for its loss."""
    return format_bytes(rank["table_memory"]["gathered"] + (rank["loss"] or 0))


def component(name: str) -> str:
    """Return the name of a component's row."""
    if name == "maps":
        return "maps at the ends"
    return name.replace("_", " ")


def operations(value: float) -> str:
    """Return a number of operations as text: 15.5 GFLOP."""
    return scaled(value, ("", "k", "M", "G", "T", "P")) + "FLOP"


def scaled(value: float, units: Sequence[str]) -> str:
    """Return three digits and a unit: 7.24 B. Each unit is 1,000 times the one before."""
    power = 0
    while abs(value) >= 999.5 and power < len(units) - 1:
        value, power = value / 1000, power + 1
    return f"{value:,.3g} {units[power]}"


def model_in_words(record: Record) -> str:
    """Return one line about the planned model: name, sizes, boundary and sharing.

    Sizes alone have no boundary and no name.
    """
    model = record["model"]
    name = model["name"]
    if model["family"] not in name:
        name += f" ({model['family']})"
    sizes = f"vocabulary {model['vocab']:,}, width {model['width']:,}"
    if model["table_width"] != model["width"]:
        sizes += f", tables of width {model['table_width']:,}"
    if model["layers"]:
        sizes += f", {model['layers']} layer{'s' if model['layers'] > 1 else ''}"
    if model["family"] == GENERIC:
        return f"{GENERIC}: {sizes}"
    as_it_is = model["boundary"] or "one table and no head"
    if model["share"] != "none":
        as_it_is += f", sharing {model['share']}"
    return f"{name}: {sizes}; as it is: {as_it_is}"


def lookup_tables(record: Record) -> list[Listing]:
    """Return the tables below the choices.

    These are thresholds, the nearest models of the catalogue, and the nearest settings of the atlas. A table without
    rows is left out.
    """
    listings = [
        _threshold_listing(record),
        Listing("Public models nearest in V, D and L", NEIGHBOUR_HEADER, neighbours(record)),
        Listing(f"Nearest {KIND}s with a measured loss", EVIDENCE_HEADER, _trained_rows(record)),
    ]
    return [listing for listing in listings if listing.rows]


def _threshold_listing(record: Record) -> Listing:
    """Return every threshold with its formula."""
    model = record["model"]
    body = record["thresholds"][0]["formula"].rpartition(", ")[2]
    scale = f"V/d = {model['vocab'] / model['table_width']:,.4g}, {body}, B all but the tables"
    rows = []
    for threshold in record["thresholds"]:
        name = threshold["name"].replace("%", " %").replace("still ", "")
        rows.append([name, _threshold_text(threshold), threshold["formula"].partition(", ")[0]])
    return Listing("Thresholds", [scale, "value", "formula"], rows)


def _threshold_text(threshold: Record) -> str:
    """Return the value of a threshold as text: 4 digits, or 3 for an estimate."""
    value = threshold["value"]
    if value is None:
        return NOT_COUNTED
    if threshold["estimated"]:
        return f"≈ {value:,.3g}"
    if value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.4g}"


def _trained_rows(record: Record) -> list[list[str]]:
    """Return rows under `EVIDENCE_HEADER`: models that the atlas trained.

    Empty for a model without a head, which has nothing to tie.
    """
    if record["atlas"] is None:
        return []
    outcomes, rows = {-1: "lowers the loss", 0: "undecided", 1: "raises the loss"}, []
    for trained in record["atlas"]["rows"]:
        difference = Quantity("", trained["difference"], trained["low"], trained["high"], unit=NATS)
        times_seen = f"{trained['seen'] / trained['tokens']:.2g}"
        rows.append(
            [count(trained["tokens"]), times_seen, str(difference), outcomes[trained["sign"]], str(trained["seeds"])]
        )
    return rows


def certainty_sentence(record: Record) -> str:
    """Return a sentence that says what is not exact, and how to count it exactly.

    "" for a plan that is exact.
    """
    model = record["model"]
    build = " --build counts it exactly (needs torch and transformers)."
    unknown = unknown_family(model["family"])
    if model["not_counted"]:
        missing = f"No total: tiewise cannot count {', '.join(model['not_counted'])}."
        if unknown:
            missing = f"{unknown}. {missing}"
        if model["boundary"]:
            missing += build
        return missing
    if not model["estimated"]:
        return ""
    if model["family"] == GENERIC:
        return "≈: estimated from the sizes alone. A config.json or --like NAME gives exact figures."
    if unknown:
        return f"{unknown}. ≈: estimated from the usual keys of its config.{build}"
    return f"≈: estimated, because tiewise has no reader for {model['family']}.{build}"


def neighbours(record: Record) -> list[list[str]]:
    """Return rows under `NEIGHBOUR_HEADER`: the catalogue's models nearest in V, D and L."""
    tied_in_words = {True: "tied", False: "untied", None: "not known"}
    rows = []
    for model in record["neighbours"]:
        sizes = [f"{model['vocab'] or 0:,}", f"{model['width']:,}", str(model["layers"]), plain(model["ratio"], 1)]
        rows.append([model["name"], *sizes, tied_in_words[model["tied"]], model["checked"]])
    return rows


def atlas_sentences(record: Record) -> str:
    """Return sentences about the measured models that are nearest to this one.

    They begin with a warning if those models do not enclose this one. "" for a model without a head.
    """
    atlas = record["atlas"]
    if atlas is None:
        return ""
    step = atlas["rows"][0]["step"]
    rate = "the best learning rate of each, one for all parameters"
    losses = f"Its losses are those of the {step} step at {rate}, on the demo corpus."
    nearest = f"The nearest {KIND} that was trained both ways has {trained_sizes(atlas)}. {losses}"
    if atlas["within"]:
        return nearest
    return f"No measurement near this size: {_why_outside(atlas)}. {nearest}"


def trained_sizes(atlas: Record) -> str:
    """Return the sizes of the nearest measured settings as text."""
    first = atlas["rows"][0]
    return f"width {first['width']:,}, {first['layers']} layers, V {first['vocab']:,}"


def _why_outside(atlas: Record) -> str:
    """Return the reason why no measurement is near a model.

    It is of another kind, or the trained models do not enclose its sizes.
    """
    kind = atlas["kind"]
    if kind != KIND:
        article = "an" if kind[:1] == "e" else "a"
        name = kind or "model of unknown kind"
        return f"this model is {article} {name}, and only {KIND}s were trained at several sizes"
    if atlas["beyond"]:
        return f"this model has {in_words(atlas['beyond'])} that was trained"
    return "this model's combination of sizes lies outside those that were trained"


def remarks(record: Record) -> list[str]:
    """Return the assumptions and limits of a plan's figures, as sentences."""
    model, tokens = record["model"], record["setting"]["tokens"]
    lines = list(model["notes"])
    if model["estimated"] and not model["not_counted"] and not lines:
        lines.append("Sizes alone: only matrices are counted, 12·D² a layer unless --ffn or --kv-heads says otherwise.")
    lines += _catalogue_remarks(model)
    lines.append("Saved: compared with the same model untied, without sharing of layers.")
    lines.append(
        f"A step has {tokens['batch']} × {tokens['length']:,} tokens on one rank. "
        "Training memory: weights, gradients and optimizer state."
    )
    if model["boundary"]:
        lines.append("Tying changes no FLOPs: the head multiplies by a table of the same size.")
    else:
        lines.append("This class has no token head, so there is nothing to tie.")
    lines += layout_sentences(record)
    if any(_changes_at_a_step(choice) for choice in record["choices"]):
        lines.append("A boundary that changes during training is counted as it is at the start.")
    return lines + _first_loss_remarks(record)


def _first_loss_remarks(record: Record) -> list[str]:
    """Return what first losses assume, and why some are not predicted."""
    lines = []
    losses = [choice["first_loss"] for choice in record["choices"]]
    if record["model"]["boundary"] and None in losses:
        lines.append("No first loss is predicted where the head starts from a file of vectors.")
    assumptions = sorted({loss["assumed"] for loss in losses if loss is not None} - {""})
    if assumptions:
        lines.append(f"The first loss assumes {'; '.join(assumptions)}.")
    return lines


def _changes_at_a_step(choice: Record) -> bool:
    """Return whether the boundary of a choice changes during training."""
    spec = BoundarySpec.parse(choice["boundary"])
    return spec.plainly() != spec


def _catalogue_remarks(model: Record) -> list[str]:
    """Return sentences about differences from the catalogue's model of the same name.

    They name a different parameter count and an unknown tying.
    """
    try:
        listed = find(model["name"])
    except PlanError:
        return []
    total, lines = model["parameters"]["total"], []
    if total is None:
        here = ""
    elif model["estimated"]:
        here = f"; this plan estimates {short(total)}"
    else:
        here = f"; this plan counts {total:,}"
    if listed.tied is None:
        lines.append(f"No source says whether {listed.name} ties; this plan uses the default of its class.")
    if listed.parameters is not None and listed.parameters != total:
        lines.append(f"The catalogue gives {listed.name} {listed.parameters:,} parameters{here}.")
    elif listed.parameters is None and listed.size is not None and model["estimated"]:
        lines.append(f"The name of {listed.name} gives {listed.size / 1e9:g} billion parameters{here}.")
    return lines


def as_text(record: Record) -> str:
    """Return the recommendation and the short table as lines of plain text."""
    names = [name.replace("\n", ", ") for name in columns(record)]
    lines = [*record["recommendation"]["sentences"], model_in_words(record)]
    lines += _align([["", *names], *main_rows(record)])
    lines += [certainty_sentence(record), "record() returns every figure."]
    return "\n".join(line for line in lines if line)


def _align(table: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns. A row of one cell is not changed."""
    widths = []
    for index in range(len(table[0])):
        cells = [row[index] for row in table if index < len(row)]
        widths.append(max(len(cell) for cell in cells))
    lines = []
    for name, *cells in table:
        if not cells:
            lines.append(name)
            continue
        padded = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([f"  {name:<{widths[0]}}", *padded]))
    return lines


def short(count: float | None) -> str:
    """Return a count as 7.24 B or 494 M: three digits, B for billions. A dash if it is None."""
    if count is None:
        return NONE
    return scaled(count, ("", "k", "M", "B", "T")).rstrip()
