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

if TYPE_CHECKING:
    from tiewise.inspection.running.passages import Healed
    from tiewise.training.results import Comparison, SingleRun

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
# parameters of several commands, in the order of their help
TRAINED: o.Options = {"recipe": (str, RECIPE), "text": (list[str], o.TEXT), "split": (str, SPLIT)}
TRAINED |= {"tokenizer": (str, TOKENIZER), "model": (str, MODEL), "steps": (int, STEPS)}
PLACE: o.Options = {"out": (Path, OUT), "resume": (bool, o.RESUME), "overwrite": (bool, o.OVERWRITE)}
RUN: o.Options = {"set_": (list[str], SET), "config": (Path, CONFIG), **PLACE}
RUN |= {"fsdp": (int, FSDP), "tp": (int, TP), "tables": (str, TABLES)}
OUTPUT: o.Options = {"report_to": (str, o.REPORT_TO), "json_": (bool, o.JSON), "quiet": (bool, o.QUIET)}


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
    **OUTPUT,
)
def compare(**parameters: Any) -> None:
    """Train a model under several tying choices, and say which is better here.

    It also says whether the difference is statistically significant.

    With no option: three choices, three seeds, a small decoder on the built-in demo corpus, a few minutes on two cores.
    """
    from tiewise.cli.train_command import carry_out_command

    result = carry_out_command("compare", parameters)
    element = parameters["element"]
    if result is None:
        return
    if element is None:
        _print_comparison(result)
    elif element == 0:
        train_one = shlex.join(["tiewise", "compare", "--out", str(result.folder), "--resume", "--element", "N"])
        print(f"{result.runs} runs are prepared in {result.folder}")
        print(f"train each: {train_one}")
    else:
        run = result.result
        print(f"{run.arm} seed {run.seed}: validation nll {run.heldout_nll:.4f}")


def _print_comparison(comparison: Comparison) -> None:
    """Print the answer of a comparison, and where its report and its models are."""
    from tiewise.report.comparison_measurement import comparison_view
    from tiewise.training.folder import folder_name, how_it_loads
    from tiewise.training.results import FINAL

    o.print_view(comparison_view(comparison))
    folder = comparison.folder or Path()
    places = [f"{folder}/ARM/seed-N/{FINAL}"]
    for name in map(folder_name, comparison.arms):
        way = how_it_loads(folder / name / "seed-1")
        if way:
            places.append(f"{name} {way}")
    print(f"report: {folder / 'report.html'}\nmodels: {'; '.join(places)}")


@o.taking(
    corpus=(str, CORPUS),
    boundary=(str, BOUNDARY),
    share=(str, SHARE),
    seed=(int, typer.Option(None, help="Of data order, body and tables.", show_default="1")),
    **TRAINED,
    **RUN,
    **OUTPUT,
)
def train(**parameters: Any) -> None:
    """Train one model with a boundary, and write it to the folder `final`.

    `from_pretrained` of transformers reads that folder. If only `tiewise.load` can, the folder `dense` has the same
    model with plain dense tables.
    """
    from tiewise.cli.train_command import carry_out_command

    trained: SingleRun | None = carry_out_command("train", parameters)
    if trained is None:
        return
    _print_figures(trained)
    if "changed" in trained.setting:
        _print_paper_figures(trained)
    from tiewise.training.folder import how_it_loads

    line = f"model: {trained.model}"
    way = how_it_loads(trained.folder)
    print(f"{line}; it {way}" if way else line)


def _print_figures(trained: SingleRun) -> None:
    """Print the losses of a run, and the accuracies of a masked model."""
    result = trained.result
    if not isfinite(result.heldout_nll):
        print("diverged: the loss is no number any more; try a lower --set learning_rate")
    if result.shares:
        measured = f"per masked token (by their frequencies: {result.unigram_nll:.4f})"
    else:
        measured = f"(perplexity {result.perplexity:.1f}, {result.bits_per_byte:.3f} bits per byte)"
    print(f"validation nll {result.heldout_nll:.4f} {measured}, training nll {result.train_nll:.4f}")
    for name, right in result.shares.items():
        what = "masked tokens" if name == "masked" else f"pairs ({name})"
        interval = f"95 % interval {right.low:.1%} to {right.high:.1%}, n = {right.count:,}"
        print(f"{what}: {right.share:.1%} right ({interval}), nll {right.nll:.4f}")


def _print_paper_figures(trained: SingleRun) -> None:
    """Print a recipe's perplexity next to that of its paper."""
    from tiewise.report.comparison_measurement import paper_view
    from tiewise.report.papers import paper_figures

    perplexities = {trained.result.arm: [trained.result.perplexity]}
    setting = trained.setting
    o.print_view(paper_view(*paper_figures(setting["recipe"], setting["changed"], perplexities, trained.data)))


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
    **OUTPUT,
)
def heal(**parameters: Any) -> None:
    """Train a rewritten model to recover what it lost, and measure how much.

    It may be tied, factored, trimmed or transplanted. It learns its original's probabilities of every next token; with
    another vocabulary, the text.
    """
    from tiewise.cli.train_command import carry_out_command

    parameters |= dict.fromkeys(("share", "config", "boundary", "recipe", "corpus"))
    parameters |= {"fsdp": 1, "tp": 1, "tables": "auto", "kind": "heal"}
    healed: Healed | None = carry_out_command("heal", parameters)
    if healed is not None:
        print(f"{healed.sentence()}\nmodel: {healed.model}")


def kernels(
    action: str = typer.Argument(None, metavar="[build]", help="Compile them for this machine, into your cache."),
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Say whether compiled kernels are used here, and why not.

    `build` compiles them, which needs g++ and AVX-512. Without them the portable path computes the same results.
    TIEWISE_KERNELS=off disables them.
    """
    if action not in (None, "build"):
        raise typer.BadParameter(f"{action}: `tiewise kernels` says what is there, `tiewise kernels build` compiles it")
    o.need("torch")
    from tiewise.boundary.ops import compiled_kernels as compiled

    if action:
        compiled.build()
    state = compiled.kernels_state()
    if json_:
        o.print_json({"kernels": state, "used": compiled.kernels() is not None})
    else:
        typer.echo(f"kernels: {state}")
