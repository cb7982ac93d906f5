"""Test that each backend honours the options whose rows list it, and refuses all others.

The pairs of backend and option come from the table of options. The tests compare embedded rows, logits and gradients
with a dense fp64 formula in this file. A backend must also show a difference of the kind that `changes` names.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tiny_models import build
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import tiewise
from tiewise.boundary.boundary import Boundary
from tiewise.boundary.flax.boundary import PureBoundary
from tiewise.boundary.installation import install
from tiewise.boundary.parallel_plans import parallel_plan
from tiewise.boundary.saved import link_of
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.rewrite import factor
from tiewise.core.errors import SpecError, TiewiseError
from tiewise.core.spec import BoundarySpec
from tiewise.core.spec_options import (
    ALBERT_RUN,
    AS_SAVED,
    BACKENDS,
    BOUNDARY,
    FLAX,
    FLAX_RUN,
    GRADIENT,
    INPUT_ROWS,
    INSPECT,
    INSTALL,
    LOGITS,
    LOSS,
    MODULES,
    NEVER,
    PLAN,
    PRETRAINED,
    RUN,
    SHARDED,
    SIZES,
    START,
    STORED,
    TRAINED,
    UNDO,
    option,
    option_entries,
    options,
    positive,
)
from tiewise.inspection.tables.open_path import open_path
from tiewise.training.built_models import build_with_random_tables
from tiewise.training.kinds.albert import AlbertOptions
from tiewise.training.settings import Settings

ROOT = Path(__file__).parents[1]
V, D = 61, 16  # vocabulary and width of the tiny models
IDS = torch.tensor([3, 5, 3, 7, 11, 60])
TARGETS = torch.tensor([5, 3, 7, 11, 60, 3])
COUNTS = np.arange(V) % 7 + 9 * (np.arange(V) == 60)  # token 60 is the most frequent, then 6, 13, 20, 27, …
FREE = [6, 13, 20, 60]

# spec without and with each option or argument; a new row needs a pair here
PAIRS = {
    "bias": ("tied", "tied+bias"),
    "input_scale": ("tied", "tied+input_scale=sqrt_d"),
    "output_scale": ("tied", "tied+output_scale=1/sqrt_d"),
    "softcap": ("tied", "tied+softcap=0.5"),
    "free": ("tied", "tied+free=4"),
    "alpha": ("tied", "tied+alpha=0.25"),
    "pad": ("tied", "tied+pad=3"),
    "init": ("tied", "tied+init=0.5"),
    "vectors": ("untied", "untied+vectors=FILE"),
    "freeze": ("untied+vectors=FILE", "untied+vectors=FILE+freeze"),
    "tie_at": ("untied", "untied+tie_at=2"),
    "untie_at": ("tied", "tied+untie_at=2"),
    "width": ("factored:4", "factored:6"),
    "out_width": ("factored-untied:4", "factored-untied:in=4,out=6"),
    "rank": ("residual:2", "residual:3"),
    "strength": ("residual:2,s=0.03", "residual:2,s=0.5"),
    "in_map": ("projected", "projected:in=linear"),
    "out_map": ("projected:untied", "projected:untied,out=none"),
    "two_tables": ("projected", "projected:untied"),
    "penalty": ("projected", "projected:penalty=0.15"),
    "decay": ("projected", "projected:decay=0.2"),
    "out_bias": ("projected", "projected:out_bias"),
}
ROWS = {row.field: row for row in option_entries(BoundarySpec)}

# kinds of options that each backend's figures show; other kinds must not change the figures
SHOWS = {PLAN: {SIZES, INPUT_ROWS, LOGITS, START, TRAINED}} | {backend: {INPUT_ROWS, LOGITS} for backend in STORED}
FIGURES = {
    SIZES: "sizes",
    INPUT_ROWS: "rows",
    LOGITS: "logits",
    GRADIENT: "gradients",
    LOSS: "penalty",
    START: "start",
    PRETRAINED: "start",
    TRAINED: "trained",
}


def random_numbers(*shape, seed=0):
    """Return numbers of about the size of trained weights, the same for every backend."""
    return np.random.default_rng(seed).normal(size=shape, scale=0.3)


def pretrained_vectors():
    """Return the pretrained vectors [V, D] of `FILE`."""
    return torch.tensor(random_numbers(V, D, seed=99), dtype=torch.float32)


@dataclass
class Figures:
    """Results of a backend; None for results that it does not compute."""

    sizes: object = None
    rows: object = None
    logits: object = None
    gradients: object = None
    penalty: object = None
    start: object = None
    trained: object = None


def are_close(one, other):
    """Return whether two figures agree."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_close(one[key], other[key]) for key in one)
    if one is None or other is None:
        return one is other
    one, other = np.asarray(one), np.asarray(other)
    return one.shape == other.shape and np.allclose(one, other, rtol=1e-4, atol=1e-6)


