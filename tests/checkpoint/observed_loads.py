"""What a loader makes of a folder, observed by loading it: transformers, mlx-lm, and the writer of GGUF files."""

import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import saved_models as saved
import torch
import transformers as tr
from safetensors import safe_open

from tiewise.checkpoint import loader_columns as columns

# names of two tables in a warning of transformers
NOT_TIED = re.compile(r"specifies to tie (\S+) to (\S+), but both are present in the checkpoints with different values")
# saved buffers that are right without a stored tensor: the class computes them from its config, never changes them, or
# uses them only in the integer mode of I-BERT
CONSTANT_BUFFERS = ("inv_freq", "alpha", "beta", "eps", "position_ids", "pos_idx_to_embed", "num_batches_tracked")
CONSTANT_BUFFERS += ("diagonal_decay", "key_decay", "query_decay", "slope_rate", "final_logits_bias")
CONSTANT_BUFFERS += ("shift", "x_min", "x_max", "act_scaling_factor", "fc_scaling_factor", "weight_scaling_factor")
CONSTANT_BUFFERS += ("weight_integer", "bias_integer")


@dataclass(frozen=True)
class Observed:
    """Outcome of one load. A broken model may have several outcomes at once."""

    outcomes: frozenset[str]  # words of `loader_columns` that are true of the loaded model; empty: cannot be observed
    random: tuple[str, ...] = ()  # every parameter that no file fills
    error: str = ""  # the error of a load that was refused


