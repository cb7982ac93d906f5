"""Rewrite tiny models of classes whose flag ties more than embedding and head.

The result that transformers loads is compared with the model in memory.

    python tools/class_rewrites.py                       all classes and rewrites (about 15 minutes on one core)
    python tools/class_rewrites.py Bart Zamba            the classes whose names contain one of these words
    python tools/class_rewrites.py --sample 30 --seed 1  a random part of the pairs (class, rewrite)
    python tools/class_rewrites.py --table FILE          writes a Markdown table: one row a class, one column a rewrite

A class counts if, with a true flag, it ties a tensor other than its head to another one: the input tables of two
stacks, a second bias of the head, blocks of several layers. Its tied tensors get random values, and the two tables have
rank 4, so that `factor --rank 4` loses nothing. Each rewrite must give the tensors and the logits that this file
computes from the model in memory, or refuse with a reason.

Exit code: 0 if every pair is equal or refused; 1 otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tools"))
from healthy_models import NotBuiltSmall, config_from, mapped_classes, set_flag, small_config  # noqa: E402

import tiewise  # noqa: E402
from tiewise.checkpoint import rewrite  # noqa: E402
from tiewise.checkpoint.rewrite.change import NothingToDo  # noqa: E402
from tiewise.core.errors import CheckpointError, InstallError  # noqa: E402

MOST_NUMBERS = 6_000_000  # parameters of a tiny model
RANK = 4  # of the tables of both ends
TOKENS = 12  # ids in the text that a model reads
MORE_ROWS = 128
FEWER_ROWS = 70  # of 99
ROUNDING = 1e-4  # of the largest logit
DIFFERENT = "DIFFERENT"  # state of a fault
SHIFT = 7  # by which the ids of the other tokenizer differ

# settings of a class whose smallest model shares no layers
SETTINGS = {"ZambaForCausalLM": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2}}

Tensors = dict[str, torch.Tensor]  # {name in the class: values}, with every tied name


@dataclass(frozen=True)
class Source:
    """A saved model: what its tensors are and what its config says."""

    tied: bool  # one tensor for each group of tied names, else different ones
    flag: bool  # in the config
    copies: bool = False  # every tied name is stored, with equal values


TIED, UNTIED = Source(tied=True, flag=True), Source(tied=False, flag=False)
TWICE, EQUAL = Source(tied=True, flag=True, copies=True), Source(tied=True, flag=False, copies=True)
WRONG = Source(tied=False, flag=True)


@dataclass(frozen=True)
class Task:
    """A rewrite of one source."""

    name: str
    source: Source
    run: Callable[[Path, Path], Any]  # run(source, result) raises `CheckpointError` if the verb refuses
    expected: Callable[[Model], Expected]
    loads_with_tiewise: bool = False


@dataclass(frozen=True)
class Expected:
    """What a result must contain."""

    tensors: Tensors | None  # None: only the logits are known
    tied: bool  # flag of the class with which the tensors are run
    ids: Mapping[int, int] | None = None  # {id of the source: id of the result}; None: every id stays


@dataclass(frozen=True)
class Outcome:
    """Result of one task on one class."""

    class_name: str
    task: str
    state: str  # "equal", "refused", "nothing to do", "not built", "not run" or `DIFFERENT`
    detail: str = ""


class Model:
    """A class with random tensors, in memory."""

    def __init__(self, model_class: Any, source: Source) -> None:
        self.model_class, self.source = model_class, source
        tied = built(model_class, flag=True)
        self.ties: dict[str, str] = dict(tied.all_tied_weights_keys)
        model = tied if source.tied else built(model_class, flag=False)
        self.input, self.output = table_names(tied)
        if self.output is None:  # no method returns the head, and the input table may be tied to it
            self.output = next((target for target, source in self.ties.items() if source == self.input), None)
        if self.output in self.ties:  # of several input tables, the head's
            self.input = self.ties[self.output]
        draw(model, [*self.groups().values(), [self.input], [self.output] if self.output else []])
        self.model = model.eval()
        self.tensors = state_of(model)

    def groups(self) -> dict[str, list[str]]:
        """Return {source of a tie: all names of the tensor}."""
        groups = dict[str, list[str]]()
        for target, source in self.ties.items():
            while source in self.ties and self.ties[source] != target:
                source = self.ties[source]
            groups.setdefault(source, [source]).append(target)
        return groups

    def names_at_ends(self) -> list[str]:
        """Return all names of the tables of both ends, with those tied to them."""
        names = {self.input, self.output}
        for group in self.groups().values():
            if not names.isdisjoint(group):
                names |= set(group)
        return sorted(name for name in names if name is not None)

    @property
    def rows(self) -> int:
        """Return the number of rows of the input table."""
        return len(self.tensors[self.input])

    def save(self, folder: Path) -> None:
        """Save the model as its source says, with a tokenizer."""
        self.model.save_pretrained(folder)
        if self.source.copies:
            store_copies(folder, self)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(set_flag(config, self.source.flag)))
        write_tokenizer(folder, range(self.rows))


def built(model_class: Any, flag: bool) -> Any:
    """Return a tiny model of a class.

    Raises:
        NotBuiltSmall: the class refuses the config, the model is large, or it has no flag.
    """
    config = small_config(model_class)
    settings = SETTINGS.get(model_class.__name__, {})
    config = config_from(type(config), set_flag(config.to_dict(), flag) | settings)
    try:
        with torch.device("meta"):
            numbers = sum(parameter.numel() for parameter in model_class(config).parameters())
        if numbers > MOST_NUMBERS:
            raise NotBuiltSmall(f"{numbers:,} parameters")
        torch.manual_seed(0)
        return model_class(config)
    except NotBuiltSmall:
        raise
    except Exception as error:
        raise NotBuiltSmall(f"{type(error).__name__}: {error}"[:120]) from None


def table_names(model: Any) -> tuple[str, str | None]:
    """Return the names of the input table and of the head's table; None without a head.

    Raises:
        NotBuiltSmall: the class names no input table.
    """
    names = []
    for method in ("get_input_embeddings", "get_output_embeddings"):
        try:
            module = getattr(model, method)()
        except (AttributeError, NotImplementedError):
            module = None
        is_table = getattr(getattr(module, "weight", None), "ndim", 0) == 2  # some heads are lists of modules
        found = [name for name, other in model.named_modules(remove_duplicate=False) if is_table and other is module]
        names.append(f"{found[0]}.weight" if found else None)
    if names[0] is None:
        raise NotBuiltSmall("no input table")
    return names[0], names[1]


def ties_more(model_class: Any) -> bool:
    """Return whether a class ties a tensor other than its head with a true flag."""
    try:
        model = built(model_class, flag=True)
        _, output = table_names(model)
    except NotBuiltSmall:
        return False
    return bool(set(model.all_tied_weights_keys) - {output})


def draw(model: Any, groups: Iterable[list[str]]) -> None:
    """Give every tied tensor, and the tables of both ends, random values; matrices have rank `RANK`."""
    generator = torch.Generator().manual_seed(1)
    seen = set[int]()
    for names in groups:
        for name in names:
            tensor = model.get_parameter_or_buffer(name)
            if id(tensor) in seen or not tensor.is_floating_point():
                continue
            seen.add(id(tensor))
            with torch.no_grad():
                tensor.copy_(random_values(tensor.shape, generator))


def random_values(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Return random values: a matrix of rank `RANK`, or any values of another shape."""
    if len(shape) != 2:
        return torch.randn(shape, generator=generator) / 4
    narrow = torch.randn(shape[0], RANK, generator=generator)
    return narrow @ torch.randn(RANK, shape[1], generator=generator) / 4


