"""Factoring and sharing: singular values, shared layers, a cell and pairs, each held against a counting of its own."""

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


def test_singular_values_and_the_table_of_rank_k_are_those_of_numpy(page):
    asked = [[rank, noise, seed] for rank in (1, 4, 16) for noise in (0, 0.3, 2) for seed in (1, 2)]
    found = page.evaluate(
        """(asked) => asked.map((of) => { const table = noisyTable(...of), parts = singular(table);
        const energy = [1, 3, 16].map((k) => energyKept(parts.values, k));
        return { table, values: parts.values, near: keptBy(parts, 3), energy }; })""",
        asked,
    )
    for (rank, noise, _), shown in zip(asked, found, strict=True):
        table = np.array(shown["table"])
        u, values, v = np.linalg.svd(table, full_matrices=False)
        assert np.allclose(shown["values"], values, rtol=0, atol=1e-12 * values[0])
        assert np.allclose(shown["near"], (u[:, :3] * values[:3]) @ v[:3], atol=1e-9)
        assert np.allclose(shown["energy"], [sum(values[:k] ** 2) / sum(values**2) for k in (1, 3, 16)], atol=1e-12)
        assert noise or np.linalg.matrix_rank(table) == rank


def test_noise_fills_the_spectrum_and_rank_costs_what_it_says(page):
    text = page.locator(".finding").first
    page.get_by_role("spinbutton", name="Noise").fill("0")
    assert "Rank 4 keeps 100.0 % of this table in 256 numbers" in text.inner_text()
    page.get_by_role("spinbutton", name="Rank k").fill("12")
    assert "768 numbers" in text.inner_text()
    assert "no saving" in text.inner_text()
    assert "spectrum=4,0,12,1" in page.url


def test_the_layers_hold_what_a_plan_counts_and_groups_are_those_of_the_library(page):
    asked = [{"L": L, "g": g} for L in range(1, 25) for g in range(1, L + 1)]
    groups = "(asked) => asked.map(({ L, g }) => Array.from({ length: L }, (_, i) => groupOf(i, L, g)))"
    wanted = [[SharingSpec("all", o["g"]).group_of(i, o["L"]) for i in range(o["L"])] for o in asked]
    assert page.evaluate(groups, asked) == wanted
    held = page.evaluate(
        """(asked) => asked.map((at) => ["none", "attention", "ffn", "all"].map((kind) =>
        layersHold("bert-base-uncased", { ...preset("bert-base-uncased").sizes, k: 1, ...at }, kind)))""",
        asked,
    )
    for sizes, counts in zip(asked[:60], held, strict=False):
        config = config_like("bert-base-uncased", layers=sizes["L"])
        shares = [SharingSpec(kind, sizes["g"] if kind != "none" else 1) for kind in KINDS]
        for choice, count in zip(plan(config, ("tied",), shares).choices, counts, strict=False):
            assert sum(choice["parameters"][part] for part in ("attention", "ffn", "norms")) == count


def test_four_strategies_are_drawn_with_the_published_counts(page):
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
def test_a_cell_holds_what_the_library_builds_of_it(page):
    torch, models = pytest.importorskip("torch"), pytest.importorskip("tiewise.models")
    import tiewise

    def built(V, E, H, ends):
        plain = E == H and ends == "one"
        sizes = {"vocab_size": V, "hidden_size": H, "embedding_size": E, "num_hidden_layers": 1, "output_bias": True}
        model = models.RNNLM(models.RNNConfig(cell="tanh", lstm_bias="one", input_matrix=not plain, **sizes))
        if ends == "one" and not plain:
            tiewise.install(model, f"projected:{E},in=none,out=linear")
        elif ends == "one":
            tiewise.install(model, "tied")
        return sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())

    asked = [[V, E, H, ends] for V in (50, 1000) for E, H in ((8, 8), (8, 20), (20, 8)) for ends in ("one", "two")]
    found = page.evaluate("(asked) => asked.map((of) => partsTotal(cellParts(...of)))", asked)
    with torch.device("cpu"):
        assert found == [built(*of) for of in asked]
    assert page.evaluate("partsTotal(cellParts(1, 200, 200, 'one')) - 200 - 1") == 40_200


def sentences(text):
    """The library's own, with bytes as tokens."""
    pieces = (*(bytes([i]) for i in range(256)), b"")
    letters = np.array([bool(p) and (p.isalnum() or p[0] > 127) for p in pieces])
    vocabulary = Vocabulary(pieces, letters, letters, np.arange(257), ())
    found = find_sentences(np.frombuffer(text.encode(), np.uint8).astype(np.int64), vocabulary, 256)
    return [bytes(found.between(i, i + 1).tolist()).decode() for i in range(len(found))]


def test_sentences_are_those_of_the_library(page):
    draw = random.Random(5)
    bits = ["Mr. ", "I. ", "J. ", "e.g. ", "Wait… ", "Yes! ", "“No?” ", "it's ", "End.) ", "dr.", "a", "B ", "\n"]
    bits += ["\n \n", "  ", "\t", ". ", "é ", "3. ", "?!", "…", "st. ", "x.\n\nY"]
    texts = ["".join(draw.choices(bits, k=draw.randint(1, 40))) for _ in range(400)]
    found = page.evaluate("(texts) => texts.map(sentencesOf)", texts)
    for text, shown in zip(texts, found, strict=True):
        assert shown == sentences(text), json.dumps(text)


def test_pairs_are_swapped_within_a_document_or_lent_by_another_and_fit(page):
    docs = [[f"{name}{i} " * (1 + i % 7) + "end." for i in range(9)] for name in ("a", "b", "c")]
    for room in (6, 20, 64):
        made = page.evaluate(
            "([docs, room]) => [1, 2, 3, 4].flatMap((seed) => pairsOf(docs, room, seed))", [docs, room]
        )
        assert len(made) >= 12
        for pair in made:
            a, b = pair["a"].split(), pair["b"].split()
            owner, lent = ({w[0] for w in words if w != "end."} for words in (a + b, pair["stranger"]["b"].split()))
            assert 2 <= len(a) + len(b) <= room
            assert len(owner) == 1 or not owner
            assert not owner & lent
            if len(a) + len(b) < room:  # untorn: whole sentences in order
                whole = next((d for d in docs if d[0][0] in owner), docs[0])
                assert " ".join(a + b) in " ".join(" ".join(whole).split())


def test_a_reader_pastes_a_text_and_sees_both_questions(page):
    box = page.get_by_label("Your text")
    box.fill("One came. Two went.")
    shown = page.locator("#factoring").inner_text()
    assert "1 document, 2 sentences, 1 pair" in shown
    assert "No second document lends a B" in shown
    box.fill("One came. Two went.\n---\n<b>Far</b> away. It rained.")
    assert "2 documents, 4 sentences, 2 pairs" in page.locator("#factoring").inner_text()
    box.fill("Only one.")
    assert "No document here has two sentences" in page.locator("#factoring").inner_text()
