"""A plan in words and rows: what the terminal, the page and a notebook show, all of it made of the plan's record.

Counts are exact to the parameter, and bytes are of counts. An estimate is marked ≈ and rounded (`certainty`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tiewise.core import Late
from tiewise.core.errors import PlanError
from tiewise.core.files import size
from tiewise.core.found import MINUS, NONE, Listing, Quantity, count, plain, signed
from tiewise.core.spec import BoundarySpec
from tiewise.planning.architecture import COMPONENTS
from tiewise.planning.catalogue import BETTER, Model, find
from tiewise.planning.evidence import KIND, in_words
from tiewise.planning.read_config import GENERIC, unknown_family

Record = Mapping[str, Any]
Show = Callable[[Any], str] | None
NOT_COUNTED = "not counted"
OPTIMIZERS = {"sgd": "SGD", "momentum": "SGD with momentum", "adamw": "AdamW"}
OPTIMIZERS |= {"adamw-bf16-master": "AdamW, bf16, fp32 master"}
SHOWN_DTYPES = ("float32", "bfloat16", "float8_e4m3fn")  # of checkpoints
NATS = "nats per token"
EVIDENCE_HEADER = ["tokens of text", "times seen", "last step: tied − untied, nats/token [95 %]", "tying is", "seeds"]
NEIGHBOUR_HEADER = ["model", "V", "D", "L", "V/D", "ties", "checked"]


def columns(record: Record) -> list[str]:
    """Name every choice, in two lines; the sharing is left out where all share alike."""
    choices = record["choices"]
    alike = len({choice["share"] for choice in choices}) == 1
    return [c["boundary"] if alike else f"{c['boundary']}\nshare {c['share']}" for c in choices]


def rows(record: Record) -> list[list[str]]:
    """Every figure's name and its values choice by choice; a row of one cell heads those that follow."""
    choices, setting = record["choices"], record["setting"]
    found = [["parameters"]]

    def of(part: str) -> list[Any]:
        return [choice[part] for choice in choices]

    def row(
        name: str, show: Callable[[Any], str], held: Sequence[Any], key: str, path: str, about: Show = None
    ) -> None:
        """Add `key` of what every choice holds; `path` tells how certain it is, `about` shows an estimate."""
        values = [None if each is None else each.get(key) for each in held]
        cells = [_cell(choice, path, value, show, about or show) for choice, value in zip(choices, values, strict=True)]
        found.append([name, *cells])

    def counted(name: str, key: str) -> None:
        row(name, count, of("parameters"), key, f"parameters.{key}", short)

    for name in COMPONENTS:
        if any(name in choice["parameters"] for choice in choices):
            counted(component(name), name)
    counted("total", "total")
    sums = [(choice["parameters"]["trainable"], choice["parameters"]["total"]) for choice in choices]
    if any(trainable is not None and trainable < whole for trainable, whole in sums):
        counted("of it trained", "trainable")
    row("saved", lambda saved: signed(saved, 0).removeprefix("+"), choices, "saved", "saved", signed_short)
    row("saved, share", percent, choices, "saved_share", "saved_share")
    found.append(["checkpoint"])
    for dtype in SHOWN_DTYPES:
        row(dtype, size, of("checkpoint_bytes"), dtype, "checkpoint_bytes")
    found.append([f"training, {setting['dtype']}"])
    for optimizer, label in OPTIMIZERS.items():
        row(label, size, [held[optimizer] for held in of("training_bytes")], "total", "training_bytes")
    found.append(["beside them"])
    row("logits, plain loss", size, of("logits_bytes"), "plain", "logits_bytes")
    row("logits, fused loss (GPU)", size, of("logits_bytes"), "fused_cuda", "logits_bytes")
    if record["activation_bytes"]["kept"]:  # else the layers are not known, nor is what they keep
        for name, key in (("activations, an estimate", "kept"), ("with checkpointing", "checkpointed")):
            found.append([name, *[f"≈ {size(record['activation_bytes'][key])}"] * len(choices)])
    found.append(["tables alone, with scales where packed"])
    for name in choices[0]["table_bytes"] if choices else ():
        row(name, size, of("table_bytes"), name, "table_bytes")
    found.append(["work and loss"])
    row("forward, per token", operations, of("flops_per_token"), "forward", "flops_per_token")
    row("backward, per token", operations, of("flops_per_token"), "backward", "flops_per_token")
    if any(choice["decode_bytes"] for choice in choices):
        row("read per decoded token", size, of("decode_bytes"), "weights", "decode_bytes")
        row("cache added per token", size, of("decode_bytes"), "cache_per_token", "decode_bytes")
    log = math.log(record["model"]["vocab"])
    label = f"first loss (ln V = {log:.2f})"
    row(label, lambda nll: plain(nll, 2), of("first_loss"), "nll", "first_loss", lambda nll: f"{nll:.3g}")
    for place, rank in enumerate(choices[0]["ranks"] if choices and setting["world"]["size"] > 1 else ()):
        found.append([cut(rank)])
        held = [ranks[place] for ranks in of("ranks")]
        row("weights, gradients, AdamW", size, held, "memory", "ranks.memory")
        row("tables alone", size, [each["table_memory"] for each in held], "total", "ranks.table_memory")
        if rank["axes"]["fsdp"] > 1:
            row(
                "tables or states gathered",
                size,
                [each["table_memory"] for each in held],
                "gathered",
                "ranks.table_memory",
            )
        row("logits and loss", size, held, "loss", "ranks.loss")
        row("sent per step", size, held, "sent", "ranks.sent")
        row("of it for tables", size, held, "sent_for_tables", "ranks.sent_for_tables")
        if rank["break_even_tokens"] is not None:
            row("saves below, tokens a rank", count, held, "break_even_tokens", "ranks.break_even_tokens")
    return found


