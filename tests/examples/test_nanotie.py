"""Compare nanotie with autograd of the plain formula in fp64, and the library with nanotie.

An oracle that shared a mistake with the library would prove nothing. So the first tests compare nanotie with the plain
formula: explicit matrices, all logits, one leaf for each table. The other tests compare the library with nanotie.

Tolerances are relative to the norm of the compared tensor. In fp64 rounding is 1e-16, so 1e-10 leaves no room for
another formula. In fp32 1e-6 is some sixteen units in the last place: as near as two orders of summation come.
"""

import ast
import copy
import inspect
import math
import re
import runpy
import sys
from importlib import import_module

import nanotie
import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
import transformers

import tiewise
from tiewise.boundary.ops.path_gradient import PathRecord, path_norms
from tiewise.core.spec import KINDS as KINDS_OF_LIBRARY
from tiewise.planning.first_loss import predicted_nll
from tiewise.training.results import paired

V, D, N = 41, 12, 30
SPECS = ["untied", "tied", "factored:5", "projected:20", "projected", "residual:3"]
KINDS = [*SPECS[:4], SPECS[5]]  # one of each kind
BATCHES = ["plain", "some ignored", "one token", "all ignored"]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}


def assert_near(got, true, tolerance):
    """Compare by norm; a true zero requires an exact zero."""
    assert got.shape == true.shape
    assert (got - true).norm().item() <= tolerance * true.norm().item()