# the dense fp64 formula


def reference_figures(spec, values):
    """Return rows, logits, gradients and penalty of a spec by plain autograd in fp64."""
    leaves = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in values.items()}
    table_in = leaves["table_in"]
    table_out = leaves.get("table_out", table_in)
    lookup_path = table_in * spec.alpha + table_in.detach() * (1 - spec.alpha)
    if spec.pad is not None:
        keep = torch.ones(V, 1, dtype=torch.float64)
        keep[spec.pad] = 0
        lookup_path = lookup_path * keep + (lookup_path * (1 - keep)).detach()
        table_out = table_out * keep + (table_out * (1 - keep)).detach()
    scales = [{None: 1.0, "sqrt_d": D**0.5, "1/sqrt_d": D**-0.5}[s] for s in (spec.input_scale, spec.output_scale)]
    embedded = lookup_path[IDS]
    if "in_map.weight" in leaves:
        embedded = embedded @ leaves["in_map.weight"].T
    embedded = embedded * scales[0]
    features = torch.tanh(embedded)
    if "out_map.p" in leaves:
        features = features + spec.strength * features @ leaves["out_map.q"].T @ leaves["out_map.p"].T
    if "out_map.weight" in leaves:
        features = features @ leaves["out_map.weight"].T
    if "out_map.bias" in leaves:
        features = features + leaves["out_map.bias"]
    if "free.rows" in leaves:
        table_out = table_out + torch.eye(V, dtype=torch.float64)[FREE].T @ leaves["free.rows"]
    logits = features @ table_out.T * scales[1]
    if "bias" in leaves:
        logits = logits + leaves["bias"]
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    torch.nn.functional.cross_entropy(logits, TARGETS).backward()
    gradients = {name: leaf.grad.numpy() for name, leaf in leaves.items()}
    if spec.freeze:
        del gradients["table_in"]
    squares = float((values["out_map.weight"] ** 2).sum()) if spec.penalty or spec.decay else 0.0
    penalty = spec.penalty * squares**0.5 + spec.decay / 2 * squares
    return Figures(rows=embedded.detach(), logits=logits.detach(), gradients=gradients, penalty=penalty)


# backends that compute


def module_figures(named, embed, logits, penalty, values):
    """Return the figures of torch modules; `named` maps the oracle's names to parameters."""
    start = full_tensor(named["table_in"]).clone()
    with torch.no_grad():
        for name, parameter in named.items():
            local_tensor(parameter).copy_(torch.tensor(values[name]))
    embedded = embed(IDS)
    z = logits(torch.tanh(embedded))
    torch.nn.functional.cross_entropy(z, TARGETS).backward()
    trained = {name: parameter.requires_grad for name, parameter in named.items()}
    gradients = {
        name: full_tensor(parameter.grad).numpy() for name, parameter in named.items() if parameter.requires_grad
    }
    sizes = {name: tuple(parameter.shape) for name, parameter in named.items()}
    return Figures(sizes, embedded.detach(), z.detach(), gradients, float(penalty), start, trained)


