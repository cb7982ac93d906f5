"""`tiewise plan`: costs and savings of tying, factoring and sharing before training.

`plan --list` lists the vocabulary, width, depth and tying of public models.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tiewise.cli import options as o
from tiewise.core.errors import PlanError

if TYPE_CHECKING:
    from tiewise.planning.plan import ModelSource, Plan

SIZES = "Sizes: of a model without a config, or other sizes of a public one"
SIZE_OPTIONS = ("vocab", "width", "layers", "heads", "kv_heads", "ffn", "gated")
SETTING_OPTIONS = ("batch", "length", "dtype", "world", "tp", "fsdp")
LISTED = "List of public models"
LIST_FILTERS = ("tied", "family", "min_vocab", "min_size", "max_size", "sort")


def _in(panel: str, kind: type, *names: str, default: Any = None, **described: Any) -> o.Option:
    """Return an option in a panel of the help."""
    return kind, typer.Option(default, *names, rich_help_panel=panel, **described)


@o.taking(
    model=(
        str,
        typer.Argument(None, metavar="[MODEL]", help="A config.json, its folder, or a public model (--list has all)."),
    ),
    like=(str, typer.Option(None, metavar="NAME", help="A public model, also if a folder has its name.")),
    arms=(
        str,
        typer.Option(
            "tied,untied",
            *("--arms", "--boundary", "-b"),
            metavar="LIST",
            help="Boundaries side by side, such as tied,untied,factored:128.",
        ),
    ),
    share=(
        str,
        typer.Option(
            None,
            metavar="LIST",
            help="Parts that layers share, one column each: none,attention,ffn,all,all:groups=2.",
            show_default="as it is",
        ),
    ),
    full=(
        bool,
        typer.Option(False, "--full", help="Print every figure, thresholds, nearest models and assumptions."),
    ),
    build=(bool, typer.Option(False, "--build", help="Count by building the model without memory (needs torch).")),
    no_build=(
        bool,
        typer.Option(
            False,
            "--no-build",
            help="Do not build the class with transformers for an exact count. TIEWISE_NO_BUILD=1 does the same.",
        ),
    ),
    vocab=_in(SIZES, int, help="Tokens V."),
    width=_in(SIZES, int, help="Width D."),
    layers=_in(SIZES, int, help="Layers L."),
    heads=_in(SIZES, int, help="Attention heads.", show_default="1"),
    kv_heads=_in(SIZES, int, help="Key-value heads.", show_default="as many as heads"),
    ffn=_in(SIZES, int, help="Width of the feed-forward part.", show_default="4·D"),
    gated=_in(SIZES, bool, "--gated", help="The feed-forward part has a gate (three matrices)."),
    batch=_in(o.TRAINING, int, default=8, help="Sequences of one rank in one step."),
    length=_in(o.TRAINING, int, default=1024, help="Tokens of a sequence."),
    dtype=_in(o.TRAINING, str, default="float32", help="Type of weights and gradients: float32, bfloat16 or float16."),
    init=_in(o.TRAINING, float, help="Standard deviation of weights at the start.", show_default="the config's"),
    world=_in(o.MACHINES, int, default=1, help="Ranks: adds data parallel and FSDP, tables gathered or kept sharded."),
    tp=_in(o.MACHINES, int, default=1, help="Ranks that split the vocabulary, by tiewise and by the usual form."),
    fsdp=_in(o.MACHINES, int, help="Ranks that shard it all; with --tp, both at once.", show_default="the world"),
    list_=_in(LISTED, bool, "--list", default=False, help="List public models and stop."),
    tied=_in(LISTED, bool, "--tied/--untied", help="Only models that tie, or only those that do not."),
    family=_in(LISTED, str, help="Only names or model types that begin so: qwen, gpt_neox."),
    min_vocab=_in(LISTED, int, help="Only vocabularies of at least this many tokens."),
    min_size=_in(LISTED, float, help="Only models of at least this many billion parameters."),
    max_size=_in(LISTED, float, help="Only models of fewer than this many billion parameters."),
    sort=_in(LISTED, str, help="name, size, vocab, width, layers, ratio (V/D) or share (of the tables)."),
    plot=_in(o.RESULTS, Path, metavar="FILE.html", help="Draw the plan too, as one page that opens offline."),
    overwrite=_in(o.RESULTS, bool, "--overwrite", default=False, help="Replace the page that --plot names."),
    json_=(bool, o.JSON),
    quiet=(bool, o.QUIET),
)
def plan(**parameters: Any) -> None:
    """Recommend tied or untied ends, and count what each choice costs.

    The first line is the recommendation: what tying saves, and what similar public models do. Then one table; --full
    prints parameters by part, bytes, work and thresholds. The model is a config, a public model (which size options
    change), or sizes alone (--vocab, --width, --layers). It loads no weights. A config that tiewise cannot count
    exactly is counted by the class of the installed transformers. An estimate is marked ≈; if a part of the model is
    not counted, no total is printed. --list prints the public models instead.
    """
    if parameters["list_"]:
        return _list_models(parameters)
    for name in LIST_FILTERS:
        if parameters[name] is not None:
            option = {"tied": "--tied or --untied"}.get(name, "--" + name.replace("_", "-"))
            raise PlanError(f"{option} without --list", "add --list, or leave it out")
    _print_plan(parameters)


def _print_plan(parameters: dict[str, Any]) -> None:
    """Plan the model that the parameters describe, and print or draw the result."""
    from tiewise.core.spec import split_specs
    from tiewise.planning.costs import Setting
    from tiewise.planning.plan import plan as make_plan

    plot: Path | None = parameters["plot"]
    _require_new_page(plot, parameters["overwrite"])
    sizes = {name: parameters[name] for name in SIZE_OPTIONS if parameters[name] is not None}
    model = _model(parameters["model"], parameters["like"], sizes)
    if parameters["build"] and parameters["no_build"]:
        raise PlanError("--build and --no-build at once", "leave one of them out")
    if parameters["build"]:
        model = _built(model)
    setting = Setting(**{name: parameters[name] for name in SETTING_OPTIONS}, std=parameters["init"])
    sharings = split_specs(parameters["share"]) if parameters["share"] else None
    arms, build = split_specs(parameters["arms"]), not parameters["no_build"]
    result = make_plan(model, arms, sharings, setting, build=build)
    if plot is not None:
        _write_page(result, plot, parameters["quiet"])
    if parameters["json_"]:
        return o.print_json(result.record())
    from tiewise.planning.plan_view import plan_view

    o.print_view(lambda width: plan_view(result.record(), width, parameters["full"]))


def _require_new_page(plot: Path | None, overwrite: bool) -> None:
    """Refuse to replace a page without `--overwrite`. Raises PlanError."""
    if plot is not None and plot.is_file() and not overwrite:
        raise PlanError(f"{plot} exists already", "add --overwrite to replace it, or choose another place with --plot")


def _write_page(result: Plan, plot: Path, quiet: bool) -> None:
    """Write the page of a plan, and print its path."""
    o.need("plotly", "jinja2", extra="plots")
    from tiewise.report.plan_page import write_plan

    page = write_plan(result, plot, o.command_line())
    if not quiet:
        o.print_to_stderr(f"page: {page}")


def _model(model: str | None, like: str | None, sizes: dict[str, int]) -> ModelSource:
    """Return the model to plan, of a config, of the catalogue, or of sizes. Raises PlanError for none or several."""
    from tiewise.planning.call_keywords import read_size_keywords
    from tiewise.planning.plan import named_model

    source: ModelSource | None = read_size_keywords(model, {"like": like, **sizes})
    if source is None:
        remedy = "give one of: a config.json or its folder, a public model, or --vocab, --width and --layers"
        raise PlanError("no model to plan", remedy)
    if isinstance(source, str):
        return named_model(source)
    return source


def _built(model: ModelSource) -> ModelSource:
    """Return the counts of a model that is built on the meta device.

    They are exact also for families that no reader of tiewise supports.
    """
    o.need("torch", "transformers")
    from tiewise.planning.catalogue import Model
    from tiewise.planning.plan import read_config_file

    values: Mapping[str, Any] | None = None
    if isinstance(model, Path):
        values = read_config_file(model)
    elif isinstance(model, Model):
        values = model.config
    elif isinstance(model, dict):  # a model of the catalogue at other sizes
        values = model
    if values is None:
        raise PlanError("--build has no config to build", "give one, or a model whose sizes the catalogue has")
    from tiewise.planning.built_counts import count_on_meta

    return count_on_meta(values)


def _list_models(parameters: dict[str, Any]) -> None:
    """Print the public models that the filters of `--list` select."""
    from tiewise.planning.catalogue import BETTER, select

    if parameters["model"] is not None or parameters["like"] is not None:
        raise PlanError("--list with a model to plan", "leave the model or --list out")
    least, most = (None if size is None else size * 1e9 for size in (parameters["min_size"], parameters["max_size"]))
    family, min_vocab = parameters["family"] or "", parameters["min_vocab"] or 0
    selected = select(parameters["tied"], family, min_vocab, least, most, parameters["sort"])
    if parameters["json_"]:
        return o.print_json({"models": [model.record() for model in selected], "note": BETTER})
    from tiewise.planning.plan_view import models_table

    o.print_view(lambda width: models_table(selected, width))