def make_batch(name):
    """Ids repeat, since 30 are drawn of 41; "one token" is the extreme."""
    g = torch.Generator().manual_seed(3)
    ids, targets = torch.randint(0, V, (2, 3, N // 3), generator=g)
    if name == "one token":
        ids = torch.full_like(ids, 7)
    if name == "some ignored":
        targets[torch.rand(targets.shape, generator=g) < 0.4] = nanotie.IGNORED
    if name == "all ignored":
        targets = torch.full_like(targets, nanotie.IGNORED)
    return ids, targets


def make_boundary(spec, dtype=torch.float64):
    """Return a boundary with every parameter away from its start: a residual's P starts at zero, which hides Q."""
    torch.manual_seed(0)
    boundary = nanotie.Boundary(spec, V, D).to(dtype)
    with torch.no_grad():
        for parameter in boundary.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return boundary


class Body(torch.nn.Module):
    """Mixes positions, and keeps its hidden states and their gradient."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        weight = torch.randn(D, D, generator=torch.Generator().manual_seed(1)) / D**0.5
        self.weight = torch.nn.Parameter(weight.to(dtype))
        self.hidden = None

    def forward(self, x):
        self.hidden = torch.tanh(x.cumsum(1) @ self.weight)
        self.hidden.retain_grad()
        return self.hidden


def naive_step(boundary, ids, targets):
    """Return loss, gradients and body by plain autograd: [N, V] logits, matrices as the docs print them."""
    state = {name: value.detach().clone().requires_grad_() for name, value in boundary.state_dict().items()}
    eye, body = torch.eye(D, dtype=torch.float64), Body()
    in_matrix = state["in_map.weight"].T if "in_map.weight" in state else eye
    out_matrix = state["out_map.weight"].T if "out_map.weight" in state else eye
    if "out_map.p" in state:
        out_matrix = eye + 0.03 * (state["out_map.p"] @ state["out_map.q"]).T
    logits = body(state["table_in"][ids] @ in_matrix) @ out_matrix @ state["table_out"].T
    log_probabilities = torch.log(torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True))
    counted = targets != nanotie.IGNORED
    picked = log_probabilities.gather(-1, targets.where(counted, 0)[..., None])[..., 0]
    loss = -(picked * counted).sum() / max(1, int(counted.sum()))
    loss.backward()
    return loss.detach(), {name: value.grad for name, value in state.items()}, body


def step(boundary, ids, targets, dtype=torch.float64, **options):
    body = Body(dtype)
    loss = boundary(ids, body, targets, **options)
    loss.backward()
    return loss.detach(), body


# --- nanotie against the naive formula


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("spec", SPECS)
def test_nanotie_matches_naive_formula(spec, name, monkeypatch):
    monkeypatch.setattr(nanotie, "LOGITS_AT_ONCE", 7 * V)  # chunks of 7, 7, 7, 7 and 2 tokens
    ids, targets = make_batch(name)
    boundary = make_boundary(spec)
    true_loss, true, true_body = naive_step(boundary, ids, targets)
    boundary.record = []
    loss, body = step(boundary, ids, targets)
    assert_near(loss, true_loss, 1e-12)
    assert_near(body.weight.grad, true_body.weight.grad, 1e-12)
    assert_near(body.hidden.grad, true_body.hidden.grad, 1e-12)
    by_lookup, by_head = true.pop("table_in"), true.pop("table_out")
    if boundary.tied:
        assert_near(boundary.table_in.grad, by_lookup + by_head, 1e-12)
    else:
        assert_near(boundary.table_in.grad, by_lookup, 1e-12)
        assert_near(boundary.table_out.grad, by_head, 1e-12)
    for key, gradient in true.items():
        assert_near(boundary.get_parameter(key).grad, gradient, 1e-12)
    norms = nanotie.path_norms(boundary)
    cosine = F.cosine_similarity(by_lookup.flatten(), by_head.flatten(), 0).item() if boundary.tied else math.nan
    total = (by_lookup + by_head).norm() if boundary.tied else torch.hypot(by_lookup.norm(), by_head.norm())
    expected = (by_lookup.norm().item(), by_head.norm().item(), total.item())
    assert (norms.lookup, norms.head, norms.total) == pytest.approx(expected, rel=1e-12)
    if name != "all ignored":
        assert norms.cosine == pytest.approx(cosine, rel=1e-9, nan_ok=True)
    else:
        assert expected == (0, 0, 0)


@pytest.mark.parametrize("chunk", [1, 7, 29, 30, 1000])
def test_loss_is_independent_of_chunk_and_leaves_inputs_unchanged(chunk):
    torch.manual_seed(0)
    hidden, table = torch.randn(N, D, dtype=torch.float64), torch.randn(V, D, dtype=torch.float64)
    targets = torch.randint(0, V, (N,))
    targets[::4] = nanotie.IGNORED
    leaves = [x.clone().requires_grad_() for x in (hidden, table)]
    true = torch.autograd.grad(F.cross_entropy(leaves[0] @ leaves[1].T, targets), leaves)
    given = [x.clone().requires_grad_() for x in (hidden, table)]
    before = [x._version for x in (*given, targets)]
    loss = nanotie.linear_cross_entropy(*given, targets, chunk)
    (loss * 3).backward()  # an upstream gradient other than one
    for got, value in zip(given, true, strict=True):
        assert_near(got.grad, 3 * value, 1e-12)
    assert [x._version for x in (*given, targets)] == before
    torch.testing.assert_close([x.detach() for x in given], [hidden, table], rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="already differentiated"):
        nanotie.FusedCrossEntropy.backward(loss.grad_fn, torch.ones(()))


def test_detached_path_leaves_gradient_of_the_other_path():
    ids, targets = make_batch("plain")
    boundary = make_boundary("tied")
    _, true, _ = naive_step(boundary, ids, targets)
    for cut in ("lookup", "head"):
        boundary.zero_grad()
        rows, table = nanotie.tied_lookup(boundary.table_in, ids)
        hidden = Body()(rows.detach() if cut == "lookup" else rows)
        nanotie.linear_cross_entropy(hidden, table.detach() if cut == "head" else table, targets).backward()
        assert_near(boundary.table_in.grad, true["table_out" if cut == "lookup" else "table_in"], 1e-12)


def test_bf16_loss_and_gradients_accumulate_in_fp32():
    """Loss and gradients are at most as far from fp64 as those of plain bf16, and the loss is fp32's."""
    torch.manual_seed(0)
    hidden, table = torch.randn(4000, 16).bfloat16(), (torch.randn(V, 16) / 4).bfloat16()
    targets = torch.randint(0, V, (4000,))

    def results(dtype, loss_of):
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, table)]
        loss = loss_of(*leaves)
        gradients = torch.autograd.grad(loss, leaves)
        assert [gradient.dtype for gradient in gradients] == [dtype, dtype]
        return [x.detach().double() for x in (loss, *gradients)]

    def plain(hidden, table):
        return F.cross_entropy(hidden @ table.T, targets)

    def chunked(hidden, table):
        return nanotie.linear_cross_entropy(hidden, table, targets, chunk=64)

    true = results(torch.float64, plain)
    ours, naive_ones = (
        [(x - y).norm().item() for x, y in zip(results(torch.bfloat16, of), true, strict=True)]
        for of in (chunked, plain)
    )
    assert ours[0] < 1e-5
    assert all(a <= b for a, b in zip(ours, naive_ones, strict=True))