def full_tensor(tensor):
    """Return the full value of a tensor that may be sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor):
    """Return the local shard of a tensor; in one process it is the full tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def boundary_figures(spec, values, tmp_path):
    torch.manual_seed(0)
    boundary = Boundary(spec, V, D, counts=COUNTS)
    if boundary.spec.vectors is not None:
        boundary.load_rows(pretrained_vectors())
    penalty = boundary.penalty
    named = dict(boundary.named_parameters())
    figures = module_figures(named, boundary.embed, boundary.logits, 0.0, values)
    figures.penalty = float(penalty().detach())
    fused = boundary.loss(torch.tanh(figures.rows), TARGETS).detach()
    assert are_close(fused, torch.nn.functional.cross_entropy(figures.logits, TARGETS))
    return figures


def installed_model(spec, tmp_path):
    """Return a tiny Llama with a spec, its link, and its parameters by the oracle's names."""
    torch.manual_seed(0)
    model = build("llama", tied=BoundarySpec.parse(spec).tables == 1)
    link = install(model, spec, tokenizer=tokenizer(), counts=COUNTS)
    lookup, head = model.get_input_embeddings(), model.get_output_embeddings()
    named = {"table_in": lookup.weight}
    named |= {} if head.weight is lookup.weight else {"table_out": head.weight}
    named |= {} if head.bias is None else {"bias": head.bias}
    for owner, part in ((lookup, "in_map"), (head, "out_map"), (head, "free")):
        module = getattr(owner, part, None)
        named |= {} if module is None else {f"{part}.{name}": p for name, p in module.named_parameters()}
    return model, link, named


def tokenizer():
    """Return a tokenizer that only names rows; vectors in safetensors need no more."""
    names = [f"t{row}" for row in range(V)]
    return SimpleNamespace(
        get_vocab=lambda: {name: row for row, name in enumerate(names)},
        convert_ids_to_tokens=lambda ids: [names[row] for row in ids],
    )


def installed_figures(spec, values, tmp_path):
    model, link, named = installed_model(spec, tmp_path)
    figures = module_figures(named, model.get_input_embeddings(), model.get_output_embeddings(), 0.0, values)
    penalty = link.penalty()
    figures.penalty = 0.0 if penalty is None else float(penalty.detach())
    return figures