def state_of(model: Any) -> Tensors:
    """Return a copy of every tensor under all of its names."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def store_copies(folder: Path, model: Model) -> None:
    """Store every tied name, as tools do that ignore ties. The names are those of the class in a saved file."""
    untied = built(model.model_class, flag=False)
    untied.load_state_dict(model.tensors)
    untied.save_pretrained(folder)


def write_tokenizer(folder: Path, ids: Iterable[int]) -> None:
    """Write a tokenizer.json whose tokens have these ids in order: letters first, then pairs of letters."""
    ids = list(ids)
    letters = [chr(0x4E00 + number) for number in range(1 + math.isqrt(len(ids)))]
    pairs = list(itertools.product(letters, letters))[: len(ids) - len(letters)]
    tokens = letters + [first + second for first, second in pairs]
    tokenizer = Tokenizer(models.BPE(dict(zip(tokens, ids, strict=True)), pairs))
    tokenizer.decoder = decoders.Fuse()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def ids_between(old: Path, new: Path) -> dict[int, int]:
    """Return {id of a token in one folder's tokenizer: id in the other's}."""
    vocabularies = []
    for folder in (old, new):
        vocabularies.append(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    before, after = vocabularies
    return {token_id: after[token] for token, token_id in before.items() if token in after}


def as_it_is(model: Model) -> Expected:
    """Expect the tensors of the source, with the ties of the source."""
    return Expected(model.tensors, model.source.tied)


def as_untied(model: Model) -> Expected:
    """Expect the tensors of the source, without ties."""
    return Expected(model.tensors, False)


def as_tied(model: Model) -> Expected:
    """Expect the tensors of the source, with ties."""
    return Expected(model.tensors, True)


def with_one_table(kept: str, model: Model) -> Expected:
    """Expect one table for both ends. Of several biases, the one of the head's linear module stays."""
    names = {"input": model.input, "output": model.output}
    tensors = dict(model.tensors)
    bias = (model.output or "").removesuffix("weight") + "bias"
    for group in model.groups().values():
        if bias in group:
            tensors |= dict.fromkeys(group, model.tensors[bias])
    for name in model.names_at_ends():
        tensors[name] = model.tensors[names[kept] or model.input]
    return Expected(tensors, True)


