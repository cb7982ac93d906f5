"""Save tiny models with transformers, check the folders, and report every finding above info: each is a false one.

    python tools/healthy_models.py                          all cases (about 30 minutes on one core)
    python tools/healthy_models.py --only Bert --only Zamba  the cases whose names contain one of these words
    python tools/healthy_models.py --sample 40 --seed 1     a random part
    python tools/healthy_models.py --json FILE              writes a record for every case, and skips those in FILE

A case is a model that `save_pretrained` writes and `from_pretrained` reads again without a missing key and with equal
tensors. There are four kinds:

    every class of an AutoModel mapping that can be built small, with the default flag, tied and untied
    every other class: parts that are saved alone, such as WhisperDecoder, and heads without a mapping
    every class with a part of any family, with several language models as this part
    quantised layouts, written by hand in the formats of eleven tools, tied and untied

Exit code: 0 if no folder has a finding of severity error or fatal; 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "boundary"))
sys.path.insert(0, str(ROOT / "tests" / "checkpoint"))
import tiny_classes  # noqa: E402
from asked_classes import asking_in_this_process  # noqa: E402
from quantised_layouts import LAYOUTS, write_layout  # noqa: E402
from shrink import shrink  # noqa: E402

from tiewise.checkpoint.audit import check  # noqa: E402
from tiewise.checkpoint.claims import FLAG, TEXT_PARTS  # noqa: E402

MOST_NUMBERS = 6_000_000  # parameters of a tiny model
ENCODERS_AND_DECODERS = ("bert", "gpt2", "roberta", "mbart")  # families of parts that encode or decode text
LANGUAGE_MODELS = ("llama", "gpt2", "opt", "mistral")  # families of the language model behind pictures or sounds
REPLACEABLE = {"encoder": ENCODERS_AND_DECODERS, "decoder": ENCODERS_AND_DECODERS}
REPLACEABLE |= {level: LANGUAGE_MODELS for level in TEXT_PARTS if level != "decoder"}
SKIPPED = "not built"


@dataclass(frozen=True)
class Case:
    """A folder to write and check."""

    name: str
    write: Callable[[Path], None]  # raises `NotBuiltSmall` if the case does not exist


@dataclass
class Outcome:
    """Result of one case."""

    name: str
    state: str  # "checked", or why it was not
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    loader: str = ""  # outcome of the installed transformers in the table
    seconds: float = 0.0


class NotBuiltSmall(Exception):
    """Reason why a case does not exist: the class refuses the config, or its smallest model is large."""


def main() -> int:
    """Run the cases and print what `check` reports."""
    arguments = read_arguments(sys.argv[1:])
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    done = read_outcomes(arguments.json)
    with asking_in_this_process():
        for case in chosen_cases(arguments):
            if case.name not in done:
                outcome = run(case)
                done[case.name] = outcome
                write_outcome(arguments.json, outcome)
                print_outcome(outcome)
    return print_summary(list(done.values()))


def read_arguments(words: list[str]) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="cases whose names contain it")
    parser.add_argument("--sample", type=int, metavar="N", help="a random part of the cases")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--json", type=Path, metavar="FILE", help="records, one a line; those in it are not run again")
    return parser.parse_args(words)


def chosen_cases(arguments: argparse.Namespace) -> list[Case]:
    """Return the cases that the command line selects."""
    cases = [*class_cases(), *composite_cases(), *layout_cases(), *part_cases()]
    if arguments.only:
        cases = [case for case in cases if any(word in case.name for word in arguments.only)]
    if arguments.sample is not None:
        cases = random.Random(arguments.seed).sample(cases, min(arguments.sample, len(cases)))
    return cases


def mapped_classes() -> list[str]:
    """Return the names of all classes in the AutoModel mappings."""
    names = set[str]()
    for mapping_name, mapping in vars(modeling_auto).items():
        if mapping_name.startswith("MODEL_") and mapping_name.endswith("_NAMES"):
            for value in mapping.values():
                names |= {value} if isinstance(value, str) else set(value)
    return sorted(filter(is_available, names))


def is_available(name: str) -> bool:
    """Return whether transformers has a class of this name whose packages are installed."""
    try:
        return hasattr(getattr(transformers, name, None), "config_class")
    except ImportError:
        return False


def class_cases() -> Iterator[Case]:
    """Yield the cases of every class in the mappings."""
    for name in mapped_classes():
        yield from cases_of_class(name, getattr(transformers, name))


def cases_of_class(name: str, model_class: Any) -> Iterator[Case]:
    """Yield the cases of one class, with the flag left as it is, true and false."""
    yield Case(name, partial(write_class, model_class, None))
    yield Case(f"{name} tied", partial(write_class, model_class, True))
    yield Case(f"{name} untied", partial(write_class, model_class, False))


def part_cases() -> Iterator[Case]:
    """Yield the cases of every class outside the mappings."""
    mapped = {*mapped_classes()}
    for name, model_class in sorted(all_classes().items()):
        is_abstract = model_class.config_class is None or name.endswith("PreTrainedModel")
        if name not in mapped and not is_abstract:
            yield from cases_of_class(name, model_class)


def all_classes() -> dict[str, Any]:
    """Return {name: class} of the models in all modules of transformers, exported or not."""
    classes = dict[str, Any]()
    for family in pkgutil.iter_modules(transformers.models.__path__):
        package = import_module(f"transformers.models.{family.name}")
        for file in pkgutil.iter_modules(package.__path__):
            if file.name.startswith("modeling_"):
                classes |= classes_of_module(f"{package.__name__}.{file.name}")
    return classes


def classes_of_module(name: str) -> dict[str, Any]:
    """Return {name: class} of the models that a module defines; empty if it needs a package that is not installed."""
    try:
        module = import_module(name)
    except ImportError:
        return {}
    classes = dict[str, Any]()
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, transformers.PreTrainedModel) and value.__module__ == name:
            classes[value.__name__] = value
    return classes


def write_class(model_class: Any, flag: bool | None, folder: Path) -> None:
    """Save a tiny model of a class, with the flag at every level that has it."""
    config = small_config(model_class)
    if flag is not None:
        config = with_flag(config, flag)
    save(model_class, config, folder)


def small_config(model_class: Any) -> Any:
    """Return a tiny config of a class, or its default one."""
    try:
        return with_small_ids(shrink(model_class))
    except Exception:
        pass
    try:
        return model_class.config_class()
    except Exception as error:
        raise NotBuiltSmall(f"no default config: {error}") from None


def with_small_ids(config: Any) -> Any:
    """Return a tiny config whose special tokens lie inside its vocabulary."""
    record = config.to_dict()
    for level in (record, *(value for value in record.values() if isinstance(value, dict))):
        rows = level.get("vocab_size")
        for key, value in level.items():
            if isinstance(value, list) and key.endswith(("token_id", "token_ids", "suppress_tokens")):
                level[key] = list(range(1, 1 + len(value)))
            elif key == "pred_token_id" and isinstance(rows, int):  # the last of four ids
                level[key] = rows - 1
    return config_from(type(config), record)


def with_flag(config: Any, flag: bool) -> Any:
    """Return a config with the flag at every level that has it.

    Raises:
        NotBuiltSmall: no level has it, or the config does not change.
    """
    record = config.to_dict()
    changed = set_flag(record, flag)
    if changed == record:
        raise NotBuiltSmall("same as without this flag")
    return config_from(type(config), changed)


def config_from(config_class: Any, record: dict[str, Any]) -> Any:
    """Return a config made from its record.

    Raises:
        NotBuiltSmall: the config class refuses the record.
    """
    try:
        return config_class.from_dict(record)
    except Exception as error:
        raise NotBuiltSmall(f"{type(error).__name__}: {error}"[:120]) from None


def set_flag(record: dict[str, Any], flag: bool) -> dict[str, Any]:
    """Return a config's record with the flag set at every level that has it."""
    changed = {}
    for key, value in record.items():
        if key == FLAG:
            changed[key] = flag
        elif isinstance(value, dict):
            changed[key] = set_flag(value, flag)
        else:
            changed[key] = value
    return changed