def sharded_figures(spec, values, tmp_path):
    """Shard the tables by rows over a mesh of one process, save them, and load them into another model."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, link, named = installed_model(spec, tmp_path)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, parallel_plan(model, mesh))
        lookup, head = model.get_input_embeddings(), model.get_output_embeddings()
        places = {"table_in": lookup.weight, "table_out": head.weight, "bias": head.bias}
        named |= {name: parameter for name, parameter in places.items() if name in named}
        assert isinstance(named["table_in"], DTensor)
        figures = module_figures(named, lookup, head, 0.0, values)
        penalty = link.penalty()
        figures.penalty = 0.0 if penalty is None else float(penalty.detach())
        tmp_path.mkdir(exist_ok=True)
        place = tiewise.boundary.save_sharded(tmp_path / f"sharded{len(list(tmp_path.iterdir()))}", model)
    finally:
        dist.destroy_process_group()
    other, _, again = installed_model(spec, tmp_path)
    tiewise.boundary.load_sharded(place, other)
    for name, parameter in again.items():
        assert are_close(parameter.detach(), torch.tensor(values[name], dtype=torch.float32)), name
    return figures


def flax_figures(spec, values, tmp_path):
    pure = PureBoundary.of(spec, V, D, COUNTS)
    params = pure.initial(jax.random.key(0))
    if pure.spec.vectors is not None:
        params = pure.with_rows(params, pretrained_vectors().numpy())
    start = np.asarray(params["table_in"])
    params = {name: jnp.asarray(values[name], jnp.float32) for name in params}
    ids, targets = IDS.numpy(), TARGETS.numpy()
    loss, gradients = jax.value_and_grad(lambda p: pure.model_loss(p, ids, jnp.tanh, targets))(params)
    embedded = pure.embed(params, ids)
    logits = pure.logits(params, jnp.tanh(embedded))
    assert are_close(loss, torch.nn.functional.cross_entropy(torch.tensor(np.asarray(logits)), TARGETS))
    gradients = {name: np.asarray(gradient) for name, gradient in gradients.items()}
    trained = dict.fromkeys(params, True)
    if not gradients["table_in"].any():
        trained["table_in"] = False
        del gradients["table_in"]
    sizes = {name: tuple(value.shape) for name, value in params.items()}
    return Figures(sizes, embedded, logits, gradients, float(pure.penalty(params)), start, trained)


# backends that count or read


def planned_choice(spec):
    """Return the record of `plan` for one spec."""
    (choice,) = tiewise.plan(build("llama").config.to_dict(), [spec]).record()["choices"]
    return choice


def plan_figures(spec, values, tmp_path):
    choice = planned_choice(spec)
    first = choice["first_loss"]["nll"]
    return Figures(
        sizes=choice["parameters"]["total"],
        rows=first,
        logits=(first, choice["parameters"].get("head_bias", 0), choice["parameters"].get("maps", 0)),
        start=first,
        trained=choice["parameters"]["trainable"],
    )


def save_model(spec, values, tmp_path):
    """Save a tiny Llama whose boundary has the given numbers; return the folder."""
    text = str(replace(BoundarySpec.parse(spec), vectors=None, freeze=False).plainly())
    model, _, named = installed_model(text, tmp_path)
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(torch.tensor(values[name]))
    folder = tmp_path / "saved"
    model.save_pretrained(folder)
    return folder


def inspect_figures(spec, values, tmp_path):
    path = open_path(open_folder(save_model(spec, values, tmp_path)))
    ids = IDS.numpy()
    embedded = path.input.read(0, V)[ids] * path.input_scale
    out = path.output.read(0, V)
    assert np.array_equal(path.output.take(np.arange(V)[::-1]), out[::-1])
    logits = path.logits(np.tanh(embedded) @ out.T * path.output_scale, out, slice(0, V))
    return Figures(rows=embedded, logits=logits)


def undo_figures(spec, values, tmp_path):
    folder = save_model(spec, values, tmp_path)
    if json.loads((folder / "config.json").read_text())["model_type"] == "tiewise":
        factor(folder, tmp_path / "dense", undo=True)
        folder = tmp_path / "dense"
    tensors = load_file(folder / "model.safetensors")
    table_in = tensors["model.embed_tokens.weight"]
    embedded = table_in[IDS]
    return Figures(rows=embedded, logits=torch.tanh(embedded) @ tensors.get("lm_head.weight", table_in).T)


COMPUTE = {BOUNDARY: boundary_figures, INSTALL: installed_figures, FLAX: flax_figures, SHARDED: sharded_figures}
READ = {PLAN: plan_figures, INSPECT: inspect_figures, UNDO: undo_figures}


# honoured


def parameter_values(spec):
    """Return numbers of every parameter of a spec in a model of V tokens and width D, by the oracle's names."""
    spec = BoundarySpec.parse(spec)
    width_in, width_out = spec.table_widths(D)
    shapes = {"table_in": (V, width_in)} | ({} if spec.tables == 1 else {"table_out": (V, width_out)})
    shapes |= spec.map_shapes(D) | ({"bias": (V,)} if spec.bias else {})
    values = {name: random_numbers(*shape, seed=sum(name.encode())) for name, shape in shapes.items()}
    if spec.pad is not None:
        values["table_in"][spec.pad] = 0
    return values


@pytest.fixture
def vectors(tmp_path, monkeypatch):
    """Write `FILE` into the working directory."""
    save_file({"rows": pretrained_vectors()}, tmp_path / "FILE")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory):
    """Return a folder for models that are saved and read back."""
    return tmp_path_factory.mktemp("options")


def is_different(row, one, other):
    """Return whether two results differ in the figure that the row changes."""
    name = FIGURES[row.changes]
    return not are_close(getattr(one, name), getattr(other, name))


