"""`tiewise compare`, `train`, `heal` and `kernels`.

`train` and `heal` are one run by the code of `compare`. `kernels` shows the implementation of their loss.
"""

from __future__ import annotations

import shlex
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tiewise.cli import options as o
from tiewise.core.errors import suggest_choices

if TYPE_CHECKING:
    from tiewise.inspection.running.passages import Healed
    from tiewise.training.results import Comparison, SingleRun

CORPUS = typer.Argument(None, metavar="[CORPUS]", help="See --recipe.", show_default=False, hidden=True)
RECIPE = typer.Option(
    None,
    metavar="NAME",
    help="A published recurrent model: press-wolf-small, press-wolf-large, inan-200, inan-650, pytorch-200, "
    "pytorch-650 or awd. It is trained on CORPUS, a folder with train.txt, valid.txt and test.txt in which spaces "
    "separate words. Or an ALBERT, trained on --text: albert-small or albert-base.",
    rich_help_panel=o.FAMILIES,
)
SHARE = typer.Option(
    None,
    metavar="SHARING",
    help="Parameters that the layers of an ALBERT share: none, attention, ffn, all, all:groups=2, … Of several, "
    "separated by commas, compare trains each with every boundary.",
    show_default="as the recipe",
    rich_help_panel=o.FAMILIES,
)
BACKEND = typer.Option(
    None,
    metavar="torch|flax",
    help="flax: JAX takes the training steps.",
    show_default="torch",
    rich_help_panel=o.FAMILIES,
)
SPLIT = typer.Option(
    None,
    metavar="random|contiguous",
    help="Held-out text. random: documents, and parts of long files. contiguous: the last parts of the text.",
    show_default="random",
    rich_help_panel=o.TRAINING,
)
MATCH = typer.Option(
    None,
    metavar="width|parameters|flops",
    help="width: equal bodies. parameters, flops: an arm spends on its body what it saves at the ends.",
    show_default="width",
    rich_help_panel=o.TRAINING,
)
SELECT = typer.Option(
    None,
    metavar="best|last",
    help="Step whose model each run keeps. best: the one with the lowest loss on the tuning split. Both are reported.",
    show_default="best for compare, else last",
    rich_help_panel=o.TRAINING,
)
TUNE = typer.Option(
    None,
    "--tune/--no-tune",
    help="Choose the learning rate of each arm, and table_rate if it is given, by five or more runs on tuning text.",
    rich_help_panel=o.TRAINING,
)
CONFIG = typer.Option(
    None,
    "--config",
    metavar="FILE",
    help="YAML file of settings (any of run.yaml); options override it.",
    rich_help_panel=o.TRAINING,
)
TOKENIZER = typer.Option(
    None,
    metavar="NAME",
    help="bpe:SIZE (of the training split), bytes, tokenizer.json or a Hugging Face id.",
    show_default="bpe:4096",
)
MODEL = typer.Option(None, metavar="NAME", help="llama, gpt2, or the path of a config.json.", show_default="llama")
STEPS = typer.Option(None, metavar="N", help="Optimizer steps of each run.", show_default="600")
MINUTES = typer.Option(None, metavar="N", help="Time for everything, start and tuning included; instead of --steps.")
SET = typer.Option(None, "--set", metavar="NAME=VALUE", help="Any other setting, such as width=256. May be repeated.")
OUT = typer.Option(
    None, "--out", "-o", metavar="DIR", help="Folder for all that the run writes.", show_default="runs/<command>"
)
ARMS = typer.Option(
    None,
    *("--arms", "--boundary", "-b"),
    metavar="LIST",
    help="Boundaries to compare, such as tied,untied,factored:64+bias. The first is the reference.",
    show_default="tied,untied,factored:64",
)
BOUNDARY = typer.Option(
    None, "--boundary", "-b", metavar="SPEC", help="Boundary to train, such as factored:64+bias.", show_default="tied"
)
SEEDS = typer.Option(None, metavar="N", help="Runs of each arm, paired across arms.", show_default="3")
SEED = typer.Option(None, metavar="N", help="Seed of data order, body and tables.", show_default="1")
ELEMENT = typer.Option(
    None,
    metavar="N",
    help="With --resume: train only run N of --out, as one job of an array. 0, without --resume: prepare --out and "
    "train nothing.",
    rich_help_panel=o.MACHINES,
)
FSDP = typer.Option(
    1, metavar="N", help="Under torchrun: processes that shard each model's parameters.", rich_help_panel=o.MACHINES
)
TP = typer.Option(
    1,
    metavar="N",
    help="Under torchrun: processes that split each matrix and read the same tokens.",
    rich_help_panel=o.MACHINES,
)
TABLES = typer.Option(
    "auto",
    metavar="auto|keep|gather",
    help="With --fsdp. keep: tables stay sharded, and hidden states travel. gather: tables travel. auto: the choice "
    "that sends less.",
    rich_help_panel=o.MACHINES,
)
TEACHER = typer.Option(None, metavar="ORIGINAL", help="The model that it was rewritten from.", show_default=False)
# parameters of several commands, in the order of their help
PLACE: o.Options = {"out": (Path, OUT), "resume": (bool, o.RESUME), "set_": (list[str], SET)}
MACHINES: o.Options = {"fsdp": (int, FSDP), "tp": (int, TP), "tables": (str, TABLES)}
OUTPUT: o.Options = {"overwrite": (bool, o.OVERWRITE), "report_to": (str, o.REPORT_TO)}
OUTPUT |= {"json_": (bool, o.JSON), "quiet": (bool, o.QUIET)}