def test_tied_gradient_reuses_buffer_of_loss():
    """The buffer of the loss becomes `.grad` without another [V, E] tensor."""
    ids, targets = make_batch("plain")
    boundary = make_boundary("tied")
    rows, table = nanotie.tied_lookup(boundary.table_in, ids)
    loss = nanotie.linear_cross_entropy(Body()(rows), table, targets)
    buffer = loss.grad_fn.gradients[1].data_ptr()
    loss.backward()
    assert boundary.table_in.grad.data_ptr() == buffer


# --- the library against nanotie


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("spec", SPECS)
def test_library_matches_nanotie(spec, name, dtype):
    ids, targets = make_batch(name)
    oracle = make_boundary(spec, dtype)
    library = tiewise.Boundary(spec, V, D).to(dtype)
    library.load_state_dict(oracle.state_dict())  # the same names, or this raises
    oracle.record, library.record = [], PathRecord()
    true_loss, true_body = step(oracle, ids, targets, dtype)
    loss, body = step(library, ids, targets, dtype, chunk=11)  # 11, 11 and 8 tokens
    tolerance = TOLERANCE[dtype]
    assert_near(loss, true_loss, tolerance)
    assert_near(body.hidden.grad, true_body.hidden.grad, tolerance)
    assert_near(body.weight.grad, true_body.weight.grad, tolerance)
    assert [key for key, _ in library.named_parameters()] == [key for key, _ in oracle.named_parameters()]
    for key, parameter in library.named_parameters():
        assert_near(parameter.grad, oracle.get_parameter(key).grad, tolerance)
    torch.testing.assert_close(library.embed(ids), oracle.embed(ids), rtol=tolerance, atol=tolerance)
    hidden = body.hidden.detach()
    torch.testing.assert_close(library.logits(hidden), oracle.logits(hidden), rtol=10 * tolerance, atol=10 * tolerance)
    if library.tied:
        got, true = path_norms(library.table_in.grad, library.record), nanotie.path_norms(oracle)
        expected = (true.lookup, true.head, true.total)
        assert (got.a, got.b, got.total) == pytest.approx(expected, rel=1e-6)
        assert got.cosine == pytest.approx(true.cosine, rel=1e-6, abs=1e-6, nan_ok=True)
    library.record = None  # recording sums repeated tokens before they are added
    library.zero_grad()
    step(library, ids, targets, dtype)
    assert_near(library.table_in.grad, oracle.table_in.grad, tolerance)


@pytest.mark.parametrize("spec", SPECS)
def test_library_and_nanotie_initialise_with_equal_scale(spec):
    torch.manual_seed(5)
    oracle = nanotie.Boundary(spec, 3000, 64)
    library = tiewise.Boundary(spec, 3000, 64)
    counts = [sum(p.numel() for p in boundary.parameters()) for boundary in (oracle, library)]
    assert counts[0] == counts[1]
    for key, parameter in library.named_parameters():
        assert oracle.get_parameter(key).std().item() == pytest.approx(parameter.std().item(), rel=0.1)


@pytest.mark.parametrize("spec", ["tied:3", "factored", "factored:65", "factored:0", "residual", "residual:x", "spam"])
def test_library_and_nanotie_refuse_the_same_specs(spec):
    with pytest.raises(ValueError, match=spec.partition(":")[0]):
        nanotie.Boundary(spec, V, 64)
    with pytest.raises(tiewise.TiewiseError):
        tiewise.Boundary(spec, V, 64)