def _cell(choice: Record, path: str, value: Any, show: Callable[[Any], str], about: Callable[[Any], str]) -> str:
    """Show a figure, marked ≈ if it is an estimate, or say that it is not counted."""
    if path in choice["not_counted"]:
        return NOT_COUNTED
    if value is None:
        return NONE
    return f"≈ {about(value)}" if path in choice["estimated"] else show(value)


def signed_short(count: float) -> str:
    """494 M or −494 M."""
    return short(count).replace("-", MINUS)


def percent(share: float) -> str:
    """28.3 %."""
    return f"{plain(100 * share, 1)} %"


def cut(rank: Record) -> str:
    """Name a layout and how it cuts the world: fsdp: 4 shards × 2 replicas."""
    axes, words = rank["axes"], {"fsdp": "{} shards", "tp": "tp {}", "replicas": "{} replicas"}
    return f"{rank['layout']}: {' × '.join(word.format(axes[name]) for name, word in words.items() if axes[name] > 1)}"


def layout_taken(record: Record) -> list[str]:
    """Say which layout of the first choice is taken, and which of FSDP's two sends fewer bytes for its tables."""
    of = {rank["layout"]: rank for rank in record["choices"][0]["ranks"]} if record["choices"] else {}
    if len(of) < 2 or record["setting"]["world"]["size"] == 1:
        return []
    world, taken = record["setting"]["world"]["size"], next(rank for rank in of.values() if rank["taken"])
    found = [f"`tiewise train` on {world} processes takes {cut(taken)}"]
    gathered, kept = of.get("fsdp"), of.get("fsdp, tables kept sharded")
    if gathered is None or kept is None:
        return found
    shards = kept["axes"]["fsdp"]
    tokens, limit = (shards * n for n in (record["setting"]["tokens"]["count"], kept["break_even_tokens"]))
    sent = [size(rank["sent_for_tables"]) for rank in (gathered, kept)]
    beside = [size(rank["table_memory"]["gathered"] + (rank["loss"] or 0)) for rank in (gathered, kept)]
    return [
        *found,
        f"{record['choices'][0]['boundary']}, fsdp over {shards}: {'keep' if tokens < limit else 'gather'} the tables "
        f"to send less: gathered {sent[0]} a step, kept sharded {sent[1]}; N = {count(tokens)} tokens of the group, "
        f"and kept sends less below {count(limit)} (about V/2 where tied)",
        f"gathering holds {beside[0]} beside its shards, with the loss; keeping them {beside[1]}",
    ]


def component(name: str) -> str:
    """What a row of it is called."""
    return "maps at the ends" if name == "maps" else name.replace("_", " ")


def operations(value: float) -> str:
    """15.5 GFLOP."""
    return scaled(value, ("", "k", "M", "G", "T", "P")) + "FLOP"


def scaled(value: float, units: Sequence[str]) -> str:
    """Three digits and the unit, each of which is a thousand of the one before: 7.24 B."""
    place = 0
    while abs(value) >= 999.5 and place < len(units) - 1:
        value, place = value / 1000, place + 1
    return f"{value:,.3g} {units[place]}"