def pairs(backends, *, honoured):
    """Return the (backend, field) pairs of the table that are honoured, or those that are not."""
    return [
        (backend, row.field) for backend in backends for row in ROWS.values() if (backend in row.backends) == honoured
    ]


def spec_pair(row):
    """Return the specs without and with an option."""
    assert row.field in PAIRS, f"a pair of specs without and with {row.field}"
    return PAIRS[row.field]


def quick_or_slow(pair):
    """Mark slow pairs: XLA compiles each spec again, so in Flax most arguments of kinds are slow."""
    backend, name = pair
    is_slow = backend == FLAX and ROWS[name].kinds is not None and name != "out_bias"
    return pytest.param(*pair, marks=pytest.mark.slow if is_slow else ())


@cache
def cached_figures(backend, spec, tmp_path):
    """Return the figures of a spec; the cache serves specs that several options share."""
    return COMPUTE[backend](spec, parameter_values(spec), tmp_path)


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize(("backend", "name"), [quick_or_slow(pair) for pair in pairs(COMPUTE, honoured=True)])
def test_a_backend_that_computes_honours_the_option(backend, name, shared_folder):
    row = ROWS[name]
    without, spec = spec_pair(row)
    before, after = cached_figures(backend, without, shared_folder), cached_figures(backend, spec, shared_folder)
    assert is_different(row, before, after)
    for text, figures in ((without, before), (spec, after)):
        expected = reference_figures(BoundarySpec.parse(text), parameter_values(text))
        assert are_close(figures.rows, expected.rows)
        assert are_close(figures.logits, expected.logits)
        assert are_close(figures.gradients, expected.gradients)
        assert are_close(figures.penalty, expected.penalty)


@pytest.mark.parametrize("backend", COMPUTE)
def test_tables_start_with_scale_vectors_and_zero_pad_row_of_spec(backend, vectors, tmp_path):
    start = {
        name: COMPUTE[backend](PAIRS[name][1], parameter_values(PAIRS[name][1]), tmp_path / name).start
        for name in ("init", "pad", "vectors")
    }
    assert np.asarray(start["init"]).std() == pytest.approx(0.5, rel=0.1)
    assert not np.asarray(start["pad"])[3].any()
    assert are_close(start["vectors"], pretrained_vectors())


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize(("backend", "name"), pairs(READ, honoured=True))
def test_a_backend_that_reads_or_counts_honours_the_option(backend, name, tmp_path):
    row = ROWS[name]
    without, spec = spec_pair(row)
    if backend == UNDO and name in ("bias", "softcap"):
        with pytest.raises(TiewiseError, match=rf"{name}|soft-cap"):
            undo_figures(spec, parameter_values(spec), tmp_path)
        return
    before, after = (
        READ[backend](text, parameter_values(text), tmp_path / str(n)) for n, text in enumerate((without, spec))
    )
    if (backend, name) == (PLAN, "strength"):
        assert are_close(before.logits, after.logits)  # P starts at zero, so the first loss is that of a tied table
    elif row.changes in SHOWS[backend]:
        assert is_different(row, before, after)
    elif row.changes != SIZES:
        values = parameter_values(spec)
        assert are_close(vars(before), vars(READ[backend](without, values, tmp_path / "2"))) or name == "pad"
    if backend in STORED:
        expected = reference_figures(BoundarySpec.parse(spec), parameter_values(spec))
        assert are_close(
            after.rows, reference_figures(replace(BoundarySpec.parse(spec), softcap=None), parameter_values(spec)).rows
        )
        assert are_close(after.logits, expected.logits)


def test_plan_counts_what_the_option_adds():
    def choice(spec):
        return planned_choice(spec)["parameters"]

    assert choice("tied+bias")["total"] - choice("tied")["total"] == V
    assert choice("tied")["trainable"] - choice("tied+vectors=FILE+freeze")["trainable"] == V * D
    assert choice("projected:out_bias")["total"] - choice("projected")["total"] == D
    assert choice("tied+free=4")["total"] - choice("tied")["total"] == 4 * D
    assert choice("tied+free=4")["trainable"] - choice("tied")["trainable"] == 4 * D
    with pytest.raises(SpecError, match=f"the vocabulary has {V} tokens; choose K ≤ {V}"):
        choice(f"tied+free={V + 1}")


