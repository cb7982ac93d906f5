"""Figures of public names of `import tiewise` on fixed inputs: losses, sums of gradients, first numbers.

Each function returns a JSON-able value, whose leaves are recorded. Inputs come from numpy, the same on every machine.
"""

import hashlib
import json
import tempfile
import warnings
from importlib.resources import files
from pathlib import Path

import numpy as np

from tests.answers.texts import sums, words

V, E, N = 40, 8, 12
KINDS = ("tied", "untied", "factored:4", "factored-untied:in=3,out=5", "projected:6", "residual:2", "spd")
LOSS_OPTIONS = {
    "none": {},
    "scale": {"scale": 0.5},
    "softcap": {"softcap": 2.0},
    "ignore_index": {"ignore_index": 3},
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.01},
    "class_weight": {"class_weight": True},
    "reduction sum": {"reduction": "sum"},
    "reduction none": {"reduction": "none"},
    "chunk": {"chunk": 5},
    "logits": {"logits": "fp32"},
    "backend": {"backend": "tiewise"},
    "all": {"scale": 0.5, "softcap": 2.0, "label_smoothing": 0.1, "z_loss": 0.01, "chunk": 7},
}
# a spec for every argument and option of boundaries
SPECS = words(
    """
    tied untied factored:4 factored:k=4 factored-untied:4 factored-untied:k=4 factored-untied:in=3,out=5
    projected:6 projected:k=6 projected:6,untied projected:6,in=linear,out=linear projected:8,in=none,out=none
    projected:6,penalty=0.1 projected:6,decay=0.1 projected:6,out_bias residual:2 residual:r=2,s=0.1 spd
    tied+bias tied+input_scale=sqrt_d tied+input_scale=2 untied+output_scale=1/sqrt_d tied+output_scale=1/d
    tied+softcap=3 tied+alpha=0.5 tied+pad=0 untied+init=0.05 untied+tie_at=4 tied+untie_at=4
    factored:4+bias+softcap=30+init=0.05 tied+free=3
    """
)
REFUSED = words(
    """
    tid factored factored:0 factored:x residual spd:3 tied:4 tied+biass tied+bias=1 tied+softcap=0
    tied+softcap=x tied+alpha=-1 tied+tie_at=4 untied+untie_at=4 tied+freeze projected:4,out=none
    projected:8,out=none,out_bias projected:4,out=full factored:4,k=5 tied+bias+bias tied+pad=-1 tied+init=inf
    tied+vectors=
    """
)
SHARINGS = words("none attention ffn all all:groups=2 all:cycle=2 all:ends=1 sandwich all+rank=2")
REFUSED_SHARINGS = words("al none:groups=2 all:groups=0 all:groups=2,cycle=2 all:ends=-1 all+rank=x all:width=3")


def _numbers(*shape, seed=0, scale=0.5):
    import torch

    values = np.random.default_rng([seed, *shape]).normal(0, scale, shape)
    return torch.from_numpy(values.astype(np.float32))


def _tokens(count=N, seed=0, vocab=V):
    import torch

    return torch.from_numpy(np.random.default_rng([seed, count]).integers(0, vocab, count))


def _leaf(*shape, seed=0):
    return _numbers(*shape, seed=seed).requires_grad_()


def _facts(tensor):
    """Return shape, sums and first numbers of a tensor."""
    if tensor is None:
        return None
    flat = tensor.detach().double().flatten().tolist()
    return {"shape": list(tensor.shape), "sums": sums(flat), "first": flat[:3]}


def _sums(tensor):
    """Return the sums of a gradient."""
    return None if tensor is None else sums(tensor.double().flatten().tolist())