@o.taking(
    corpus=(str, CORPUS),
    text=(list[str], o.TEXT),
    arms=(str, ARMS),
    seeds=(int, SEEDS),
    steps=(int, STEPS),
    minutes=(float, MINUTES),
    model=(str, MODEL),
    tokenizer=(str, TOKENIZER),
    **PLACE,
    split=(str, SPLIT),
    match=(str, MATCH),
    select=(str, SELECT),
    margin=(float, o.MARGIN),
    tune=(bool, TUNE),
    config=(Path, CONFIG),
    jobs=(str, o.JOBS),
    recipe=(str, RECIPE),
    share=(str, SHARE),
    backend=(str, BACKEND),
    launcher=(str, o.LAUNCHER),
    element=(int, ELEMENT),
    **MACHINES,
    push_to_hub=(str, o.PUSH_TO_HUB),
    **OUTPUT,
)
def compare(**parameters: Any) -> None:
    """Train a model under several tying choices, and say which is better here.

    It also says whether the difference is statistically significant.

    With no option: three choices, three seeds, a small decoder on the built-in demo corpus, a few minutes on two cores.
    """
    from tiewise.cli.train_command import carry_out_command, upload

    result = carry_out_command("compare", parameters)
    element = parameters["element"]
    if result is None:
        return
    if element is None:
        _print_comparison(result)
        upload(parameters, result)
    elif element == 0:
        train_one = shlex.join(["tiewise", "compare", "--out", str(result.folder), "--resume", "--element", "N"])
        print(f"{result.runs} runs are prepared in {result.folder}")
        print(f"train each: {train_one}")
    else:
        run = result.result
        print(f"{run.arm} seed {run.seed}: validation loss {run.heldout_nll:.4f} nats/token")


def _print_comparison(comparison: Comparison) -> None:
    """Print the answer of a comparison, and where its report and its models are."""
    from tiewise.report.comparison_measurement import comparison_view
    from tiewise.training.folder import REPORT, folder_name, how_it_loads
    from tiewise.training.results import FINAL

    o.print_view(comparison_view(comparison))
    folder = comparison.folder or Path()
    places = [f"{folder}/ARM/seed-N/{FINAL}"]
    for name in map(folder_name, comparison.arms):
        way = how_it_loads(folder / name / "seed-1")
        if way:
            places.append(f"{name} {way}")
    print(f"report: {folder / REPORT}\nmodels: {'; '.join(places)}")
    if not comparison.demo:
        _print_next("inspect", folder)


def _print_next(command: str, folder: str | Path) -> None:
    """Print the command to type next, with the folder in quotes where a shell needs them."""
    print(f"Next: {shlex.join(['tiewise', command, str(folder)])}")


@o.taking(
    corpus=(str, CORPUS),
    text=(list[str], o.TEXT),
    boundary=(str, BOUNDARY),
    seed=(int, SEED),
    steps=(int, STEPS),
    model=(str, MODEL),
    tokenizer=(str, TOKENIZER),
    **PLACE,
    split=(str, SPLIT),
    select=(str, SELECT),
    config=(Path, CONFIG),
    recipe=(str, RECIPE),
    share=(str, SHARE),
    **MACHINES,
    push_to_hub=(str, o.PUSH_TO_HUB),
    **OUTPUT,
)
def train(**parameters: Any) -> None:
    """Train one model with a boundary, and write it to the folder `final`.

    `from_pretrained` of transformers reads that folder. If only `tiewise.load` can, the folder `dense` has the same
    model with plain dense tables.
    """
    from tiewise.cli.train_command import carry_out_command, upload

    trained: SingleRun | None = carry_out_command("train", parameters)
    if trained is None:
        return
    _print_figures(trained)
    if trained.note:
        print(trained.note)
    if "changed" in trained.setting:
        _print_paper_figures(trained)
    from tiewise.training.folder import how_it_loads

    line = f"model: {trained.model}"
    way = how_it_loads(trained.folder)
    print(f"{line}; it {way}" if way else line)
    if isfinite(trained.result.heldout_nll):
        _print_next("inspect", trained.model)
    upload(parameters, trained)