def refused(error: BaseException) -> Observed:
    """Return the outcome of a load that raised an error."""
    return Observed(frozenset([columns.ERROR]), error=f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class LoadedModel:
    """A model that transformers loaded, and what it reported."""

    model: Any
    missing: frozenset[str]  # keys that it initialised
    apart: frozenset[str]  # tensors named by warnings that two tables are not tied
    parameters: dict[str, torch.Tensor]  # with every name of a shared one


def load_with_transformers(class_name: str, folder: Path, seed: int) -> LoadedModel:
    """Load a folder under a seed, which decides the parameters that no file fills."""
    torch.manual_seed(seed)
    with saved.heard() as heard, warnings.catch_warnings(), filled_memory():
        warnings.simplefilter("ignore")
        model, info = getattr(tr, class_name).from_pretrained(folder, output_loading_info=True)
    apart = [name for pair in NOT_TIED.findall(heard.getvalue()) for name in pair]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return LoadedModel(model, frozenset(info["missing_keys"]), frozenset(apart), parameters)


def token_ends(model: Any) -> tuple[list[Any], Any]:
    """Return (modules of the input tables, module of the head or None).

    `get_output_embeddings` of a few classes returns None although a tie of the class names their head.
    """
    tables, head = saved.ends(model)
    tables = [table for table in tables if table.weight.dim() == 2]  # Whisper's encoder names a convolution
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for target, source in (model._tied_weights_keys or {}).items():
        is_of_table = any(parameters.get(source) is table.weight for table in tables)
        if head is None and is_of_table and target.endswith(".weight"):
            head = model.get_submodule(target.removesuffix(".weight"))
    if any(head is table for table in tables):
        head = None  # the tie is one of two input tables
    return tables, head


def observe_transformers(class_name: str, folder: Path) -> Observed:
    """Load a folder twice under different seeds and return the outcome for the whole model."""
    try:
        first, second = (load_with_transformers(class_name, folder, seed) for seed in (0, 1))
    except Exception as error:
        return refused(error)
    unfilled = {name for name in first.missing if not _is_constant(first, name)}
    for name, values in first.parameters.items():
        if not torch.equal(values.nan_to_num(), second.parameters[name].nan_to_num()):
            unfilled.add(name)
    words = set(_broken_words(first, unfilled, _drawn(first, second, unfilled))) or {_word_of_ends(first)}
    if columns.RANDOM_TENSORS in words:
        words.discard(columns.NEW_TENSORS)
    return Observed(frozenset(words), tuple(sorted(unfilled)))


def _drawn(first: LoadedModel, second: LoadedModel, names: Iterable[str]) -> set[str]:
    """Return the tensors that differ between two loads under different seeds, or that were not initialised."""
    drawn = set()
    for name in names:
        one, other = (loaded.model.get_parameter_or_buffer(name) for loaded in (first, second))
        if _is_uninitialised(one) or not torch.equal(one, other):
            drawn.add(name)
    return drawn


def _is_uninitialised(values: torch.Tensor) -> bool:
    """Return whether a tensor has the numbers with which torch fills fresh memory in its deterministic mode."""
    if values.is_floating_point():
        return bool(values.isnan().any())
    return values.dtype != torch.bool and bool((values == torch.iinfo(values.dtype).max).any())


@contextmanager
def filled_memory() -> Iterator[None]:
    """Let torch fill the memory of new tensors until the block ends: with NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _is_constant(loaded: LoadedModel, name: str) -> bool:
    """Return whether a tensor is a buffer that has the right values if no file stores it."""
    return name not in loaded.parameters and name.rpartition(".")[2] in CONSTANT_BUFFERS


def _broken_words(loaded: LoadedModel, unfilled: set[str], drawn: set[str]) -> Iterator[str]:
    """Yield the word of each parameter that no file fills.

    Args:
        loaded: the model.
        unfilled: tensors that no file fills.
        drawn: those of them that depend on the seed.
    """
    tables, head = token_ends(loaded.model)
    table_weights = [table.weight for table in tables]
    head_weight, head_bias = getattr(head, "weight", None), getattr(head, "bias", None)
    rows = len(table_weights[0]) if table_weights else None
    for name in unfilled:
        outside = columns.RANDOM_TENSORS if name in drawn else columns.NEW_TENSORS
        values = loaded.parameters.get(name)
        in_layer = any(part.isdigit() for part in name.split("."))
        if values is not None and any(values is weight for weight in table_weights):
            yield columns.RANDOM_TABLE
        elif values is not None and values is head_weight:
            yield columns.RANDOM_HEAD
        elif values is not None and not in_layer and (values is head_bias or values.shape[-1:] == (rows,)):
            yield columns.NEW_BIAS
        elif in_layer:
            yield columns.RANDOM_LAYERS
            yield outside
        elif values is not None and _is_before_head(loaded.model, values):
            yield columns.RANDOM_HEAD
        else:
            yield outside


def _part_with_head(model: Any) -> Any:
    """Return the model with a body and a head: the given one, or the decoder of an encoder with a decoder."""
    if model.base_model is not model:
        return model
    parts = [part for part in model.children() if isinstance(part, tr.PreTrainedModel)]
    with_head = [part for part in parts if part.base_model is not part and part.get_output_embeddings() is not None]
    return with_head[0] if with_head else None


def _is_before_head(model: Any, values: torch.Tensor) -> bool:
    """Return whether a parameter is outside the body and changes the logits of tokens: a layer before the head."""
    part = _part_with_head(model)
    if part is None or any(values is of_body for of_body in part.base_model.parameters()):
        return False
    try:
        outputs = part(input_ids=torch.tensor([[3, 5, 7]]))
    except Exception:  # it needs pictures or sound as well
        return False
    logits = outputs.get("logits", outputs.get("prediction_logits"))
    if logits is None:
        return False
    (gradient,) = torch.autograd.grad(logits.float().sum(), [values], allow_unused=True)
    return gradient is not None


def _word_of_ends(loaded: LoadedModel) -> str:
    """Return the outcome of a model whose parameters are all filled."""
    tables, head = token_ends(loaded.model)
    if head is None:
        return columns.NO_HEAD
    if any(head.weight is table.weight for table in tables):
        return columns.TIED
    if any(loaded.parameters.get(name) is head.weight for name in loaded.apart):
        return columns.UNTIED_WITH_WARNING
    return columns.UNTIED


def observe_mlx(folder: Path, table: np.ndarray | None, head: np.ndarray | None) -> Observed:
    """Load a folder with mlx-lm and return the outcome.

    If the loaded model has a parameter equal to the stored head, it is set to zero: the model uses it if its logits
    change.

    Args:
        folder: the checkpoint.
        table: stored input table, in float32; None if none is stored.
        head: stored head; None if none is stored.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten
    from mlx_lm.utils import load_model

    try:
        model, _ = load_model(folder, lazy=False)
    except (Exception, SystemExit) as error:  # one of its files calls sys.exit if a package is missing
        return refused(error)
    loaded = dict(tree_flatten(model.parameters()))
    parameters = {name: np.array(value.astype(mx.float32)) for name, value in loaded.items()}
    tables = _equal_to(table, parameters)
    if not tables:
        return Observed(frozenset([columns.RANDOM_TABLE]))
    heads = [name for name in _equal_to(head, parameters) if name != tables[0]]
    if heads:
        ids = mx.array([[3, 5, 7, 11]])
        try:
            before = np.array(model(ids).astype(mx.float32))
            model.update(tree_unflatten([(heads[0], mx.zeros_like(loaded[heads[0]]))]))
            after = np.array(model(ids).astype(mx.float32))
        except Exception as error:
            return Observed(frozenset(), error=f"no forward pass: {error}")
        if not np.array_equal(before, after):
            return Observed(frozenset([columns.UNTIED]))
    if head is not None and table is not None and not np.array_equal(table, head):
        return Observed(frozenset([columns.DROPPED]))
    return Observed(frozenset([columns.TIED]))


def _equal_to(values: np.ndarray | None, parameters: dict[str, np.ndarray]) -> list[str]:
    """Return the names of the loaded parameters with these values."""
    if values is None:
        return []
    return [name for name, loaded in parameters.items() if np.array_equal(loaded, values)]


# {model_type: name of its architecture in gguf}, if the two names differ
GGUF_NAMES = {"cohere": "command-r", "lfm2_moe": "lfm2moe", "phi": "phi2", "qwen2_moe": "qwen2moe"}
GGUF_NAMES |= {"qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "gpt_neox": "gptneox", "mistral": "llama"}
GGUF_NAMES |= {"mixtral": "llama", "glm": "chatglm"}


def gguf_names(model_type: str, tensors: Iterable[str]) -> dict[str, str] | None:
    """Return {stored name: name in GGUF} by the map of the gguf package; None if it lacks a name.

    Raises:
        KeyError: gguf has no architecture of this name.
    """
    import gguf

    by_name = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(by_name[gguf_architecture(model_type)], 64)
    found = {name: names.get_name(name, try_suffixes=(".weight", ".bias")) for name in tensors}
    return None if None in found.values() else found


def gguf_architecture(model_type: str) -> str:
    """Return the name of a family's architecture in gguf."""
    return GGUF_NAMES.get(model_type, model_type)


def observe_gguf(folder: Path, model_type: str) -> Observed:
    """Name the tensors of a folder as the converter of llama.cpp does, write a GGUF file, and read it.

    The converter stops at a tensor whose name its map lacks. A file without `output.weight` uses the input table.
    """
    with TemporaryDirectory() as target:
        path = Path(target, "model.gguf")
        if not write_gguf(folder, model_type, path):
            return Observed(frozenset([columns.ERROR]), error="its map lacks the name of a tensor")
        ends = gguf_ends(path)
    if ends.table is None:
        return Observed(frozenset([columns.ERROR]), error="no token_embd.weight")
    return Observed(frozenset([columns.TIED if ends.head is None else columns.UNTIED]))


def write_gguf(folder: Path, model_type: str, path: Path) -> bool:
    """Write the tensors of a folder with gguf's names and writer; return False if its map lacks a name."""
    import gguf

    tensors = dict(_stored_tensors(folder))
    names = gguf_names(model_type, tensors)
    if names is None:
        return False
    writer = gguf.GGUFWriter(path, gguf_architecture(model_type))
    for name, values in tensors.items():
        writer.add_tensor(names[name], values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return True


@dataclass(frozen=True)
class GgufEnds:
    """Shapes of the two tables of a GGUF file; None for one that is not stored."""

    table: tuple[int, ...] | None
    head: tuple[int, ...] | None
    is_stored_twice: bool  # the two have the same bytes
    tensors: int


def gguf_ends(path: Path) -> GgufEnds:
    """Return the ends of a GGUF file as gguf's own reader reads them."""
    import gguf

    stored = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}
    table, head = stored.get("token_embd.weight"), stored.get("output.weight")
    are_both = table is not None and head is not None
    is_stored_twice = are_both and table.shape == head.shape and table.tobytes() == head.tobytes()
    return GgufEnds(_shape_of(table), _shape_of(head), is_stored_twice, len(stored))


def _shape_of(values: np.ndarray | None) -> tuple[int, ...] | None:
    """Return the shape of an array; None for none."""
    return None if values is None else values.shape


def _stored_tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, values in float32) of the tensors that the converter reads."""
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                yield name, opened.get_tensor(name).to(torch.float32).numpy()