def with_more_rows(model: Model) -> Expected:
    """Expect the logits of the old rows."""
    return Expected(None, model.source.tied, {row: row for row in range(model.rows)})


def with_ids_of_result(model: Model) -> Expected:
    """Expect the logits of the tokens of both tokenizers. The ids are read from the result."""
    return Expected(None, model.source.tied, {})


def transplant(source: Path, result: Path) -> None:
    """Give a model a tokenizer that has its tokens under other ids."""
    with tempfile.TemporaryDirectory() as root:
        rows = len(json.loads((source / "tokenizer.json").read_text())["model"]["vocab"])
        folder = Path(root) / "tokenizer"
        write_tokenizer(folder, [(number + SHIFT) % rows for number in range(rows)])
        rewrite.transplant(source, result, tokenizer=folder)


def undo_factor(source: Path, result: Path) -> None:
    """Factor a model, and make plain tables of it again."""
    factored = result.with_name("factored-first")
    rewrite.factor(source, factored, rank=RANK)
    rewrite.factor(factored, result, undo=True)


def tasks() -> list[Task]:
    """Return every rewrite of every source that it applies to."""
    factor = partial(rewrite.factor, rank=RANK)
    trim = partial(rewrite.trim, size=FEWER_ROWS)
    resize = partial(rewrite.resize, vocab=MORE_ROWS)
    chosen = [
        Task("untie tied", TIED, rewrite.untie, as_untied),
        Task("untie copies", TWICE, rewrite.untie, as_untied),
        Task("untie wrong flag", WRONG, rewrite.untie, as_untied),
        Task("tie equal", EQUAL, rewrite.tie, as_tied),
        Task("repair copies", TWICE, rewrite.repair, as_tied),
        Task("repair equal", EQUAL, rewrite.repair, as_it_is),
        Task("repair wrong flag", WRONG, rewrite.repair, as_untied),
    ]
    for keep in ("input", "output"):
        run = partial(rewrite.tie, keep=keep)
        chosen.append(Task(f"tie untied --keep {keep}", UNTIED, run, partial(with_one_table, keep)))
    for word, source in (("tied", TIED), ("untied", UNTIED)):
        chosen += [
            Task(f"factor {word}", source, factor, as_it_is, loads_with_tiewise=True),
            Task(f"factor --undo {word}", source, undo_factor, as_it_is),
            Task(f"resize {word}", source, resize, with_more_rows),
            Task(f"trim {word}", source, trim, with_ids_of_result),
            Task(f"transplant {word}", source, transplant, with_ids_of_result),
            Task(f"merge {word}", source, partial(merge, source), as_merged),
        ]
    return chosen


def merge(source: Source, base: Path, result: Path) -> None:
    """Merge an adapter that changes the head alone."""
    folder = result.with_name("adapter")
    write_adapter(base, folder)
    rewrite.merge(folder, result, base=base)


