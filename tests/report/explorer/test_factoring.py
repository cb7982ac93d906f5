"""Test the factoring page against numpy, `plan`, built models and the library's sentence splitter."""

import json
import random

import numpy as np
import pytest

from tiewise.core.sharing_spec import KINDS, SharingSpec
from tiewise.planning.plan import plan
from tiewise.planning.resized import config_like
from tiewise.training.data.sentence_pairs import Vocabulary, find_sentences


@pytest.fixture
def page(visit):
    return visit("at=factoring").page


def test_singular_values_and_rank_k_tables_equal_those_of_numpy(page):
    inputs = [[rank, noise, seed] for rank in (1, 4, 16) for noise in (0, 0.3, 2) for seed in (1, 2)]
    results = page.evaluate(
        """(asked) => asked.map((of) => { const table = noisyTable(...of), parts = decompose(table);
        const energy = [1, 3, 16].map((k) => energyShare(parts.values, k));
        return { table, values: parts.values, near: tableOfRank(parts, 3), energy }; })""",
        inputs,
    )
    for (rank, noise, _), shown in zip(inputs, results, strict=True):
        table = np.array(shown["table"])
        u, values, v = np.linalg.svd(table, full_matrices=False)
        assert np.allclose(shown["values"], values, rtol=0, atol=1e-12 * values[0])
        assert np.allclose(shown["near"], (u[:, :3] * values[:3]) @ v[:3], atol=1e-9)
        assert np.allclose(shown["energy"], [sum(values[:k] ** 2) / sum(values**2) for k in (1, 3, 16)], atol=1e-12)
        assert noise or np.linalg.matrix_rank(table) == rank


def test_page_reports_the_energy_kept_and_the_numbers_stored_by_rank(page):
    text = page.locator(".finding").first
    page.get_by_role("spinbutton", name="Noise").fill("0")
    assert "Rank 4 keeps 100.0 % of this table in 256 numbers" in text.inner_text()
    page.get_by_role("spinbutton", name="Rank k").fill("12")
    assert "768 numbers" in text.inner_text()
    assert "no saving" in text.inner_text()
    assert "spectrum=4,0,12,1" in page.url


def test_layer_counts_equal_those_of_plan_and_groups_those_of_sharing_spec(page):
    inputs = [{"L": L, "g": g} for L in range(1, 25) for g in range(1, L + 1)]
    groups = "(asked) => asked.map(({ L, g }) => Array.from({ length: L }, (_, i) => groupOf(i, L, g)))"
    wanted = [[SharingSpec("all", o["g"]).group_of(i, o["L"]) for i in range(o["L"])] for o in inputs]
    assert page.evaluate(groups, inputs) == wanted
    held = page.evaluate(
        """(asked) => asked.map((at) => ["none", "attention", "ffn", "all"].map((kind) =>
        layerParameters("bert-base-uncased", { ...preset("bert-base-uncased").sizes, k: 1, ...at }, kind)))""",
        inputs,
    )
    for sizes, counts in zip(inputs[:60], held, strict=False):
        config = config_like("bert-base-uncased", layers=sizes["L"])
        shares = [SharingSpec(kind, sizes["g"] if kind != "none" else 1) for kind in KINDS]
        for choice, count in zip(plan(config, ("tied",), shares).choices, counts, strict=False):
            assert sum(choice["parameters"][part] for part in ("attention", "ffn", "norms")) == count


def test_sharing_strategies_show_the_published_parameter_counts(page):
    shown = page.locator("#factoring").inner_text()
    for held in ("85,054,464", "59,051,520 in the layers, 30.6 %", "33,090,816 in the layers, 61.1 %", "7,087,872"):
        assert held in shown
    letters = """[...document.querySelectorAll('svg.boxes')].map((drawn) =>
        [...drawn.querySelectorAll('.letter')].map((text) => text.textContent).join(''))"""
    assert page.evaluate(letters) == ["", "A" * 12, "A" * 12, "A" * 24]
    page.get_by_role("spinbutton", name="Groups").fill("5")
    assert page.evaluate(letters)[1] == "AAABBCCCDDEE"
    page.get_by_role("spinbutton", name="Groups").fill("13")
    assert "13 groups of 12 layers cannot be" in page.locator("#factoring .banner").inner_text()