def subject(record: Record) -> str:
    """Say in one line what is planned."""
    m = record["model"]
    name = m["name"] if m["family"] in m["name"] else f"{m['name']} ({m['family']})"
    narrow = f", tables of width {m['table_width']:,}" if m["table_width"] != m["width"] else ""
    shares = "" if m["share"] == "none" else f", sharing {m['share']}"
    own = m["boundary"] or "one table and no head"
    return f"{name}: V {m['vocab']:,}, D {m['width']:,}{narrow}, L {m['layers'] or NONE}; as it is {own}{shares}"


def lookups(record: Record) -> list[Listing]:
    """Tables below the choices: thresholds, the nearest models of the catalogue, and the nearest of the atlas."""
    m, body = record["model"], record["thresholds"][0]["formula"].rpartition(", ")[2]
    scale = f"V/d = {m['vocab'] / m['table_width']:,.4g}, {body}, B all but the tables"
    thresholds, trained = [], []
    for row in record["thresholds"]:
        value = _threshold(row)
        name, formula = row["name"].replace("%", " %").replace("still ", ""), row["formula"].partition(", ")[0]
        thresholds.append([name, value, formula])
    for row in (record["atlas"] or {"rows": ()})["rows"]:
        difference = str(Quantity("", row["difference"], row["low"], row["high"], unit=NATS))
        seen, tying = f"{row['seen'] / row['tokens']:.2g}", {-1: "better", 0: NONE, 1: "worse"}[row["sign"]]
        trained.append([count(row["tokens"]), seen, difference, tying, str(row["seeds"])])
    found = [
        Listing("Thresholds", [scale, "value", "formula"], thresholds),
        Listing("Nearest in V, D and L", NEIGHBOUR_HEADER, neighbours(record)),
        Listing(f"Nearest {KIND}s of the atlas", EVIDENCE_HEADER, trained),
    ]
    return [listing for listing in found if listing.rows]


def _threshold(row: Record) -> str:
    """Show the value of a threshold; 4 digits, or 3 of an estimate."""
    value = row["value"]
    if value is None:
        return NOT_COUNTED
    if row["estimated"]:
        return f"≈ {value:,.3g}"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"


def how_to_be_exact(record: Record) -> str:
    """Say what is estimated or not counted, and how to count it exactly; "" for a plan that is exact."""
    model = record["model"]
    build = " For exact figures, add --build to the command (needs torch and transformers)."
    unknown = unknown_family(model["family"])
    if model["not_counted"]:
        missing = f"Not counted, so no total is known: {', '.join(model['not_counted'])}."
        missing = f"{unknown}. {missing}" if unknown else missing
        return missing + build if model["boundary"] else missing
    if not model["estimated"]:
        return ""
    if model["family"] == GENERIC:
        return "Figures marked ≈ are estimates from sizes. For exact figures, give a config.json or --like NAME."
    if unknown:
        return f"{unknown}: figures marked ≈ are estimates from the usual keys of its config.{build}"
    return f"Figures marked ≈ are estimates: tiewise has no reader for {model['family']}.{build}"


def nearest(record: Record) -> str:
    """Say how many of the nearest models of the catalogue tie."""
    tied = sum(bool(model["tied"]) for model in record["neighbours"])
    return f"Of the {len(record['neighbours'])} models of the catalogue nearest in size, {tied} tie."


def neighbours(record: Record) -> list[list[str]]:
    """Rows under `NEIGHBOUR_HEADER`: the models of the catalogue nearest in V, D and L."""
    tied, found = {True: "tied", False: "untied", None: "not known"}, []
    for row in record["neighbours"]:
        sizes = [f"{row['vocab'] or 0:,}", f"{row['width']:,}", str(row["layers"]), plain(row["ratio"], 1)]
        found.append([row["name"], *sizes, tied[row["tied"]], row["checked"]])
    return found


