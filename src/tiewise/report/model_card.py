"""Model cards: the README.md of a repository on the Hugging Face Hub.

A card has metadata that the Hub reads, the verdict, a table, the command, and the lines that load the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from tiewise.core import __version__
from tiewise.inspection.running.passages import Healed
from tiewise.report.comparison_measurement import demo_banner, results, verdict
from tiewise.training.folder import how_it_loads, read_json
from tiewise.training.results import DENSE, FINAL, Comparison, RunResult, SingleRun

# task of the Hub and class of transformers, by the end of the name of a model's class
TASKS = {
    "ForCausalLM": ("text-generation", "AutoModelForCausalLM"),
    "ForMaskedLM": ("fill-mask", "AutoModelForMaskedLM"),
}


def comparison_card(comparison: Comparison, chosen: RunResult, run: Path, repo_id: str) -> str:
    """Return the card of the model of the `chosen` run of a comparison.

    `run` is the folder of that run.
    """
    table = results(comparison)
    arm = f"`{chosen.arm}`"
    parts = [
        _metadata(repo_id, chosen.arm, run, _validation_loss(chosen, comparison.data, run)),
        f"# {repo_id.rpartition('/')[2]}",
        verdict(comparison),
        demo_banner(comparison.demo),
        f"This model is {arm} with seed {chosen.seed}. The mean validation loss of {arm} is the lowest of all arms; "
        f"of its {len(comparison.of(chosen.arm))} seeds, this one has the lowest. `report.html` has every figure.",
        f"## {table.name}",
        _table(table.header, table.rows),
        comparison.finding,
        *_text_and_command(comparison.data, comparison.command),
        *_loading(repo_id, run),
    ]
    return _joined(parts)


def run_card(trained: SingleRun, command: str, repo_id: str) -> str:
    """Return the card of the model of a single run, which `command` trained."""
    result = trained.result
    header = ["boundary", "parameters", "validation nll", "training nll", "perplexity", "steps", "seed"]
    losses = [f"{result.heldout_nll:.4f}", f"{result.train_nll:.4f}", f"{result.perplexity:.2f}"]
    row = [result.arm, f"{result.total_parameters:,}", *losses, f"{result.steps:,}", str(result.seed)]
    parts = [
        _metadata(repo_id, result.arm, trained.folder, _validation_loss(result, trained.data, trained.folder)),
        f"# {repo_id.rpartition('/')[2]}",
        f"A model with the boundary `{result.arm}`: validation loss {result.heldout_nll:.4f} nats per token.",
        demo_banner(bool(trained.data.get("demo"))),
        "## Result",
        _table(header, [row]),
        *_text_and_command(trained.data, command),
        *_loading(repo_id, trained.folder),
    ]
    return _joined(parts)


def healed_card(healed: Healed, arm: str, data: dict[str, Any], command: str, repo_id: str) -> str:
    """Return the card of a healed model.

    Args:
        healed: the losses before and after healing.
        arm: boundary of the model.
        data: facts about the text.
        command: command that healed it.
        repo_id: repository on the Hub.
    """
    run = Path(healed.model).parent
    rows = [[cost["model"], f"{cost['bits per byte']:.4f}"] for cost in healed.rows()]
    parts = [
        _metadata(repo_id, arm, run, _result(run, data, "held-out loss (bits per byte)", healed.left.after)),
        f"# {repo_id.rpartition('/')[2]}",
        f"{healed.sentence()}.",
        demo_banner(bool(data.get("demo"))),
        f"This model has the boundary `{arm}`. Its original was the teacher.",
        "## Result",
        _table(["model", "bits per byte of held-out text"], rows),
        *_text_and_command(data, command),
        *_loading(repo_id, run),
    ]
    return _joined(parts)


def _validation_loss(result: RunResult, data: dict[str, Any], run: Path) -> EvalResult:
    """Return the validation loss of a run as metadata."""
    return _result(run, data, "validation nll (nats per token)", result.heldout_nll)


def _result(run: Path, data: dict[str, Any], name: str, loss: float) -> EvalResult:
    """Return a loss on a text as metadata."""
    task, _ = _task(run)
    return EvalResult(
        task_type=task or "text-generation",
        dataset_type="text",
        dataset_name=", ".join(data["texts"]),
        metric_type="loss",
        metric_name=name,
        metric_value=round(loss, 4),
    )


def _metadata(repo_id: str, arm: str, run: Path, loss: EvalResult) -> str:
    """Return the YAML block of a card."""
    task, _ = _task(run)
    library = "tiewise" if how_it_loads(run) else "transformers"
    tags = ["tiewise", "weight-tying", arm.partition(":")[0].partition("+")[0]]
    name = repo_id.rpartition("/")[2]
    card = ModelCardData(library_name=library, pipeline_tag=task, tags=tags, model_name=name, eval_results=[loss])
    return f"---\n{card.to_yaml()}\n---"


def _task(run: Path) -> tuple[str | None, str]:
    """Return the task of a run's model on the Hub, and the class that loads it.

    The task is None if TASKS lacks the class of the model.
    """
    config = read_json(run / FINAL / "config.json") or {}
    class_name = (config.get("architectures") or [""])[0]
    for end, task in TASKS.items():
        if class_name.endswith(end):
            return task
    return None, class_name or "AutoModel"


def _text_and_command(data: dict[str, Any], command: str) -> list[str]:
    """Return the parts of a card about the text and the command."""
    sizes = ", ".join(f"{name} {split['tokens']:,}" for name, split in data["splits"].items())
    texts = f"Text: {', '.join(f'`{text}`' for text in data['texts'])}; tokens: {sizes}."
    return [
        "## How it was trained",
        texts,
        _fenced(command, "sh"),
        f"The program is tiewise {__version__}.",
    ]


def _loading(repo_id: str, run: Path) -> list[str]:
    """Return the parts of a card with the code that loads the model."""
    _, loader = _task(run)
    plain = f'from transformers import AutoTokenizer, {loader}\n\nmodel = {loader}.from_pretrained("{repo_id}"{{}})\n'
    plain += f'tokenizer = AutoTokenizer.from_pretrained("{repo_id}")'
    if not how_it_loads(run):
        return ["## Load it", _fenced(plain.format(""), "python")]
    folder = "huggingface_hub.snapshot_download"
    code = f'import huggingface_hub, tiewise\n\nmodel = tiewise.load({folder}("{repo_id}"))'
    parts = ["## Load it", _fenced(code, "python")]
    if (run / DENSE).is_dir():
        parts += ["The same model with plain dense tables:", _fenced(plain.format(f', subfolder="{DENSE}"'), "python")]
    return parts


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _fenced(code: str, language: str) -> str:
    """Return a block of code in Markdown, whose fence no line of the code can close."""
    fence = "```"
    while fence in code:
        fence += "`"
    return f"{fence}{language}\n{code}\n{fence}"


def _joined(parts: Iterable[str]) -> str:
    """Return the parts of a card, without empty ones, as text."""
    return "\n\n".join(part for part in parts if part) + "\n"