# refused


@dataclass(frozen=True)
class SpecWithThrowaway(BoundarySpec):
    """Spec with one more option, which no backend honours."""

    throwaway: float | None = option(None, positive, "`throwaway=x`", "nothing", LOGITS, other_tools=NEVER)


@pytest.fixture
def with_throwaway(monkeypatch):
    """Make `BoundarySpec.parse` read the additional option."""
    monkeypatch.setattr(BoundarySpec, "parse", SpecWithThrowaway.parse)


def write_saved_model(folder, text):
    """Write a folder whose saved spec is `text`; readers see only its config before they refuse."""
    tensors = {"model.embed_tokens.weight": torch.zeros(V, D), "model.norm.weight": torch.ones(D)}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = build("llama").config.to_dict() | {"base_model_type": "llama"}
    config |= {"model_type": "tiewise", "tiewise_boundary": text, "architectures": ["TiewiseLlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def check_run(text, **settings):
    """Check the settings of a run."""
    Settings(arms=(text,), width=D, heads=2, steps=10, **settings).checked()


def save_with_spec(text, tmp_path):
    """Set the spec of an installed model as if `install` had accepted it, and save the model."""
    model = build("llama", tied=True)
    install(model, "tied")
    link_of(model).spec = BoundarySpec.parse(text)
    tiewise.boundary.save_sharded(tmp_path / "sharded", model)


def plan_sharding(text, tmp_path):
    """Plan the sharding of an installed model's tables."""
    model = build("llama", tied=True)
    install(model, "tied")
    link_of(model).spec = BoundarySpec.parse(text)
    parallel_plan(model, None)


ENTER = {
    BOUNDARY: lambda text, tmp_path: Boundary(text, V, D, counts=COUNTS),
    INSTALL: lambda text, tmp_path: install(build("llama", tied="untied" not in text), text, counts=COUNTS),
    FLAX: lambda text, tmp_path: PureBoundary.of(text, V, D, COUNTS),
    PLAN: lambda text, tmp_path: planned_choice(text),
    UNDO: lambda text, tmp_path: factor(write_saved_model(tmp_path / "stored", text), tmp_path / "dense", undo=True),
    INSPECT: lambda text, tmp_path: open_path(open_folder(write_saved_model(tmp_path / "stored", text))),
    SHARDED: save_with_spec,
    RUN: lambda text, tmp_path: check_run(text),
    ALBERT_RUN: lambda text, tmp_path: check_run(text, kind="albert", model="albert", kind_options=AlbertOptions()),
    FLAX_RUN: lambda text, tmp_path: check_run(text, backend="flax"),
}


def test_refusal_cases_cover_every_backend():
    assert ENTER.keys() == BACKENDS
    assert COMPUTE.keys() == MODULES
    assert all(row.backends <= BACKENDS for row in ROWS.values())


@pytest.mark.parametrize(("backend", "name"), pairs(ENTER, honoured=False))
def test_a_backend_refuses_the_option_by_name(backend, name, tmp_path):
    spec = spec_pair(ROWS[name])[1]
    with pytest.raises(TiewiseError) as caught:
        ENTER[backend](spec, tmp_path)
    assert spec in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize("backend", ENTER)
@pytest.mark.usefixtures("with_throwaway")
def test_every_backend_refuses_option_without_behaviour(backend, kind, tmp_path):
    with pytest.raises(TiewiseError, match=f"{backend} does not honour 'throwaway'") as caught:
        ENTER[backend](f"{kind}+throwaway=2", tmp_path)
    assert "leave it out" in caught.value.remedy


@pytest.mark.usefixtures("with_throwaway")
def test_load_verbs_and_sharding_refuse_option_without_behaviour(tmp_path):
    with pytest.raises(SpecError, match="a sharded model does not honour 'throwaway'"):
        plan_sharding("tied+throwaway=2", tmp_path)
    with pytest.raises(SpecError, match="install does not honour 'throwaway'"):
        tiewise.load(write_saved_model(tmp_path / "stored", "tied+throwaway=2"))
    for rewrite in (
        lambda source, to: tiewise.factor(source, to, rank=2),
        lambda source, to: tiewise.checkpoint.resize(source, to, vocab=8),
        tiewise.tie,
        tiewise.untie,
    ):
        with pytest.raises(TiewiseError, match=r"tied\+throwaway=2: .* does not honour 'throwaway'"):
            rewrite(tmp_path / "stored", tmp_path / "new")


@pytest.mark.usefixtures("with_throwaway")
def test_new_option_row_is_parsed_printed_and_validated():
    spec = BoundarySpec.parse("tied+throwaway=2+bias")
    assert str(spec) == "tied+bias+throwaway=2"
    assert not spec.plain
    with pytest.raises(SpecError, match=r"must be a positive number"):
        BoundarySpec.parse("tied+throwaway=-1")
    with pytest.raises(SpecError, match=r"known: bias, .*untie_at, throwaway"):
        BoundarySpec.parse("tied+thing")


# `factor`, runs, docs


@pytest.mark.parametrize(
    "name",
    [
        row.field
        for row in ROWS.values()
        if row.other_tools != AS_SAVED and row.field != "out_map" and INSTALL in row.backends
    ],
)
def test_factor_refuses_model_with_boundary_and_names_it(name, tmp_path):
    spec = spec_pair(ROWS[name])[1]
    folder = save_model(spec, parameter_values(spec), tmp_path)
    with pytest.raises(TiewiseError) as caught:
        tiewise.factor(folder, tmp_path / "narrow", rank=2)
    assert f"its boundary is {spec} already" in str(caught.value)


def start_run(spec):
    """Return the link of the model that a run starts with."""
    job = SimpleNamespace(
        seed=1, spec=BoundarySpec.parse(spec), text=SimpleNamespace(tokenizer=tokenizer(), vocab=V, counts=COUNTS)
    )
    return build_with_random_tables(job, lambda: build("llama", tied=True), job.spec.init or 0.1)


@pytest.mark.parametrize("name", [row.field for row in ROWS.values() if RUN in row.backends])
@pytest.mark.usefixtures("vectors")
def test_run_installs_boundary_of_its_arm(name):
    spec = spec_pair(ROWS[name])[1]
    check_run(spec)
    link = start_run(spec)
    table = link.tables()[0].detach()
    installed = replace(BoundarySpec.parse(spec).plainly(), init=None, vectors=None, freeze=False)
    assert link.spec == installed
    assert link.tables()[0].requires_grad == ("freeze" not in spec)
    if "vectors" in spec:
        assert are_close(table, pretrained_vectors())
    elif name == "init":
        assert float(table.std()) == pytest.approx(0.5, rel=0.1)
    elif name == "pad":
        assert not table[3].any()


def test_boundary_page_has_the_row_of_every_option():
    page = (ROOT / "docs" / "boundary.md").read_text(encoding="utf-8")
    lines = []
    for row in ROWS.values():
        kinds = ", ".join(f"`{kind}`" for kind in row.kinds or ())
        cells = (row.meaning, row.changes, row.other_tools) if row.kinds is None else (kinds, row.meaning)
        lines.append(f"| {' | '.join((row.syntax, *cells))} |")
    after = [line for line in page.splitlines() if line in lines]
    assert after == lines


def test_plain_specs_are_those_that_other_tools_load_as_saved():
    for key, row in options(BoundarySpec).items():
        spec = BoundarySpec.parse(spec_pair(row)[1])
        assert spec.plain == (row.other_tools == AS_SAVED), key
        assert (row.no_tables is not None) == (row.other_tools == NEVER)
        if row.no_tables is not None:
            with pytest.raises(SpecError, match=str(key) if key != "softcap" else "soft-cap"):
                spec.require_tables_alone()
        else:
            spec.require_tables_alone()