@pytest.mark.slow
def test_cell_counts_equal_the_parameters_of_the_built_rnn(page):
    torch, models = pytest.importorskip("torch"), pytest.importorskip("tiewise.models")
    import tiewise

    def count_built_parameters(V, E, H, ends):
        plain = E == H and ends == "one"
        sizes = {"vocab_size": V, "hidden_size": H, "embedding_size": E, "num_hidden_layers": 1, "output_bias": True}
        model = models.RNNLM(models.RNNConfig(cell="tanh", lstm_bias="one", input_matrix=not plain, **sizes))
        if ends == "one" and not plain:
            tiewise.install(model, f"projected:{E},in=none,out=linear")
        elif ends == "one":
            tiewise.install(model, "tied")
        return sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())

    inputs = [[V, E, H, ends] for V in (50, 1000) for E, H in ((8, 8), (8, 20), (20, 8)) for ends in ("one", "two")]
    totals = page.evaluate("(asked) => asked.map((of) => partsTotal(cellParts(...of)))", inputs)
    with torch.device("cpu"):
        assert totals == [count_built_parameters(*of) for of in inputs]
    assert page.evaluate("partsTotal(cellParts(1, 200, 200, 'one')) - 200 - 1") == 40_200


def library_sentences(text):
    """Split `text` with the library's function, with bytes as tokens."""
    pieces = (*(bytes([i]) for i in range(256)), b"")
    letters = np.array([bool(p) and (p.isalnum() or p[0] > 127) for p in pieces])
    vocabulary = Vocabulary(pieces, letters, letters, np.arange(257), ())
    sentences = find_sentences(np.frombuffer(text.encode(), np.uint8).astype(np.int64), vocabulary, 256)
    return [bytes(sentences.between(i, i + 1).tolist()).decode() for i in range(len(sentences))]


def test_page_splits_sentences_like_the_library(page):
    draw = random.Random(5)
    bits = ["Mr. ", "I. ", "J. ", "e.g. ", "Wait… ", "Yes! ", "“No?” ", "it's ", "End.) ", "dr.", "a", "B ", "\n"]
    bits += ["\n \n", "  ", "\t", ". ", "é ", "3. ", "?!", "…", "st. ", "x.\n\nY"]
    texts = ["".join(draw.choices(bits, k=draw.randint(1, 40))) for _ in range(400)]
    results = page.evaluate("(texts) => texts.map(sentencesOf)", texts)
    for text, shown in zip(texts, results, strict=True):
        assert shown == library_sentences(text), json.dumps(text)


def test_pairs_come_from_one_document_or_from_two_and_fit_the_length(page):
    docs = [[f"{name}{i} " * (1 + i % 7) + "end." for i in range(9)] for name in ("a", "b", "c")]
    for room in (6, 20, 64):
        pairs = page.evaluate(
            "([docs, room]) => [1, 2, 3, 4].flatMap((seed) => pairsOf(docs, room, seed))", [docs, room]
        )
        assert len(pairs) >= 12
        for pair in pairs:
            a, b = pair["a"].split(), pair["b"].split()
            owner, lent = ({w[0] for w in words if w != "end."} for words in (a + b, pair["stranger"]["b"].split()))
            assert 2 <= len(a) + len(b) <= room
            assert len(owner) == 1 or not owner
            assert not owner & lent
            if len(a) + len(b) < room:  # not truncated: whole sentences in order
                whole = next((d for d in docs if d[0][0] in owner), docs[0])
                assert " ".join(a + b) in " ".join(" ".join(whole).split())


def test_pasted_text_shows_its_sentence_pairs(page):
    box = page.get_by_label("Your text")
    box.fill("One came. Two went.")
    shown = page.locator("#factoring").inner_text()
    assert "1 document, 2 sentences, 1 pair" in shown
    assert "No second document lends a B" in shown
    box.fill("One came. Two went.\n---\n<b>Far</b> away. It rained.")
    assert "2 documents, 4 sentences, 2 pairs" in page.locator("#factoring").inner_text()
    box.fill("Only one.")
    assert "No document here has two sentences" in page.locator("#factoring").inner_text()