def write_adapter(base: Path, folder: Path) -> None:
    """Write an adapter that adds a random matrix of rank 2 to the table of the head."""
    import peft

    name = json.loads((base / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(base)
    table = table_names(model)[1]
    if table is None:
        raise NotBuiltSmall("no head")
    module = table.removesuffix(".weight")
    if not isinstance(model.get_submodule(module), torch.nn.Linear):
        raise NotBuiltSmall("its head is no linear module")
    # a pattern that only this module matches: a list of names also matches modules inside other parts
    config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=re.escape(module))
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_" in parameter_name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    adapted.save_pretrained(folder)


def as_merged(model: Model) -> Expected:
    """Expect the table of the head with the matrix that `write_adapter` adds, and two tables."""
    assert model.output is not None
    tensors = dict(model.tensors)
    rows, width = tensors[model.output].shape
    generator = torch.Generator().manual_seed(2)
    narrow = torch.randn((2, width), generator=generator) / 4
    tensors[model.output] = tensors[model.output] + torch.randn((rows, 2), generator=generator) / 4 @ narrow
    return Expected(tensors, False)


def run(class_name: str, task: Task) -> Outcome:
    """Save a model, rewrite it and judge the result."""
    with tempfile.TemporaryDirectory() as root:
        source, result = Path(root) / "source", Path(root) / "result"
        try:
            model = Model(getattr(transformers, class_name), task.source)
            model.save(source)
            task.run(source, result)
        except NotBuiltSmall as error:
            return Outcome(class_name, task.name, "not built", str(error))
        except NothingToDo as error:
            return Outcome(class_name, task.name, "nothing to do", reason(error, source))
        except CheckpointError as error:
            return Outcome(class_name, task.name, "refused", reason(error, source))
        if task.loads_with_tiewise and not runs_on_ids(model.model):
            return Outcome(class_name, task.name, "not run", "tiewise.load needs a batch of pictures or sound")
        flaw = find_flaw(model, task, source, result)
        if flaw is not None and "does not run on a random batch" in flaw:
            return Outcome(class_name, task.name, "not run", flaw)
    if flaw is None:
        return Outcome(class_name, task.name, "equal")
    return Outcome(class_name, task.name, DIFFERENT, flaw)


def reason(error: Exception, source: Path) -> str:
    """Return an error's text without the folder."""
    return " ".join(str(error).replace(str(source), "MODEL").split())


def find_flaw(model: Model, task: Task, source: Path, result: Path) -> str | None:
    """Return how the loaded result differs from what is expected; None if it does not."""
    expected = task.expected(model)
    ids = expected.ids
    if ids is not None and not ids:
        ids = ids_between(source, result)
    try:
        loaded = load(model.model_class, result, task.loads_with_tiewise)
    except (LoadError, InstallError) as error:
        return str(error)
    if expected.tensors is not None and not task.loads_with_tiewise:
        flaw = tensor_flaw(expected.tensors, state_of(loaded))
        if flaw is not None:
            return flaw
    return logits_flaw(reference(model, expected), loaded, ids or {row: row for row in range(model.rows)})


def runs_on_ids(model: Any) -> bool:
    """Return whether a model runs on token ids alone."""
    try:
        logits(model, list(range(5, 5 + TOKENS)))
    except Exception:
        return False
    return True


class LoadError(Exception):
    """transformers refuses the result, or draws tensors at random."""


def load(model_class: Any, folder: Path, with_tiewise: bool) -> Any:
    """Return the loaded result.

    Raises:
        LoadError: it cannot be loaded, or lacks tensors.
    """
    if with_tiewise:
        return tiewise.load(folder).eval()
    try:
        model, info = model_class.from_pretrained(folder, output_loading_info=True)
    except Exception as error:
        raise LoadError(f"transformers refuses it: {error}"[:200]) from None
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if info[kind]:
            raise LoadError(f"{kind}: {sorted(info[kind])[:3]}")
    return model.eval()


def reference(model: Model, expected: Expected) -> Any:
    """Return a model in memory with the expected tensors."""
    if expected.tensors is None or (expected.tensors is model.tensors and expected.tied is model.source.tied):
        return model.model
    changed = built(model.model_class, flag=expected.tied)
    copies = {name: tensor.clone() for name, tensor in expected.tensors.items()}
    changed.load_state_dict(copies, assign=True)  # a constructor may tie what the flag unties
    return changed.eval()


def tensor_flaw(expected: Tensors, found: Tensors) -> str | None:
    """Return the first tensor that differs from the expected one."""
    if expected.keys() != found.keys():
        return f"other tensors: {sorted(expected.keys() ^ found.keys())[:3]}"
    for name, tensor in expected.items():
        if tensor.shape != found[name].shape:
            return f"{name} has the shape {list(found[name].shape)}, not {list(tensor.shape)}"
        if tensor.is_floating_point() and not torch.allclose(tensor, found[name], rtol=1e-4, atol=1e-5, equal_nan=True):
            return f"{name} differs by up to {float((tensor - found[name]).abs().max()):.3g}"
    return None


def logits_flaw(expected: Any, found: Any, ids: Mapping[int, int]) -> str | None:
    """Return how the logits of a text differ. A class that needs pictures or sound is judged by its tensors."""
    special = {*special_ids(expected.config.to_dict())}
    back = {new: old for old, new in ids.items()}
    special |= {back[new] for new in special_ids(found.config.to_dict()) if new in back}
    plain = [old for old in sorted(ids) if old not in special]
    text = plain[:: max(1, len(plain) // TOKENS)][:TOKENS]
    try:
        wanted = logits(expected, text)
    except Exception:
        return None
    try:
        given = logits(found, [ids[token] for token in text])
    except Exception as error:
        return f"the result does not run: {type(error).__name__}: {error}"[:200]
    if wanted.shape[-1] < len(ids):  # one number for each token of the text
        return None
    old = sorted(ids)
    difference = (wanted[..., old] - given[..., [ids[row] for row in old]]).abs().max()
    if not difference <= ROUNDING * wanted.abs().max():
        return f"logits differ by up to {float(difference):.3g} of {float(wanted.abs().max()):.3g}"
    return None


def special_ids(config: Mapping[str, Any]) -> Iterator[int]:
    """Yield the ids that a config names at any level."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from special_ids(value)
        elif str(key).endswith(("token_id", "token_ids", "token_index")):
            for number in value if isinstance(value, list) else [value]:
                if type(number) is int:
                    yield number


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Return the logits [T, V] of a text, which an encoder reads too."""
    text = torch.tensor([ids])
    extra = {"decoder_input_ids": text} if model.config.is_encoder_decoder else {}
    torch.manual_seed(0)
    with torch.no_grad():
        output = model(input_ids=text, use_cache=False, **extra)
    found = getattr(output, "logits", None)
    if found is None:
        found = output.prediction_logits
    return found[0]


def chosen_pairs(arguments: argparse.Namespace) -> list[tuple[str, Task]]:
    """Return the pairs of class and task that the command line selects."""
    words = arguments.classes
    names = [name for name in mapped_classes() if not words or any(word in name for word in words)]
    if arguments.sample is not None:
        draws = random.Random(arguments.seed)
        draws.shuffle(names)
        pairs = list[tuple[str, Task]]()
        for name in names:
            if len(pairs) < arguments.sample and ties_more(getattr(transformers, name)):
                pairs += [(name, task) for task in draws.sample(tasks(), 3)]
        return pairs[: arguments.sample]
    names = [name for name in names if ties_more(getattr(transformers, name))]
    return [(name, task) for name in names for task in tasks()]


def print_outcome(outcome: Outcome) -> None:
    """Print one line."""
    print(f"{outcome.class_name} | {outcome.task} | {outcome.state} | {outcome.detail}", flush=True)


def table_of(outcomes: Iterable[Outcome]) -> str:
    """Return a Markdown table with a row for each class and a column for each task."""
    by_class = dict[str, dict[str, str]]()
    for outcome in outcomes:
        by_class.setdefault(outcome.class_name, {})[outcome.task] = outcome.state
    columns = [task.name for task in tasks()]
    lines = [f"| class | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, states in by_class.items():
        lines.append(f"| {name} | {' | '.join(states.get(column, '') for column in columns)} |")
    return "\n".join(lines) + "\n"


def read_arguments(words: list[str]) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", metavar="WORD", help="classes whose names contain it")
    parser.add_argument("--sample", type=int, metavar="N", help="a random part of the pairs")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--table", type=Path, metavar="FILE", help="Markdown table to write")
    return parser.parse_args(words)


def main() -> int:
    """Run the chosen pairs and print every outcome, then the numbers."""
    arguments = read_arguments(sys.argv[1:])
    silence()
    outcomes = []
    for name, task in chosen_pairs(arguments):
        outcome = run(name, task)
        print_outcome(outcome)
        outcomes.append(outcome)
    if arguments.table is not None:
        arguments.table.write_text(table_of(outcomes))
    counts = Counter(outcome.state for outcome in outcomes)
    classes = len({outcome.class_name for outcome in outcomes})
    print(f"{classes} classes: " + ", ".join(f"{count} {state}" for state, count in counts.most_common()))
    return 1 if counts[DIFFERENT] else 0


def silence() -> None:
    """Keep transformers from writing progress and warnings to the terminal."""
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")


if __name__ == "__main__":
    sys.exit(main())