def _print_figures(trained: SingleRun) -> None:
    """Print the losses of a run, and the accuracies of a masked model."""
    result = trained.result
    if not isfinite(result.heldout_nll):
        print("Diverged: the loss is not a finite number; try a lower --set learning_rate.")
    if result.shares:
        measured = f"nats per masked token (by frequency alone: {result.unigram_nll:.4f})"
    else:
        measured = f"nats/token (perplexity {result.perplexity:.1f}, {result.bits_per_byte:.3f} bits per byte)"
    print(f"validation loss {result.heldout_nll:.4f} {measured}, training loss {result.train_nll:.4f}")
    if result.is_before_end and result.last is not None:
        place = f"model of step {result.selected_step:,} of {result.steps:,}, the best on tuning text"
        print(f"{place}; at the last step: validation loss {result.last.heldout_nll:.4f}")
    for name, right in result.shares.items():
        what = "masked tokens" if name == "masked" else f"pairs ({name})"
        interval = f"95 % interval {right.low:.1%} to {right.high:.1%}, n = {right.count:,}"
        print(f"{what}: {right.share:.1%} right ({interval}), loss {right.nll:.4f}")


def _print_paper_figures(trained: SingleRun) -> None:
    """Print a recipe's perplexity next to that of its paper."""
    from tiewise.report.comparison_measurement import paper_view
    from tiewise.report.papers import paper_figures

    perplexities = {trained.result.arm: [trained.result.perplexity]}
    setting = trained.setting
    o.print_view(paper_view(*paper_figures(setting["recipe"], setting["changed"], perplexities, trained.data)))


@o.taking(
    model=(Path, typer.Argument(None, metavar="[MODEL]", help="Folder of the rewritten model.", show_default=False)),
    teacher=(Path, TEACHER),
    text=(list[str], o.TEXT),
    what=(str, typer.Option(None, metavar="tables|all", help="Parameters that learn.", show_default="tables")),
    steps=(int, typer.Option(None, metavar="N", help="Optimizer steps.", show_default="300")),
    seed=(int, typer.Option(None, metavar="N", help="Seed of data order.", show_default="1")),
    **PLACE,
    split=(str, SPLIT),
    select=(str, SELECT),
    push_to_hub=(str, o.PUSH_TO_HUB),
    **OUTPUT,
)
def heal(**parameters: Any) -> None:
    """Train a rewritten model to recover what it lost, and measure how much.

    It may be tied, factored, trimmed or transplanted. It learns to give every next
    token the probability that its original gives it. With another vocabulary it learns from the text alone.
    """
    from tiewise.cli.train_command import carry_out_command, upload

    parameters |= dict.fromkeys(("share", "config", "boundary", "recipe", "corpus"))
    parameters |= {"fsdp": 1, "tp": 1, "tables": "auto", "kind": "heal"}
    healed: Healed | None = carry_out_command("heal", parameters)
    if healed is not None:
        print(f"{healed.sentence()}\nmodel: {healed.model}")
        _print_next("check", healed.model)
        upload(parameters, healed)


def kernels(
    action: str = typer.Argument(None, metavar="[build]", help="Compile them for this machine, into your cache."),
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Say whether compiled kernels are used here, and why not.

    `build` compiles them, which needs g++ and AVX-512. Without them the portable path computes the same results.
    TIEWISE_KERNELS=off disables them; avx512 leaves the AMX of a processor unused.
    """
    if action not in (None, "build"):
        raise typer.BadParameter(f"no action {action!r}; {suggest_choices(action, ['build'])}")
    o.need("torch")
    from tiewise.boundary.ops import compiled_kernels as compiled

    if action:
        compiled.build()
    state = compiled.kernels_state()
    if json_:
        o.print_json({"kernels": state, "used": compiled.kernels() is not None})
    else:
        typer.echo(f"kernels: {state}")