def evidence(record: Record) -> str:
    """Say whether the atlas speaks of this size, and what tying did at the nearest; "" where nothing can be tied."""
    if (atlas := record["atlas"]) is None:
        return ""
    own, which = "is not enclosed by those of the atlas", "At the nearest"
    if atlas["kind"] != KIND:
        said = f"{'an' if atlas['kind'][:1] == 'e' else 'a'} {atlas['kind'] or 'model of a kind that is not told'}"
        own, which = f"is {said}, and the atlas varied the size of {KIND}s only", f"At the nearest {KIND}"
    elif atlas["beyond"]:
        own = f"has {in_words(atlas['beyond'])} of the atlas"
    no = f"No evidence of what tying does to the loss: this model {own}"
    row = atlas["rows"][0]
    nearest = f"{which}, width {row['width']:,}, {row['layers']} layers and V {row['vocab']:,}"
    ends = " and ".join(map(_gained, {row["tokens"]: row for row in (row, atlas["rows"][-1])}.values()))
    said = f"The atlas trained {KIND}s around this size" if atlas["within"] else no
    return f"{said}. {nearest}, tying {ends} tokens of text, by the loss of the last step."


def _gained(row: Record) -> str:
    """Gained 0.02 [0.01, 0.03] nats per token with 25,000."""
    low, value, high = sorted(abs(row[name]) for name in ("low", "difference", "high"))  # of a sign that is detected
    by = f"{Quantity('', value, low, high, unit=NATS)} {NATS}"
    words = {-1: f"gained {by}", 0: "made no difference that was detected", 1: f"lost {by}"}
    return f"{words[row['sign']]} with {count(row['tokens'])}"


def remarks(record: Record) -> list[str]:
    """What a reader should know before believing a number."""
    model, choices, tokens = record["model"], record["choices"], record["setting"]["tokens"]
    found = [*model["notes"]]
    if model["estimated"] and not model["not_counted"] and not found:
        found.append("planned from sizes: matrices alone are counted, 12·D² per layer where no size says otherwise")
    found += _of_catalogue(model)
    found += [
        "saved: against the same model untied, nothing shared",
        f"a step: {tokens['batch']} × {tokens['length']:,} tokens of one rank; "
        "training: weights, gradients, optimizer state",
        "tying changes no FLOPs: the head multiplies by its table, whoever else reads it"
        if model["boundary"]
        else "this class has no token head: with one table there is nothing to tie, and tying saves nothing",
    ]
    found += layout_taken(record)
    if any(spec.plainly() != spec for spec in (BoundarySpec.parse(choice["boundary"]) for choice in choices)):
        found.append("a boundary that changes at a step is counted as it starts")
    assumed = sorted({choice["first_loss"]["assumed"] for choice in choices if choice["first_loss"]} - {""})
    return [*found, f"first loss assumes {'; '.join(assumed)}"] if assumed else found


def _of_catalogue(model: Record) -> list[str]:
    """Say where the catalogue's row of the same name knows less, or has another count."""
    try:
        row = find(model["name"])
    except PlanError:
        return []
    total, found = model["parameters"]["total"], []
    if total is None:
        here = ""
    elif model["estimated"]:
        here = f"; ≈ {short(total)} are estimated here"
    else:
        here = f"; {total:,} are counted here"
    if row.tied is None:
        found.append(f"nobody was seen to say whether {row.name} ties: its class's default is taken")
    if row.parameters is not None and row.parameters != total:
        found.append(f"{row.name} has {row.parameters:,} parameters by the catalogue{here}")
    elif row.parameters is None and row.size is not None and model["estimated"]:
        found.append(f"{row.name} has about {row.size / 1e9:g} billion parameters by its name{here}")
    return found


def as_text(record: Record) -> str:
    """Return what is planned and every figure as lines of plain text."""
    table = [["", *(name.replace("\n", ", ") for name in columns(record))], *rows(record)]
    widths = [max(len(row[i]) for row in table if i < len(row)) for i in range(len(table[0]))]
    lines = [*filter(None, [subject(record), how_to_be_exact(record)])]
    for name, *cells in table:
        padded = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([f"  {name:<{widths[0]}}", *padded]) if cells else name)
    return "\n".join([*lines, *filter(None, [evidence(record)]), ".record() gives everything as JSON takes it"])


# on a terminal

_BOX, _CONSOLE, _TABLE, _TEXT = (Late(f"rich.{name}") for name in ("box", "console", "table", "text"))
WIDEST = 24  # letters of a choice's column
SOURCE = 19  # letters of a source
WIDE = 100  # columns of a terminal that has room for sources
LESS_NEEDED = (
    "status",
    "V/D",
    "tables",
    "tied",
)  # columns of the catalogue that a narrow terminal leaves out, in order
HEADER = ("model", "V", "D", "L", "V/D", "params", "tables", "tied", "status", "source")