def save(model_class: Any, config: Any, folder: Path) -> None:
    """Save a model with `save_pretrained`.

    Raises:
        NotBuiltSmall: the class refuses the config, or the model is large.
    """
    try:
        with torch.device("meta"):
            numbers = sum(parameter.numel() for parameter in model_class(config).parameters())
        if numbers > MOST_NUMBERS:
            raise NotBuiltSmall(f"{numbers:,} parameters")
        torch.manual_seed(0)
        model = model_class(config)
        draw_buffers(model)
        model.save_pretrained(folder)
    except NotBuiltSmall:
        raise
    except Exception as error:
        raise NotBuiltSmall(f"{type(error).__name__}: {error}"[:120]) from None
    require_exact_reload(model, folder)


def draw_buffers(model: Any) -> None:
    """Leave buffers as they are; parameters that start equal are drawn, so that no two tables are equal by chance."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dim() > 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)


def require_exact_reload(model: Any, folder: Path) -> None:
    """Raise NotBuiltSmall if transformers itself does not read the folder exactly."""
    try:
        again, info = type(model).from_pretrained(folder, output_loading_info=True)
    except Exception as error:
        raise NotBuiltSmall(f"transformers does not reload it: {error}"[:160]) from None
    if info["missing_keys"] or info["mismatched_keys"]:
        raise NotBuiltSmall(f"transformers misses {len(info['missing_keys'])} of its own keys")
    loaded = again.state_dict()
    for name, tensor in model.state_dict().items():
        if not torch.equal(tensor, loaded[name]) and not bool(tensor.isnan().any()):
            raise NotBuiltSmall(f"transformers reloads {name} with other numbers")


def composite_cases() -> Iterator[Case]:
    """Yield the cases of every class with a part of any family."""
    for name in mapped_classes():
        model_class = getattr(transformers, name)
        sub_configs = getattr(model_class.config_class, "sub_configs", {}) or {}
        levels = [level for level, part in sub_configs.items() if part is AutoConfig and level in REPLACEABLE]
        for level in levels:
            for part in REPLACEABLE[level]:
                for flag in (True, False):
                    title = f"{name} {level}={part} {'tied' if flag else 'untied'}"
                    yield Case(title, partial(write_composite, name, level, part, flag))


def write_composite(name: str, level: str, part: str, flag: bool, folder: Path) -> None:
    """Save a tiny composite with a family as its part at a level of the config."""
    model_class = getattr(transformers, name)
    config = small_config(model_class)
    record = set_flag(config.to_dict(), flag)
    for key, value in record.items():
        if key.endswith(("token_id", "token_index")) and isinstance(value, int):
            record[key] = min(value, tiny_classes.ROWS - 1)
    if "vocab_size" in record:  # some composites repeat the number of their language model
        record["vocab_size"] = tiny_classes.ROWS
    record[level] = tiny_classes.TEXT_CONFIGS[part]().to_dict() | {FLAG: flag}
    save(model_class, config_from(type(config), record), folder)


def layout_cases() -> Iterator[Case]:
    """Yield the quantised layouts."""
    for layout in LAYOUTS:
        for flag in (True, False):
            yield Case(f"quantised {layout} {'tied' if flag else 'untied'}", partial(write_layout, layout, flag))


def run(case: Case) -> Outcome:
    """Write one folder and check it."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "model"
        try:
            case.write(folder)
        except NotBuiltSmall as error:
            return Outcome(case.name, f"{SKIPPED}: {' '.join(str(error).split())}")
        audit = check(folder)
    outcome = Outcome(case.name, "checked")
    for finding in audit.findings:
        text = f"{finding.rule} {finding.severity} {finding.where}: {finding.evidence}"
        if finding.severity in ("error", "fatal"):
            outcome.errors.append(text)
        elif finding.severity == "warning":
            outcome.warnings.append(text)
    for row in audit.outcomes:
        if row.loader == "transformers":
            outcome.loader = f"{row.outcome}: {row.sentence}"
            if row.right is False:
                outcome.loader += " (wrong)"
    outcome.seconds = round(time.monotonic() - start, 2)
    return outcome