def adamw_curve(loss_of, parameters, batches):
    """Training losses of plain AdamW, as nanotie.train takes its steps."""
    optimizer = torch.optim.AdamW(parameters, lr=nanotie.LEARNING_RATE)
    losses = []
    for ids, targets in batches:
        loss = loss_of(ids, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def toy_batches(count, vocab, shape=(4, 12)):
    """Sums modulo a small number, with some labels ignored: something that can be learned."""
    g = torch.Generator().manual_seed(0)
    for _ in range(count):
        ids = torch.randint(0, 10, (shape[0], shape[1] + 1), generator=g).cumsum(1) % vocab
        targets = ids[:, 1:].masked_fill(ids[:, 1:] % 9 == 4, nanotie.IGNORED)
        yield ids[:, :-1], targets


def toy_curves(spec, dtype):
    """Return the training curves of nanotie and of the library's boundary from the same start."""
    oracle = nanotie.LanguageModel(spec, V, seed=1).to(dtype)
    library = nanotie.LanguageModel(spec, V, seed=1).to(dtype)
    state = library.boundary.state_dict()
    library.boundary = tiewise.Boundary(spec, V, nanotie.WIDTH).to(dtype)
    library.boundary.load_state_dict(state)
    return [adamw_curve(model, model.parameters(), toy_batches(50, V)) for model in (oracle, library)]


@pytest.mark.parametrize("spec", KINDS)
def test_library_boundary_reproduces_training_curve_of_nanotie(spec):
    true, got = toy_curves(spec, torch.float64)
    assert got == pytest.approx(true, abs=1e-9)
    assert true[-1] < true[0] - 0.2  # the model has learned


def test_library_boundary_in_fp32_is_as_near_to_fp64_as_nanotie():
    """AdamW divides by the size of a gradient, so rounding of the smallest ones moves a curve by any sum's order."""
    exact, _ = toy_curves("tied", torch.float64)
    of_nanotie, of_library = (error_of_curve(curve, exact) for curve in toy_curves("tied", torch.float32))
    assert of_library < 2 * of_nanotie


def error_of_curve(curve, exact):
    """Return the largest difference of two curves."""
    return max(abs(one - other) for one, other in zip(curve, exact, strict=True))


@pytest.mark.parametrize("spec", KINDS)
def test_installed_llama_reproduces_training_curve_of_nanotie(spec):
    """The library inside a Hugging Face model, and nanotie's boundary around the same model's body."""
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        tie_word_embeddings=spec != "untied",
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double()
    body = copy.deepcopy(model.model)
    installed = tiewise.install(model, spec)
    boundary = nanotie.Boundary(spec, V, D).double()
    with torch.no_grad():
        for table, source in zip((boundary.table_in, boundary.table_out), installed.tables(), strict=True):
            table.copy_(source)
        for key, parameter in boundary.named_parameters():
            if "map" in key:
                parameter.copy_(map_parameter(model, key))

    def by_nanotie(ids, targets):
        return boundary(ids, lambda x: body(inputs_embeds=x, use_cache=False).last_hidden_state, targets)

    def by_library(ids, targets):  # the model shifts labels by one position
        ids = torch.cat([ids, ids[:, :1]], 1)
        return model(input_ids=ids, labels=F.pad(targets, (1, 0), value=nanotie.IGNORED)).loss

    of_body = [parameter for name, parameter in body.named_parameters() if not name.startswith("embed_tokens")]
    true = adamw_curve(by_nanotie, [*of_body, *boundary.parameters()], toy_batches(50, V))
    got = adamw_curve(by_library, model.parameters(), toy_batches(50, V))
    assert got == pytest.approx(true, abs=1e-5)
    assert true[-1] < true[0] - 0.2


def map_parameter(model, key):
    """Return the parameter of an installed model's maps that a boundary calls `key`."""
    end = model.get_input_embeddings() if key.startswith("in_map") else model.get_output_embeddings()
    return end.get_parameter(key)


# --- the verdict


@pytest.mark.parametrize("n", [2, 3, 5, 12, 60])
@pytest.mark.parametrize("error_rate", [0.05, 0.0125])
def test_paired_interval_matches_scipy_and_library(n, error_rate):
    values = np.random.default_rng(n).normal(0.3, 1.0, n)
    got = nanotie.paired_interval(values.tolist(), error_rate)
    low, high = scipy.stats.t.interval(1 - error_rate, n - 1, values.mean(), scipy.stats.sem(values))
    assert (got.mean, got.low, got.high) == pytest.approx((values.mean(), low, high), rel=1e-6, abs=1e-9)
    if error_rate == 0.05:
        library = paired([0.0] * n, values.tolist())
        assert (got.mean, got.low, got.high) == pytest.approx((library.mean, library.low, library.high), rel=1e-6)


def make_runs(differences, last=None, parameters=(200, 100)):
    base = [5.0, 5.2, 4.9, 5.1][: len(differences)]
    last = differences if last is None else last
    paths = nanotie.PathNorms(1.0, 3.0, 3.2, 0.1)

    def run(count, best, final):
        return nanotie.Run(count, [6.0], 10, best, best, final, paths, 0.0)

    return {
        "untied": [run(parameters[0], b, b) for b in base],
        "tied": [run(parameters[1], b + d, b + e) for b, d, e in zip(base, differences, last, strict=True)],
    }


def test_verdict_names_winner_with_its_interval():
    won = nanotie.verdict(make_runs([-0.1, -0.12, -0.11, -0.09]), "tied")
    assert won.startswith("tied wins on this text: its held-out loss is 0.105 nats/token lower than that of untied")
    assert "95 % interval 0.084 to 0.126, 4 seeds" in won
    assert "with 50 % fewer parameters" in won
    lost = nanotie.verdict(make_runs([0.1, 0.12, 0.11, 0.09]), "tied")
    assert lost.startswith("untied wins on this text")
    assert "with 100 % more parameters" in lost


def test_verdict_is_undecided_if_interval_contains_zero():
    verdict = nanotie.verdict(make_runs([-0.1, 0.12, 0.01, -0.03]), "tied")
    half = scipy.stats.t.ppf(0.975, 3) * scipy.stats.sem([-0.1, 0.12, 0.01, -0.03])
    assert verdict.startswith("Undecided: the 95 % interval of tied - untied")
    assert 'not "no difference"' in verdict
    assert f"likely to miss an effect of less than {half:.3f} nats/token" in verdict


def test_verdict_ignores_overfitting_after_best_step():
    runs = make_runs([0.01, -0.01, 0.02, -0.02], last=[-0.5, -0.52, -0.51, -0.49])
    assert nanotie.difference(runs, "tied", "last_loss").high < 0
    assert nanotie.verdict(runs, "tied").startswith("Undecided")


def test_difference_divides_error_rate_between_arms():
    runs = make_runs([-0.1, -0.12, -0.11, -0.09])
    alone = nanotie.difference(runs, "tied", "best_loss")
    runs["other"] = runs["untied"]
    shared = nanotie.difference(runs, "tied", "best_loss")
    ratio = scipy.stats.t.ppf(1 - 0.0125, 3) / scipy.stats.t.ppf(0.975, 3)
    assert shared.high - shared.low == pytest.approx(ratio * (alone.high - alone.low), rel=1e-6)


# --- statements of the comments


def test_boundary_has_documented_parameter_counts_and_one_tied_table():
    tied = nanotie.Boundary("tied", V, D)
    assert tied.table_out is tied.table_in
    assert [name for name, _ in tied.named_parameters()] == ["table_in"]
    counts = {"untied": 2 * V * D, "tied": V * D, "factored:5": V * 5 + 2 * 5 * D}
    counts |= {"projected:20": V * 20 + 2 * 20 * D, "projected": V * D + D * D, "residual:3": V * D + 2 * 3 * D}
    for spec, count in counts.items():
        assert sum(p.numel() for p in nanotie.Boundary(spec, V, D).parameters()) == count
    text = inspect.getsource(nanotie)
    for spec, size in re.findall(r"^#     (\w+)(?::\w)? .*?([\d.]+) million", text, re.M):
        argument = {"factored": ":128", "projected": ":300", "residual": ":32"}.get(spec, "")
        with torch.device("meta"):
            boundary = tiewise.Boundary(spec + argument, 50_257, 768)
        assert f"{sum(p.numel() for p in boundary.parameters()) / 1e6:.1f}" == size


def test_the_first_loss_is_near_ln_v():
    model = nanotie.LanguageModel("untied", 2000, seed=0)
    ids, targets = torch.randint(0, 2000, (2, 16, 64), generator=torch.Generator().manual_seed(0))
    first = model(ids, targets).item()
    assert first == pytest.approx(math.log(2000) + 0.5, abs=0.1)
    assert first == pytest.approx(predicted_nll(2000, 1.0), abs=0.1)


def test_a_tied_direct_path_is_symmetric():
    torch.manual_seed(0)
    ids = torch.arange(200)
    asymmetries = {
        spec: nanotie.asymmetry(nanotie.Boundary(spec, 500, 64), ids) for spec in ("tied", "untied", "factored:16")
    }
    assert asymmetries["tied"] < 1e-6
    assert asymmetries["untied"] == pytest.approx(2**0.5, rel=0.05)
    assert asymmetries["factored:16"] > 0.5
    boundary = nanotie.Boundary("untied", 500, 64)
    product = boundary.table_in[ids] @ boundary.table_out[ids].T
    true = (product - product.T).norm() / product.norm()
    assert nanotie.asymmetry(boundary, ids) == pytest.approx(true.item(), rel=1e-5)


def test_arms_of_one_seed_share_body_and_batches():
    bodies = [nanotie.LanguageModel(spec, V, seed=2).body.state_dict() for spec in KINDS]
    for body in bodies[1:]:
        torch.testing.assert_close(body, bodies[0], rtol=0, atol=0)
    other = nanotie.LanguageModel("tied", V, seed=3).body.positions
    assert not torch.equal(other, bodies[0]["positions"])
    tables = [nanotie.LanguageModel("tied", V, seed).boundary.table_in for seed in (2, 3)]
    assert not torch.equal(*tables)
    tokens = torch.arange(5000)
    first, again, another = (nanotie.batches(tokens, seed, 3) for seed in (1, 1, 2))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first[0][0], another[0][0])