def plan_view(record: Record, width: int) -> Any:
    """A plan's record for a terminal of `width`: choices side by side, those that do not fit below, then all else."""
    return _CONSOLE.Group(*_parts(record, width))


def _parts(record: Record, width: int) -> Iterator[Any]:
    yield _TEXT.Text(subject(record), style="bold")
    if first := how_to_be_exact(record):
        yield _TEXT.Text(first)
    yield _TEXT.Text(nearest(record))
    names, shown = columns(record), rows(record)
    labels = max(len(name) + 2 * bool(cells) for name, *cells in shown) + 1
    texts = [line for name in names for line in name.split("\n")] + [cell for _, *cells in shown for cell in cells]
    fits = max(1, (width - labels) // (min(WIDEST, max(map(len, texts))) + 2))
    for start in range(0, len(names), fits):
        part = slice(start, start + fits)
        table = _TABLE.Table(box=_BOX.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
        table.add_column("", no_wrap=True)
        for name in names[part]:
            table.add_column(_TEXT.Text(name), justify="right", overflow="fold")
        for name, *cells in shown:
            label = _TEXT.Text(f"  {name}") if cells else _TEXT.Text(name, style="bold")
            table.add_row(label, *map(_TEXT.Text, cells[part]), style="bold" if name == "total" else "")
        table.add_row("")
        yield table
    for listing in lookups(record):
        yield _TEXT.Text(listing.name, style="bold")
        if listing.header is EVIDENCE_HEADER:
            yield _TEXT.Text(evidence(record))
        yield _looked_up(listing)
    for remark in (*record["notes"], BETTER):
        yield _TEXT.Text(f"· {remark}", style="dim")


def _looked_up(listing: Listing) -> Any:
    """A table without lines, indented, columns of numbers to the right."""
    table = _TABLE.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for place, name in enumerate(listing.header):
        number = all(row[place][:1] in "0123456789−–" for row in listing.rows)
        table.add_column(name if place else f"  {name}", justify="right" if number and place else "left")
    for name, *cells in listing.rows:
        table.add_row(_TEXT.Text(f"  {name}"), *map(_TEXT.Text, cells))
    table.add_row("")
    return table


def models_table(found: Sequence[Model], width: int) -> Any:
    """One row per model and under it how to know better; columns that a terminal has no room for are left out whole."""
    rows = [dict(zip(HEADER, _model_cells(model), strict=True)) for model in found]
    widths = {name: max(map(len, (name, *(row[name] for row in rows)))) + 2 for name in HEADER}
    shown = list(HEADER if width >= WIDE else HEADER[:-1])
    left_out = []
    for name in LESS_NEEDED:
        if name in shown and sum(widths[each] for each in shown) - 2 > width:
            shown.remove(name)
            left_out.append(name)
    many = f"{len(found)} model{'' if len(found) == 1 else 's'}"
    caption = f"\n{many}; tables: their share of all parameters; ≈: what the name says.\n{BETTER}"
    if left_out:
        caption = f"\nA wider terminal, and --json, also show: {', '.join(reversed(left_out))}.{caption}"
    table = _TABLE.Table(box=_BOX.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.caption, table.caption_justify = _TEXT.Text(caption), "left"
    for name in shown:
        left = name in ("model", "tied", "status", "source")
        # a name may break, a figure never
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "model", overflow="fold")
    for row in rows:
        table.add_row(*(_TEXT.Text(row[name]) for name in shown))
    return table


def _model_cells(model: Model) -> list[str]:
    """Return what is shown of a model, under `HEADER`."""
    source = re.sub("[;,].*| config class default| configs/models", "", model.source)
    return [
        model.name,
        f"{model.vocab:,}" if model.vocab else NONE,
        f"{model.width:,}",
        str(model.layers),
        plain(model.ratio, 1),
        short(model.size) if model.parameters or not model.size else f"≈ {short(model.size)}",
        f"{100 * model.table_share:.1f} %" if model.table_share else NONE,
        {True: "yes", False: "no", None: "?"}[model.tied],
        model.checked,
        source if len(source) <= SOURCE else source[: SOURCE - 1].rstrip() + "…",
    ]


def short(count: float | None) -> str:
    """7.24 B, 494 M: three digits, B for billions; a dash where it is not known."""
    return NONE if count is None else scaled(count, ("", "k", "M", "B", "T")).rstrip()