def read_outcomes(path: Path | None) -> dict[str, Outcome]:
    """Return the outcomes in a file by name; none without a file."""
    if path is None or not path.exists():
        return {}
    outcomes = [Outcome(**json.loads(line)) for line in path.read_text().splitlines()]
    return {outcome.name: outcome for outcome in outcomes}


def write_outcome(path: Path | None, outcome: Outcome) -> None:
    """Append an outcome to the file."""
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + os.linesep)


def print_outcome(outcome: Outcome) -> None:
    """Print the findings of one case."""
    for text in (*outcome.errors, *outcome.warnings):
        print(f"{outcome.name}: {text}", flush=True)
    if outcome.loader.endswith("(wrong)"):
        print(f"{outcome.name}: transformers: {outcome.loader}", flush=True)


def print_summary(outcomes: list[Outcome]) -> int:
    """Print the numbers of cases and return the exit code."""
    checked = [outcome for outcome in outcomes if outcome.state == "checked"]
    wrong = [outcome for outcome in checked if outcome.errors]
    warned = [outcome for outcome in checked if outcome.warnings and not outcome.errors]
    misread = [outcome for outcome in checked if outcome.loader.endswith("(wrong)")]
    reasons = Counter(outcome.state.split(":")[1][:40] for outcome in outcomes if outcome.state.startswith(SKIPPED))
    print(f"{len(checked)} folders checked, {len(outcomes) - len(checked)} cases not built or not healthy")
    for reason, count in reasons.most_common(8):
        print(f"    {count:5} {reason}")
    print(
        f"{len(wrong)} with an error or fatal, {len(warned)} with a warning, {len(misread)} that the table calls wrong"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