def _message(call):
    """Return the message of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def losses():
    """Return `linear_cross_entropy` with each of its options, and its gradients."""
    import torch

    import tiewise

    result = {}
    for name, arguments in LOSS_OPTIONS.items():
        options = dict(arguments)
        if "class_weight" in options:
            options["class_weight"] = _numbers(V, seed=9).abs()
        features, weight, bias = _leaf(N, E, seed=1), _leaf(V, E, seed=2), _leaf(V, seed=3)
        loss = tiewise.linear_cross_entropy(features, weight, _tokens(), bias, **options)
        loss.sum().backward()
        gradients = {"features": features.grad, "weight": weight.grad, "bias": bias.grad}
        result[name] = {"loss": _facts(loss), **{key: _facts(value) for key, value in gradients.items()}}
    features, weight = _leaf(N, E, seed=1), _leaf(V, E, seed=2)
    ignored = torch.full((N,), -100)
    result["all ignored"] = _facts(tiewise.linear_cross_entropy(features, weight, ignored))
    half = tiewise.linear_cross_entropy(features.bfloat16(), weight.bfloat16(), _tokens())
    result["bfloat16"] = _facts(half)
    return result


def loss_refusals():
    """Return the messages of wrong arguments of `linear_cross_entropy`."""
    import tiewise

    features, weight = _numbers(N, E), _numbers(V, E, seed=1)
    wrong = {
        "integers": (features.long(), weight, _tokens()),
        "widths": (features[:, :4], weight, _tokens()),
        "targets": (features, weight, _tokens(5)),
        "float targets": (features, weight, _tokens().float()),
        "target too large": (features, weight, _tokens() + V),
    }
    result = {
        name: _message(lambda arguments=arguments: tiewise.linear_cross_entropy(*arguments))
        for name, arguments in wrong.items()
    }
    options = {"reduction": "max", "label_smoothing": 2.0, "softcap": -1.0, "chunk": 0, "logits": "fp8", "backend": "x"}
    for name, value in options.items():
        call = lambda arguments={name: value}: tiewise.linear_cross_entropy(features, weight, _tokens(), **arguments)  # noqa: E731
        result[name] = _message(call)
    result["unknown option"] = _message(lambda: tiewise.linear_cross_entropy(features, weight, _tokens(), smoothing=1))
    return result


def other_losses():
    """Return log-probabilities, divergence and the augmented loss."""
    import tiewise

    features, weight, table = _leaf(N, E, seed=1), _leaf(V, E, seed=2), _numbers(V, E, seed=4)
    result = {}
    log_prob = tiewise.boundary.linear_log_prob(features, weight, _tokens(), temperature=0.7)
    log_prob.sum().backward()
    result["log_prob"] = {"value": _facts(log_prob), "weight": _facts(weight.grad)}
    both = tiewise.boundary.linear_log_prob(features, weight, _tokens(), entropy=True)
    result["entropy"] = [_facts(part) for part in both]
    for beta in (0.0, 0.5, 1.0):
        arguments = features, weight, _numbers(N, E, seed=5), table
        loss = tiewise.boundary.linear_divergence(*arguments, targets=_tokens(), beta=beta, temperature=2.0)
        result[f"divergence {beta}"] = _facts(loss)
    for options in ({}, {"alpha": 0.5}, {"temperature": 10.0}, {"hard": 0.5}, {"through_targets": True}):
        weight.grad = None
        loss = tiewise.boundary.augmented_cross_entropy(features, weight, _tokens(), table=table, **options)
        loss.backward(retain_graph=True)
        result[f"augmented {options}"] = {"loss": _facts(loss), "weight": _facts(weight.grad)}
    return result


def two_paths():
    """Return both gradients of a tied table, with each option of the lookup, and their norms."""
    import tiewise

    result = {}
    options = {"none": {}, "stop_lookup": {"stop_lookup": 3}, "stop_both": {"stop_both": 3}, "alpha": {"alpha": 0.5}}
    for name, arguments in options.items():
        table, record = _leaf(V, E, seed=2), tiewise.boundary.PathRecord()
        lookup = tiewise.boundary.LookupOptions(record=record, **arguments)
        hidden, head = tiewise.boundary.tied_lookup(table, _tokens(seed=7), lookup)
        loss = tiewise.linear_cross_entropy(hidden * 2, head, _tokens())
        loss.backward()
        norms = tiewise.boundary.path_norms(table.grad, record)
        result[name] = {"loss": loss.item(), "gradient": _facts(table.grad), "norms": vars(norms)}
    return result


def exact_top():
    """Return the largest logits of `ExactTop`."""
    import torch

    import tiewise

    top, hidden = tiewise.boundary.ExactTop(_numbers(V, E, seed=2)), _numbers(3, E, seed=6)
    values, tokens = top.top(hidden, 4)
    best = top.argmax(hidden, bias=_numbers(V, seed=3), scale=0.5)
    assert isinstance(best, torch.Tensor)
    return {"values": _facts(values), "tokens": tokens.tolist(), "argmax": best.tolist()}


def boundaries():
    """Return vectors, logits, loss and gradients of a boundary of each spec option."""
    import torch

    import tiewise

    result = {}
    for spec in SPECS:
        torch.manual_seed(0)
        if "tie_at" in spec:
            result[spec] = _message(lambda spec=spec: tiewise.Boundary(spec, V, E))
            continue
        built = tiewise.Boundary(spec, V, E, counts=range(V))
        values = float(built.table_in.detach().double().abs().sum())
        with torch.no_grad():
            for place, parameter in enumerate(built.parameters()):
                parameter.copy_(_numbers(*parameter.shape, seed=place))
        result[spec] = _boundary_facts(built) | {"drawn": values, "predicted": built.predicted_nll()}
    return result


def _boundary_facts(built):
    names = {name: list(parameter.shape) for name, parameter in built.named_parameters()}
    vectors = built.embed(_tokens(seed=7))
    logits = built.logits(vectors)
    loss = built.loss(vectors, _tokens()) + built.penalty()
    loss.backward()
    gradients = {name: _facts(parameter.grad) for name, parameter in built.named_parameters()}
    facts = {"vectors": _facts(vectors), "logits": _facts(logits), "loss": loss.item()}
    return {"spec": str(built.spec), "parameters": names, **facts, "gradients": gradients}


def specs():
    """Return the written form of each spec, and the message of each refused one."""
    import tiewise

    result = {text: _spec_facts(tiewise.boundary.BoundarySpec.parse(text)) for text in SPECS}
    result |= {
        f"refused {text}": _message(lambda text=text: tiewise.boundary.BoundarySpec.parse(text)) for text in REFUSED
    }
    result |= {f"sharing {text}": str(tiewise.boundary.SharingSpec.parse(text)) for text in SHARINGS}
    parse = tiewise.boundary.SharingSpec.parse
    result |= {f"refused sharing {text}": _message(lambda text=text: parse(text)) for text in REFUSED_SHARINGS}
    rows = tiewise.boundary.Vocabularies(5, 4, (0, 2, -1, -1))
    result["vocabularies"] = [str(rows), rows.read_and_predicted, rows.rows(True), rows.rows(False)]
    result["vocabularies rows"] = list(rows.output_index())
    result["vocabularies refused"] = [
        _message(lambda arguments=arguments: tiewise.boundary.Vocabularies(*arguments))
        for arguments in ((0, 3), (3, 2, (0,)), (3, 1, (7,)))
    ]
    return result


def _spec_facts(spec):
    facts = {"written": str(spec), "tables": spec.tables, "plain": spec.plain, "widths": list(spec.table_widths(8))}
    facts["maps"] = _message(lambda: spec.maps(8))
    facts["shapes"] = {name: list(shape) for name, shape in spec.map_shapes(8).items()}
    return facts | {"scales": list(spec.scales(8))}


def _model(tied=True, layers=2):
    """Return a tiny Llama with fixed numbers."""
    import torch
    import transformers

    sizes = {"vocab_size": V, "hidden_size": E, "intermediate_size": 16, "num_hidden_layers": layers}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            if parameter.ndim > 1:
                parameter.copy_(_numbers(*parameter.shape, seed=place, scale=0.3))
    return model


def _run_model(model):
    ids = _tokens(24, seed=5).reshape(2, 12)
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return out, {name: _sums(parameter.grad) for name, parameter in model.named_parameters()}


def installs():
    """Return loss, logits and gradients of a model with each kind of boundary."""
    import torch

    import tiewise

    result = {}
    for spec in (None, *KINDS):
        model = _model(tied=spec != "untied")
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            built = tiewise.install(model, spec)
        out, gradients = _run_model(model)
        facts = {"loss": out.loss.item(), "gradients": gradients}
        groups = [sorted(key for key in group if key != "params") for group in tiewise.param_groups(model)]
        result[str(spec)] = {**facts, "groups": groups, "same": tiewise.installed(model) is built}
    return result


def sharings():
    """Return loss and gradients of a model whose layers share parameters."""
    import tiewise

    result = {}
    for spec in SHARINGS:
        model = _model(layers=4)
        tiewise.share_layers(model, spec)
        out, gradients = _run_model(model)
        result[spec] = {"loss": out.loss.item(), "parameters": len(gradients), "gradients": gradients}
    return result


def settings_of_adapters():
    """Return `lora_config` of a tied and an untied model."""
    import tiewise

    calls = {"plain": {}, "tokens": {"new_tokens": [3, 5]}, "tables": {"tables": True}}
    result = {}
    for tied in (True, False):
        for name, arguments in calls.items():
            built = tiewise.checkpoint.lora_config(_model(tied), **arguments)
            result[f"tied {tied} {name}"] = {key: sorted(v) if isinstance(v, set) else v for key, v in built.items()}
    return result


def saved_models():
    """Return what `load`, `probe` and the sharded files make of a saved model with a boundary."""
    import torch

    import tiewise

    model = _model()
    torch.manual_seed(0)
    tiewise.install(model, "factored:4")
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(root)
        model.save_pretrained(folder / "saved")
        loaded = tiewise.load(folder / "saved")
        out, _ = _run_model(loaded)
        _model().save_pretrained(folder / "plain")
        probed = tiewise.probe(_model(), folder / "plain")
        tiewise.boundary.save_sharded(folder / "sharded", model, notes={"step": 3})
        notes = tiewise.boundary.load_sharded(folder / "sharded", loaded)
        tiewise.boundary.export_sharded(folder / "sharded", folder / "exported")
        files = sorted(path.name for path in (folder / "exported").iterdir())
        return {
            "loss": out.loss.item(),
            "probe": vars(probed),
            "said": repr(probed),
            "notes": notes,
            "files": files,
            "installed": repr(tiewise.installed(loaded)),
        }


def schedules():
    """Return the callbacks that tie and untie, and the messages of wrong ones."""
    import tiewise

    result = {
        "tie_at": type(tiewise.boundary.tie_at(3)).__name__,
        "untie_at": type(tiewise.boundary.untie_at(3)).__name__,
    }
    result["keep"] = _message(lambda: tiewise.boundary.tie_at(3, keep="both"))
    result["step"] = _message(lambda: tiewise.boundary.tie_at(0))
    result["state"] = _message(lambda: tiewise.boundary.untie_at(3, state="nobody"))
    return result


def products():
    """Return a loss under the portable products."""
    import tiewise

    with tiewise.boundary.fast_products("default"):
        return tiewise.linear_cross_entropy(_numbers(N, E), _numbers(V, E, seed=1), _tokens()).item()


def plans():
    """Return the plan of sizes given in Python."""
    import tiewise

    return tiewise.plan(tiewise.lab.Sizes(vocab=1000, width=64, layers=2, heads=4), ["tied", "factored:16"]).record()


def lab():
    """Return tokens of `hot_vocabulary`, and rows of `public_models`."""
    import tiewise

    hot = tiewise.lab.hot_vocabulary("synthetic:words=20000", tokenizer="bytes", size=40).record()
    rows = tiewise.lab.public_models("gpt2", tied=True, sort="size")
    return {"hot": {**hot, "coverage": hot["coverage"]["value"]}, "models": [row.name for row in rows]}


def names():
    """Return all public names."""
    from importlib import import_module

    kinds = {}
    for namespace in ("tiewise", "tiewise.checkpoint", "tiewise.boundary", "tiewise.lab"):
        package = import_module(namespace)
        names_of_package = [name for name in dir(package) if not name.startswith("_")]
        kinds[namespace] = {name: type(getattr(package, name)).__name__ for name in names_of_package}
    return kinds


def without_descriptions(value):
    """Return a JSON value without its descriptions: prose for the reader of a schema, which no program compares."""
    if isinstance(value, list):
        return [without_descriptions(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: without_descriptions(item)
        for key, item in value.items()
        if not (key == "description" and isinstance(item, str))
    }


def packaged_files():
    """Return a digest of each data file of the package by its name; the order of JSON's entries counts.

    The descriptions in JSON schemas do not count: they are docstrings of the code.
    """
    digests = {}
    for path in sorted(Path(str(files("tiewise"))).rglob("*")):
        if path.suffix in (".json", ".yaml", ".csv", ".md"):
            content = path.read_text(encoding="utf-8")
            if path.suffix == ".json":
                value = json.loads(content)
                compared = without_descriptions(value) if path.parent.name == "schemas" else value
                content = json.dumps(compared)
            digests[path.name] = hashlib.sha256(content.encode()).hexdigest()[:16]
    return digests


FUNCTIONS = {
    "losses": losses,
    "loss_refusals": loss_refusals,
    "other_losses": other_losses,
    "two_paths": two_paths,
    "exact_top": exact_top,
    "boundaries": boundaries,
    "specs": specs,
    "installs": installs,
    "sharings": sharings,
    "settings_of_adapters": settings_of_adapters,
    "saved_models": saved_models,
    "schedules": schedules,
    "lab": lab,
    "products": products,
    "plans": plans,
    "names": names,
    "packaged_files": packaged_files,
}
TOLERANCES = dict.fromkeys(FUNCTIONS, "exact") | dict.fromkeys(
    ("loss_refusals", "specs", "schedules", "names", "packaged_files"), "words"
)
SLOW = ()