# --- the text and the command


def make_text(paragraphs=300):
    rng = np.random.default_rng(0)
    return "\n\n".join(" ".join(f"w{i}" for i in rng.integers(0, 40, 12)) for _ in range(paragraphs))


def test_make_corpus_drops_repeats_and_numbers_words_by_training_text():
    text = make_text() + "\n\nlast only_heldout " + "end " * 60
    corpus = nanotie.make_corpus(text + "\n\n" + text)
    once = nanotie.make_corpus(text)
    assert len(corpus.train) == len(once.train)  # a paragraph counts once
    total = sum(map(len, (corpus.train, corpus.tuning, corpus.heldout)))
    assert len(corpus.train) == total * 90 // 100
    assert len(corpus.heldout) == pytest.approx(total / 20, abs=1)
    assert corpus.vocab == 42  # 40 words, the line break and "unknown"
    assert corpus.heldout[-60:].unique().tolist() == [nanotie.UNKNOWN]
    ids, targets = nanotie.windows(corpus.heldout, torch.tensor([len(corpus.heldout) - nanotie.LENGTH - 1]))
    assert targets[0, -1] == nanotie.IGNORED  # unknown words are read, never predicted
    assert torch.equal(ids[0, 1:].where(ids[0, 1:] != nanotie.UNKNOWN, nanotie.IGNORED), targets[0, :-1])


