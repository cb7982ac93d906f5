"""Tests of decoders without layers against the irreversibility of a Markov chain in the text."""

import numpy as np
import pytest
import scipy.stats
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM

import tiewise
from tiewise.core.errors import RunError
from tiewise.training.data.corpus import load_prepared
from tiewise.training.folder import DATA
from tiewise.training.results import gaps
from tiewise.training.settings import Settings

V, LENGTH = 10, 64


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("arm", ["tied", "untied", "factored:8"])
def test_decoder_without_layers_trains_and_loads(trained, tiny_settings, tmp_path, family, arm):
    found = trained(tiny_settings(model=family, layers=0, steps=15), tmp_path, arm)
    assert found.result.heldout_nll < found.result.initial_nll
    if arm != "factored:8":
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "final").eval()
        logits = again(torch.arange(12)[None]).logits[0]
        assert again.config.num_hidden_layers == 0
        if family == "llama":  # without layers, no position reads another
            torch.testing.assert_close(again(torch.tensor([[5]])).logits[0, 0], logits[5])


@pytest.mark.parametrize("changes", [{"kind": "recurrent", "model": "lstm"}, {"kind": "albert"}, {"backend": "flax"}])
def test_other_kinds_refuse_zero_layers(changes):
    with pytest.raises(RunError, match="layers = 0; use 1 or more"):
        Settings(**changes, layers=0).checked()
    with pytest.raises(RunError, match="layers = -1; use 0 or more"):
        Settings(layers=-1).checked()


def transition_matrix(bend):
    """Return the transition matrix of a ring of V words.

    P[i, j] = s(d) (1 + bend·sin θ), θ = 2πd/V and d = j − i. s = exp(cos θ) / Z is its symmetric part. All words have
    equal frequency, so the best symmetric path is log s. Its matrix has no negative eigenvalue: W Wᵀ equals it in two
    dimensions with rows of equal norm, as a norm layer gives.
    """
    angle = 2 * np.pi * np.arange(V) / V
    row = np.exp(np.cos(angle))
    return np.stack([np.roll(row / row.sum() * (1 + bend * np.sin(angle)), i) for i in range(V)])


def write_text_and_tokenizer(folder, rows, paragraphs=100, each=5000):
    """Write a text drawn from this chain, and a tokenizer of its words."""
    draw, sums = np.random.default_rng(0), rows.cumsum(1)
    ids = [draw.integers(0, V, paragraphs)]
    for _ in range(each - 1):
        ids.append((draw.random(paragraphs)[:, None] > sums[ids[-1]]).sum(1).clip(max=V - 1))
    lines = (" ".join(f"w{i}" for i in line) for line in np.stack(ids, 1))
    (folder / "text.txt").write_text("\n\n".join(lines))
    words = {f"w{i}": i for i in range(V)} | {"<eos>": V}
    made = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))


@pytest.mark.slow
@pytest.mark.parametrize("bend", [0.0, 0.8])
def test_tying_gap_matches_irreversibility_of_markov_chain(tmp_path, bend):
    rows = transition_matrix(bend)
    write_text_and_tokenizer(tmp_path, rows)
    text, tokenizer = str(tmp_path / "text.txt"), str(tmp_path / "tokenizer.json")
    found = tiewise.compare(
        text, out=tmp_path / "run", tokenizer=tokenizer, arms=["tied", "untied"], layers=0, width=16, heads=1,
        length=LENGTH, batch=64, steps=300, learning_rate=0.02, weight_decay=0.0, jobs=1, quiet=True,
        select="last",  # the learning rate ends at zero there, so that seeds agree best
    )  # fmt: skip
    # evaluate both true paths on the held-out pairs, because the value for the chain lacks their sampling noise
    data = load_prepared(tmp_path / "run" / DATA)
    ids = np.asarray(data.split("heldout")).astype(int)
    blocks = ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)
    before, after = blocks[:, :-1].ravel(), blocks[:, 1:].ravel()
    words = (before < V) & (after < V)
    before, after = before[words], after[words]
    planted = np.log(2 * rows[before, after] / (rows[before, after] + rows[after, before])).mean()
    # loss of the untied path from learning V(V − 1)/2 more probabilities from one finite text, equal for all seeds
    learnt = scipy.stats.chi2.ppf(0.95, V * (V - 1) // 2) / (2 * len(data.split("train")))
    gap = gaps(found)[1]
    assert learnt < 1e-4
    half = scipy.stats.t.ppf(0.975, gap.n - 1) * gap.seed_error  # over seeds: the truth is that of the held-out pairs
    assert 2 * half < 2e-3
    assert gap.mean - half < planted < gap.mean + half + learnt
    irreversibility = (rows / V * np.log(2 * rows / (rows + rows.T))).sum()
    assert planted == pytest.approx(irreversibility, abs=0.01)
    assert irreversibility == pytest.approx(0.1572 if bend else 0.0, abs=1e-3)
