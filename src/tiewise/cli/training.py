"""`tiewise compare`, the main job; `train`, `heal`: one run by the same code; `kernels`: what computes their losses."""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tiewise.cli import options as o
from tiewise.core.errors import Interrupted, RunError, TiewiseError, ctrl_c_behind

if TYPE_CHECKING:
    from tiewise.inspection.running.passages import Healed
    from tiewise.training.results import SingleRun
    from tiewise.training.settings import Settings

# what stands under the same name in `run.yaml`
OPTIONS = (
    *("seeds", "seed", "recipe", "split", "tokenizer", "model", "steps"),
    *("minutes", "match", "tune", "backend", "teacher", "what"),
)
CORPUS = typer.Argument(
    None, help="With --recipe: a folder with train.txt, valid.txt and test.txt, spaces part words.", show_default=False
)
RECIPE = typer.Option(
    None,
    metavar="NAME",
    help="A published recurrent model, trained on CORPUS: press-wolf-small, press-wolf-large, inan-200, inan-650, "
    "pytorch-200, pytorch-650 or awd. Or an ALBERT, trained on --text: albert-small or albert-base.",
)
SHARE = typer.Option(
    None,
    metavar="SHARING",
    help="What an ALBERT's layers share: none, attention, ffn, all, all:groups=2, … Of several, separated by commas, "
    "compare trains each with every boundary.",
    show_default="as the recipe",
)
SPLIT = typer.Option(
    None,
    metavar="random|contiguous",
    help="What is held out: documents, and parts of long files, drawn at random; or the last parts of the text.",
    show_default="random",
)
TOKENIZER = typer.Option(
    None, help="bpe:SIZE (of the training split), bytes, tokenizer.json or a Hugging Face id.", show_default="bpe:4096"
)
MODEL = typer.Option(None, help="llama, gpt2, or the path of a config.json.", show_default="llama")
STEPS = typer.Option(None, help="Optimizer steps of each run.", show_default="600")
SET = typer.Option(None, "--set", metavar="NAME=VALUE", help="Any setting of run.yaml, e.g. width=256. Repeatable.")
CONFIG = typer.Option(None, "--config", help="YAML file of settings (any of run.yaml); options win over it.")
OUT = typer.Option(None, "--out", "-o", help="Folder for all that the run writes.", show_default="runs/<command>")
TABLES = typer.Option(
    "auto",
    metavar="auto|keep|gather",
    help="With --fsdp: keep the tables in rows, to which hidden states travel, or gather them. auto: what sends less.",
)
ARMS = typer.Option(
    None,
    *("--arms", "--boundary", "-b"),
    help="Boundaries to compare, separated by commas; the first is the reference. "
    "E.g. tied,untied,factored:64+bias,residual:16.",
    show_default="tied,untied,factored:64",
)
MATCH = typer.Option(
    None,
    help="width: same body. parameters, flops: what an arm saves of these at the boundary is spent on its body.",
    show_default="width",
)
BACKEND = typer.Option(None, metavar="torch|flax", help="flax: steps are taken in JAX.", show_default="torch")
ELEMENT = typer.Option(
    None,
    metavar="N",
    help="With --resume: train only the N-th run of --out, as one job of a cluster. Without --resume, 0: prepare --out "
    "and train nothing.",
)
BOUNDARY = typer.Option(None, "--boundary", "-b", help="To train, e.g. factored:64+bias.", show_default="tied")
TEACHER = typer.Option(None, metavar="ORIGINAL", help="The model that it was made of.", show_default=False)
FSDP = typer.Option(1, metavar="N", help="Under torchrun: that many processes hold each model between them.")
TP = typer.Option(1, metavar="N", help="Under torchrun: that many hold each matrix, and see the same tokens.")
# what several commands take, in the order of their help
TRAINED: o.Options = {"recipe": (str, RECIPE), "text": (list[str], o.TEXT), "split": (str, SPLIT)}
TRAINED |= {"tokenizer": (str, TOKENIZER), "model": (str, MODEL), "steps": (int, STEPS)}
PLACE: o.Options = {"out": (Path, OUT), "resume": (bool, o.RESUME), "overwrite": (bool, o.OVERWRITE)}
RUN: o.Options = {"set_": (list[str], SET), "config": (Path, CONFIG), **PLACE}
RUN |= {"fsdp": (int, FSDP), "tp": (int, TP), "tables": (str, TABLES)}
SAID: o.Options = {"json_": (bool, o.JSON), "quiet": (bool, o.QUIET)}