def test_the_command_prints_its_verdict_first(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(make_text())
    arms = ["untied", "tied", "factored:8", "projected:20", "residual:4"]
    nanotie.main([str(text), "--arms", ",".join(arms), "--seeds", "2", "--steps", "2"])
    printed = capsys.readouterr().out
    assert re.match(r"Undecided: the 95 % interval|\w+ wins on this text", printed)
    rows = re.findall(r"^ *(\S+) +([\d,]+) +[\d.]+ ", printed, re.M)
    body = sum(p.numel() for p in nanotie.Decoder().parameters())
    with torch.device("meta"):
        sizes = {arm: sum(p.numel() for p in tiewise.Boundary(arm, 42, nanotie.WIDTH).parameters()) for arm in arms}
    assert rows == [(arm, f"{body + size:,}") for arm, size in sizes.items()]
    assert re.findall(r"^(\S+) - untied: ", printed, re.M) == arms[1:]
    assert f"a uniform guess has {math.log(42):.3f}." in printed


@pytest.mark.parametrize("steps", [1, 2, 10, 11, 20])
def test_train_accepts_any_number_of_steps(steps):
    """The schedule of the learning rate must not divide by zero for few steps, and ends above zero."""
    run = nanotie.train("tied", nanotie.make_corpus(make_text()), seed=0, steps=steps)
    assert len(run.curve) == steps
    assert math.isfinite(run.last_loss)
    assert steps < 10 or run.last_loss < run.curve[0]


def test_path_norms_need_a_record():
    boundary = nanotie.Boundary("tied", V, D)
    boundary(torch.arange(5)[None], torch.nn.Identity(), torch.arange(5)[None]).backward()
    with pytest.raises(ValueError, match=r"record = \[\]"):
        nanotie.path_norms(boundary)


def test_loss_scale_reaches_gradient_before_fp16_rounding():
    """A loss scaler needs this: without the scale each gradient is below the smallest number of fp16."""
    hidden = torch.full((4096, 2), 1e-3, dtype=torch.float16, requires_grad=True)
    table = torch.full((4096, 2), 1e-3, dtype=torch.float16)
    table[1::2] = 2e-3
    loss = nanotie.linear_cross_entropy(hidden, table, torch.arange(4096))
    (2.0**16 * loss).backward()
    rows = table.double()
    true = (2.0**16 / 4096) * (rows.mean(0) - rows)  # the softmax of these logits is uniform to 1e-8
    assert (true / 2.0**16).abs().max() < 2**-24 * 4
    torch.testing.assert_close(hidden.grad.double(), true, rtol=2e-3, atol=0)


def test_train_records_best_step(monkeypatch):
    corpus = nanotie.make_corpus(make_text())
    monkeypatch.setattr(nanotie, "loss_on", lambda tokens, model: next(losses))
    losses = iter([5.0, 5.5, 3.0, 3.5, 4.0, 3.2])  # tuning and held-out losses at steps 0, 1 and 2
    run = nanotie.train("tied", corpus, seed=0, steps=2)
    assert (run.best_step, run.best_loss, run.last_loss) == (1, 3.5, 3.2)
    assert len(run.curve) == 2
    assert run.paths.head > run.paths.lookup > 0


WRONG = {
    "--seeds 1": "2 seeds",
    "--steps 0": "1 step",
    "--steps many": "invalid int value",
    "--arms tied": "two different arms",
    "--arms tied,tied": "two different arms",
    "--arms tied,spam": "unknown boundary 'spam'",
    "--arms tied,factored:65": "wider than the body",
    "missing.txt": "No such file",
    "short.txt": "the text has only 2 words",
    "binary.txt": "utf-8",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_main_refuses_wrong_argument_with_one_line(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("two words")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SystemExit) as ended:
        nanotie.main(arguments.split())
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert WRONG[arguments] in printed.err


def test_interrupted_script_exits_130(monkeypatch, type_command):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.optim, "AdamW", interrupted)
    type_command("nanotie.py", "--steps", 1)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(nanotie.__file__, run_name="__main__")
    assert ended.value.code == 130


def test_nanotie_has_at_most_600_lines_and_imports_only_torch():
    source = inspect.getsource(nanotie)
    assert source.count("\n") <= 600
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"torch"}


def test_counterparts_named_in_nanotie_docstring_exist():
    named = set(re.findall(r"tiewise(?:\.\w+)+", nanotie.__doc__))
    assert len(named) >= 9
    for name in named:
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(module), attribute), name
    assert set(nanotie.KINDS) < set(KINDS_OF_LIBRARY)