@o.taking(
    corpus=(str, CORPUS),
    arms=(str, ARMS),
    share=(str, SHARE),
    seeds=(int, typer.Option(None, help="Runs of each arm, paired across arms.", show_default="3")),
    **TRAINED,
    minutes=(float, typer.Option(None, help="Instead of --steps: the time for all, start and tuning included.")),
    match=(str, MATCH),
    tune=(bool, typer.Option(None, "--tune/--no-tune", help="Nine short runs per arm over init and learning rate.")),
    backend=(str, BACKEND),
    **RUN,
    jobs=(str, o.JOBS),
    launcher=(str, o.LAUNCHER),
    element=(int, ELEMENT),
    **SAID,
)
def compare(**asked: Any) -> None:
    """Train a model under several tying choices and say which is better here, and whether the difference is real.

    With no option: three choices, three seeds, a small decoder on the built-in demo corpus, a few minutes on two cores.
    """
    found = carried_out("compare", asked)
    if found is None:
        return
    if asked["element"] == 0:
        train_one = shlex.join(["tiewise", "compare", "--out", str(found.folder), "--resume", "--element", "N"])
        print(f"{found.runs} runs are prepared in {found.folder}")
        return print(f"train each: {train_one}")
    if asked["element"] is not None:
        result = found.result
        return print(f"{result.arm} seed {result.seed}: validation nll {result.heldout_nll:.4f}")
    from tiewise.report.comparison_found import comparison_view
    from tiewise.training.folder import folder_name, how_it_loads
    from tiewise.training.results import FINAL

    o.print_view(comparison_view(found))
    folder = found.folder or Path()
    loads = {name: how_it_loads(folder / name / "seed-1") for name in map(folder_name, found.arms)}
    others = (f"; {name} {how}" for name, how in loads.items() if how)
    print(f"report: {folder / 'report.html'}\nmodels: {folder}/ARM/seed-N/{FINAL}{''.join(others)}")


@o.taking(
    corpus=(str, CORPUS),
    boundary=(str, BOUNDARY),
    share=(str, SHARE),
    seed=(int, typer.Option(None, help="Of data order, body and tables.", show_default="1")),
    **TRAINED,
    **RUN,
    **SAID,
)
def train(**asked: Any) -> None:
    """Train one model with a boundary, and write it where `from_pretrained` of transformers reads it: `final`.

    Where only `tiewise.load` reads that, the same model lies beside it as plain dense tables: `dense`.
    """
    trained: SingleRun | None = carried_out("train", asked)
    if trained is None:
        return
    from tiewise.training.folder import how_it_loads

    result = trained.result
    if not isfinite(result.heldout_nll):
        print("diverged: the loss is no number any more; try a lower --set learning_rate")
    if result.shares:
        measured = f"per masked token (by their frequencies: {result.unigram_nll:.4f})"
    else:
        measured = f"(perplexity {result.perplexity:.1f}, {result.bits_per_byte:.3f} bits per byte)"
    print(f"validation nll {result.heldout_nll:.4f} {measured}, training nll {result.train_nll:.4f}")
    for name, of in result.shares.items():
        what = "masked tokens" if name == "masked" else f"pairs ({name})"
        interval = f"95 % interval {of.low:.1%} to {of.high:.1%}, n = {of.count:,}"
        print(f"{what}: {of.share:.1%} right ({interval}), nll {of.nll:.4f}")
    if "changed" in trained.setting:
        from tiewise.report.comparison_found import paper_view
        from tiewise.report.papers import beside_figures

        own, recipe, changed = {result.arm: [result.perplexity]}, trained.setting["recipe"], trained.setting["changed"]
        o.print_view(paper_view(*beside_figures(recipe, changed, own, trained.data)))
    print("; it ".join(filter(None, [f"model: {trained.model}", how_it_loads(trained.folder)])))


@o.taking(
    model=(Path, typer.Argument(None, help="Folder of the rewritten model.", show_default=False)),
    teacher=(Path, TEACHER),
    what=(str, typer.Option(None, metavar="tables|all", help="What learns.", show_default="tables")),
    seed=(int, typer.Option(None, help="Of data order.", show_default="1")),
    text=(list[str], o.TEXT),
    split=(str, SPLIT),
    steps=(int, typer.Option(None, help="Optimizer steps.", show_default="300")),
    set_=(list[str], SET),
    **PLACE,
    **SAID,
)
def heal(**asked: Any) -> None:
    """Have a rewritten model (tied, factored, trimmed, transplanted) learn back what it lost, and say how much it is.

    It learns its original's probabilities of every next token; with another vocabulary, the text.
    """
    asked |= dict.fromkeys(("share", "config", "boundary", "recipe", "corpus"))
    asked |= {"fsdp": 1, "tp": 1, "tables": "auto", "kind": "heal"}
    found: Healed | None = carried_out("heal", asked)
    if found is not None:
        print(f"{found.said()}\nmodel: {found.model}")


def kernels(
    action: str = typer.Argument(None, metavar="[build]", help="Compile them for this machine, into your cache."),
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Say whether compiled kernels are used here, and why not; `build` compiles them: needs g++ and AVX-512.

    Without them everything computes the same, by the portable path. TIEWISE_KERNELS=off leaves them alone.
    """
    if action not in (None, "build"):
        raise typer.BadParameter(f"{action}: `tiewise kernels` says what is there, `tiewise kernels build` compiles it")
    o.need("torch")
    from tiewise.boundary.ops import fast_products as compiled

    if action:
        compiled.build()
    said = compiled.kernels_state()
    if json_:
        o.print_json({"kernels": said, "used": compiled.kernels() is not None})
    else:
        typer.echo(f"kernels: {said}")


def carried_out(command: str, asked: dict[str, Any]) -> Any:
    """Do what a command's parameters, by their names, ask for; return what came out, or None where all is said.

    Ctrl-C exits 130 and a disk that takes no more is a `RunError`; both say how to go on. Of several processes one
    speaks, the others exit with the same code.
    """
    since, begun = time.monotonic(), asked["resume"]
    out, single = asked["out"] or Path(f"runs/{command}"), command != "compare"
    o.need_torch()
    from tiewise.core import ranks
    from tiewise.core.files import disk_error, quiet_threads
    from tiewise.training.least_time import refuse_impossible_minutes

    def begin() -> None:
        nonlocal begun
        begun = True  # the run is on disk: `--resume` goes on with it

    launcher, element = asked.get("launcher", "local"), asked.get("element")
    if element is not None:
        refuse_beside_element(element, out, launcher, resume=asked["resume"])
    more = [] if launcher == "local" else ["--launcher", launcher]
    more += [] if element is None else ["--element", str(element)]
    resume, code = shlex.join(["tiewise", command, "--out", str(out), "--resume", *more]), 2
    try:
        with quiet_threads():
            ranks.join(asked["fsdp"], asked["tp"], asked["tables"])
            settings = ranks.first_does(lambda: chosen(out, asked, single=single))
            if settings is not None and ranks.size() == 1 and launcher == "local":
                refuse_impossible_minutes(settings)
            o.hush_libraries()
            from tiewise.lab import carry_out, finish_healing
            from tiewise.training.compare import (
                Display,
                finish,
                finish_element,
                finish_one,
                prepared,
                refuse_trials,
            )
            from tiewise.training.workers import settle

            settle()
            display = Display.on_stderr(quiet=asked["quiet"])
            work: Any = {"compare": finish, "train": finish_one, "heal": finish_healing}[command]
            if settings is not None and element == 0:
                refuse_trials(settings)
                work = prepared
            found: Any = (
                finish_element(out, display, element)
                if element
                else carry_out(
                    work,
                    settings,
                    out,
                    o.command_line(),
                    display,
                    overwrite=asked["overwrite"],
                    jobs=asked.get("jobs", 1),
                    launcher=launcher,
                    gone=lambda: time.monotonic() - since,
                    begun=begin,
                )
            )
            speaks = ranks.first()
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, ranks.Elsewhere):
            pass  # the process that it happened in says it
        elif ctrl_c_behind(error):
            code = 130
            if ranks.first() and begun:
                kept = "a checkpoint is written" if isinstance(error, Interrupted) else "what was finished is kept"
                o.tell(f"tiewise: interrupted, {kept}; {resume} goes on")
        else:
            way = f"make room there, then {resume}" if begun else "make room there, or choose another --out"
            said = error if isinstance(error, TiewiseError) else disk_error(error, out, way)
            if said is None and ranks.lost(error):
                said = RunError("another process of this run has ended", f"{resume} goes on from the last checkpoint")
            if said is None:
                raise
            if ranks.size() == 1:
                raise said from None
            o.tell(f"tiewise: {said}")
        ranks.leave(together=ranks.known(error))
        raise typer.Exit(code) from None
    ranks.leave(together=False)
    if speaks and asked["json_"]:
        o.print_json(found.record())
    return found if speaks and not asked["json_"] else None


def refuse_beside_element(element: int, out: Path, launcher: str, *, resume: bool) -> None:
    """Refuse options that do not go with `--element`. Raises RunError."""
    if element == 0:
        if launcher != "local":
            raise RunError(f"--element 0 with --launcher {launcher}", "leave --launcher out")
        if resume:
            raise RunError("--element 0 with --resume", f"{out} is prepared; give a number from 1")
    elif not resume or launcher != "local":
        raise RunError(f"--element {element}", f"give only --out {out} --resume beside it")


def chosen(out: Path, asked: dict[str, Any], *, single: bool) -> Settings | None:
    """Return the checked settings: defaults, the recipe, the YAML file, `--set`, options; None given is not given.

    They are those of one run where `single`, else of a comparison; a recipe of several arms is trained tied. `--share`
    is for every arm. With `--resume`, None: the run has its settings.
    """
    import yaml

    from tiewise.training.settings import NO_YAML, Settings, read_yaml, recipe

    share, config, typed = asked["share"], asked["config"], {}
    arms = asked["boundary"] if single else asked["arms"]
    options = {name: asked[name] for name in OPTIONS if asked.get(name) is not None}
    options |= {} if arms is None else {"arms": [arms] if single else o.split_specs(arms)}
    options |= texts(asked["text"], asked["recipe"], asked["corpus"])
    if asked["resume"]:
        if asked["overwrite"] or config or asked["set_"] or options or share is not None:
            raise RunError("--resume takes its settings from the run", f"give only --out {out} --resume")
        return None
    record = recipe(options["recipe"]) if "recipe" in options else {}
    if single:
        record |= {"arms": record["arms"] if len(record.get("arms", ())) == 1 else ["tied"], "seed": 1}
    if asked.get("kind") == "heal":
        from tiewise.training.kinds.heal import healing

        record |= healing(options.pop("model", None), options.pop("teacher", None))
    of_file = {} if config is None else {name: value for name, value in read_yaml(config).items() if value is not None}
    record |= of_file
    for item in asked["set_"] or []:
        name, equals, value = item.partition("=")
        if not equals:
            raise RunError(f"--set {item!r}", "write --set NAME=VALUE")
        try:
            typed[name] = yaml.safe_load(value)
        except NO_YAML:
            raise RunError(f"--set {item!r}: the value cannot be read", "write NAME=VALUE with a plain value") from None
    places = dict.fromkeys(of_file, str(config)) | dict.fromkeys(typed, "--set")
    typed |= options
    length = next((layer for layer in (typed, record) if layer.keys() & {"steps", "minutes"}), {})  # typed ones win
    if "steps" in typed:
        record.pop("minutes", None)
    record |= typed
    if not single and record.get("seed") is not None:
        raise RunError("seed is a setting of train", "use --seeds N, whose runs are seeds 1 to N")
    settings = Settings.of(record, places=places)
    if share is not None:
        if not hasattr(settings.own, "shared_arms"):
            what = f"--share with model = {settings.model!r}: what layers share is a choice of ALBERT runs"
            raise RunError(what, "add --recipe albert-small, say, or leave --share out")
        settings = replace(settings, arms=settings.own.shared_arms(settings.arms, o.split_specs(share)))
    if settings.backend == "flax":
        o.need("jax", "flax", "optax", extra="flax")
    settings = settings.checked()
    if {"steps", "minutes"} <= length.keys():
        raise RunError("both steps and minutes are given", "leave one of them out: minutes become steps")
    return settings


def texts(text: list[str] | None, recipe: str | None, corpus: str | None) -> dict[str, tuple[str, ...]]:
    """Return the setting of what a command is to read, if any is given: `--text`, or the corpus of a recipe."""
    words = recipe is not None and not recipe.startswith("albert")  # other recipes are of any text, in sentences
    if recipe is None and corpus is not None:
        what, fix = f"{corpus!r} without --recipe", "add --recipe NAME for a word-level corpus, or use --text"
        if (Path(corpus) / "config.json").is_file():
            what, fix = f"{corpus!r} is a model, and this command trains new ones", "give it your text: --text FILE"
        raise RunError(what, fix)
    if words and (text or corpus is None):
        raise RunError(f"--recipe {recipe} needs one corpus", "name its folder, and leave --text out")
    if text and corpus is not None:
        raise RunError(f"{corpus!r} and --text", "name the text once")
    given = tuple(text or ()) if corpus is None else (corpus,)
    return {"text": given} if given else {}
