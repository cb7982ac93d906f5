"""Test every number of the symmetry story against numpy, scipy and tiewise, and its use by a reader."""

import re

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import log_softmax, logsumexp, softmax
from tests.report.explorer.test_page import CONTRASTS

from tiewise.inspection.tables.bigram_counts import Chain
from tiewise.inspection.tables.bigram_paths import fit_path

WORDS = ["New", "York", "City"]
ANSWERED = {
    1: "guess-rank=level",
    2: "guess-path=dot",
    3: "guess-mirror=never",
    4: "guess-out=symmetric",
    5: "guess-softmax=different&guess-reverse=same",
}
SETTINGS = 80
# script that reads every number of a step, for each setting
READ = """settings => settings.map(setting => {
  keep(setting);
  const place = document.querySelector("#symmetry"), all = (what) => [...place.querySelectorAll(what)];
  const cells = (table) => [...table.querySelectorAll("tbody tr")].map(r => [...r.children].map(c => c.textContent));
  return {
    heat: Object.fromEntries(all("table.heat").map(t => [t.ariaLabel, cells(t).map(row => row.slice(1))])),
    bars: Object.fromEntries(all(".bars").map(b => [b.ariaLabel, [...b.children].map(r =>
      [r.firstChild.textContent, r.lastChild.textContent])])),
    list: Object.fromEntries(all(".scroll").map(l => [l.ariaLabel, cells(l)])),
    drawn: all("svg.straight:not(.journey-picture) text").map(t => t.textContent),
    said: all("figcaption").map(c => c.textContent.replace(/\\s+/g, " ")),
  };
})"""


def open_step(visit, number, **more):
    return visit(f"at=symmetry&story={number}&{ANSWERED[number]}", **more)


def page_address(page):
    """Return the current fragment of the address, after the #."""
    return page.evaluate("location.hash.slice(1)")


def assert_rounded(texts, exact, digits=2, slack=1e-9):
    """Assert that every text is its exact number rounded to `digits`."""
    array = np.array(texts, dtype=object)
    assert array.shape == np.shape(exact)
    assert all(len(text.partition(".")[2]) == digits for text in array.ravel())
    numbers = np.vectorize(lambda text: float(text.replace("−", "-").replace(",", "")))(array)
    assert (np.abs(numbers - exact) <= 0.5 * 10.0**-digits + slack).all(), (texts, exact)


def random_matrices(seed, shape=(3, 2)):
    return np.random.default_rng(seed).uniform(-2, 2, (SETTINGS, *shape)).round(3)


def settings_from(**matrices):
    """Return one setting for each index, with matrices written as in the address."""
    text = lambda matrix: ",".join(map(repr, matrix.ravel().tolist()))  # noqa: E731
    return [{name: text(of[i]) for name, of in matrices.items()} for i in range(SETTINGS)]


def test_steps_one_and_two_trace_a_word_to_the_logits_of_numpy(visit):
    tables, words = random_matrices(1), np.random.default_rng(2).integers(0, 3, SETTINGS)
    settings = [
        {**setting, "word": WORDS[word]} for setting, word in zip(settings_from(W_E=tables), words, strict=True)
    ]
    first, second = (open_step(visit, number).page.evaluate(READ, settings) for number in (1, 2))
    for table, word, one, two in zip(tables, words, first, second, strict=True):
        assert one["heat"]["One-hot"] == [[str(int(k == word)) for k in range(3)]]
        assert_rounded(one["heat"]["Table"], table)
        assert_rounded(one["heat"]["Its row"], (np.eye(3)[[word]] @ table))
        logits = table @ table.T
        assert_rounded(two["heat"]["Logits of the direct path"], logits)
        assert_rounded([row[2] for row in two["list"]["Where the framed logits come from"]], logits[word])
        drawing = two["drawn"]
        assert drawing[0] == WORDS[word]
        passing = [text for text in drawing if text.removeprefix("−").replace(".", "").isdigit()]
        assert passing[:3] == [str(int(k == word)) for k in range(3)]
        assert_rounded(passing[3:], np.concatenate([table[word], table[word], logits[word]]))


def test_step_one_ranks_words_by_their_logits(visit):
    tables, residuals = random_matrices(3), np.random.default_rng(4).integers(-40, 41, (SETTINGS, 2)) / 20
    results = open_step(visit, 1).page.evaluate(READ, settings_from(W_E=tables, residual=residuals))
    for table, residual, bars in zip(tables, residuals, (each["bars"]["Logits"] for each in results), strict=True):
        order = np.argsort(-(table @ residual), kind="stable")
        assert [name for name, _ in bars] == [WORDS[k] for k in order]
        assert_rounded([value for _, value in bars], (table @ residual)[order])


def test_steps_three_and_four_multiply_as_numpy_does(visit):
    tables, second, between = random_matrices(5), random_matrices(6), random_matrices(7, (2, 2))
    between[:20] = (between[:20] + between[:20].transpose(0, 2, 1)) / 2
    sizes = np.random.default_rng(8).integers((2, 2), (300_001, 16_385), (SETTINGS, 2))
    settings = settings_from(W_E=tables, W_U=second, M=between, sizes=sizes)
    third, fourth = (open_step(visit, number).page.evaluate(READ, settings) for number in (3, 4))
    for i, (three, four) in enumerate(zip(third, fourth, strict=True)):
        w, u, m = tables[i], second[i], between[i]
        shown = {"one table": w @ w.T, "two tables": w @ u.T, "one table and m": w @ m @ w.T}
        assert three["heat"]["Logits, one table"] == four["heat"]["Logits, one table"]
        for name, exact in shown.items():
            assert_rounded(four["heat"][f"Logits, {name}"], exact)
            pairs = four["list"][f"Logits, {name}, both orders"]
            for (label, there, sign, back), (a, b) in zip(pairs, [(0, 1), (0, 2), (1, 2)], strict=True):
                assert label == f"{WORDS[a]}, {WORDS[b]}"
                assert_rounded([there, back], [exact[a, b], exact[b, a]])
                assert sign == ("=" if there == back else "≠")
                assert sign == "=" or name != "one table"
                assert sign == "=" or name == "two tables" or i >= 20  # a symmetric M keeps the logits symmetric
        v, d = (int(size) for size in sizes[i])
        costs = [label for _, label in four["bars"]["Parameters"]]
        assert costs[0] == f"{v * d:,}"
        for label, parameters in zip(costs[1:], (d * d, 8 * d * d), strict=True):
            counted, share = label[:-3].split(" (")
            assert counted == f"{parameters:,}"
            assert_rounded([share], [100 * parameters / (v * d)], 1)


def best_tied(q):
    """Return (probabilities, loss) of the best tied path of width 2 with a bias, by scipy."""

    def loss(x):
        table = x[:6].reshape(3, 2)
        logs = log_softmax(table @ table.T + x[6:], axis=1)
        error = q.sum(1, keepdims=True) * np.exp(logs) - q
        return -(q * logs).sum(), np.concatenate([((error + error.T) @ table).ravel(), error.sum(0)])

    options = {"maxiter": 20_000, "maxcor": 50, "ftol": 0, "gtol": 1e-11}
    start = np.random.default_rng(0).normal(0, 0.5, 9)
    solution = minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
    return softmax(solution.x[:6].reshape(3, 2) @ solution.x[:6].reshape(3, 2).T + solution.x[6:], axis=1), solution.fun


def test_step_five_solves_for_the_best_tied_path_as_scipy_does(visit):
    draw, tables = np.random.default_rng(9), random_matrices(10)
    counts = np.rint(np.exp(draw.uniform(0, np.log(99), (SETTINGS, 3, 3)))).astype(int)
    counts[0], counts[1] = [[20, 30, 5], [30, 90, 15], [5, 15, 30]], [[1, 80, 19], [9, 1, 90], [80, 19, 1]]
    results = open_step(visit, 5).page.evaluate(READ, settings_from(W_E=tables, counts=counts))
    for count, table, result in zip(counts, tables, results, strict=True):
        logits = table @ table.T
        assert_rounded(result["heat"]["Logits"], logits)
        assert_rounded(result["heat"]["Chances"], softmax(logits, axis=1))
        normalisers = [part.split()[-1] for part in result["said"][1].rstrip(".").split(", ")]
        assert_rounded(normalisers, np.exp(logsumexp(logits, axis=1)))
        p = count / count.sum(1, keepdims=True)
        often = np.linalg.matrix_power(p, 1 << 14)[0]
        q = often[:, None] * p
        by_tied, loss = best_tied(q)
        chances = {"Target": p, "Best tied": by_tied, "Best untied": p, "What tied misses": p - by_tied}
        for name, exact in chances.items():
            assert_rounded(result["heat"][name], exact, slack=1e-6)
        for title, i, j in (("York after New", 0, 1), ("New after York", 1, 0)):
            names, values = zip(*result["bars"][title], strict=True)
            assert names == ("Target", "Best tied", "Best untied")
            assert_rounded(values, [p[i, j], by_tied[i, j], p[i, j]], slack=1e-6)
        entropy = -(q * np.log(p)).sum()
        mirror = (q * np.log(2 * q / (q + q.T))).sum()
        nats = [value for _, value in result["bars"]["Nats per word"]]
        assert_rounded(nats, [entropy, mirror, loss - entropy - mirror, loss, entropy], 3, 1e-6)
        trips = [[a[0, 1] * a[1, 2] * a[2, 0], a[0, 2] * a[2, 1] * a[1, 0]] for a in (p, by_tied, p)]
        assert_rounded([row[1:] for row in result["list"]["Round trips"]], trips, 4, 1e-6)
        pairs = [[1000 * often[0] * a[0, 1], 1000 * often[1] * a[1, 0]] for a in (p, by_tied, p)]
        assert_rounded([row[1:] for row in result["list"]["Pairs in the text"]], pairs, 0, 1e-3)
        there, back = result["list"]["Round trips"][1][1:]
        assert there == back
    # a reversible chain loses nothing
    assert [value for _, value in results[0]["bars"]["Nats per word"]][1:3] == [
        "0.000",
        "0.000",
    ]


def test_fitted_paths_of_the_page_reach_the_losses_of_the_library(visit):
    draw = np.random.default_rng(11)
    counts = draw.integers(1, 100, (30, 3, 3))
    solve = """all => all.map(counts => {
      const chain = chainOf(counts), tied = bestTied(chain), untied = bestUntied(chain);
      const losses = [tied, untied].map(path => crossEntropy(chain.q, chancesOf(path)));
      const width = [tied.left[0].length, untied.left[0].length];
      return { q: chain.q, mirror: irreversibility(chain.q), losses, width };
    })"""
    for result in visit().page.evaluate(solve, counts.tolist()):
        shares = np.rint(np.array(result["q"]) * 10**15).astype(np.int64)
        chain = Chain(np.arange(9), shares.ravel(), 3)
        assert result["width"] == [2, 2]
        assert result["mirror"] == pytest.approx(chain.irreversibility, abs=1e-12)
        wide = fit_path(chain, 3, True, starts=2)  # full width
        assert result["losses"] == pytest.approx([wide.nll, chain.entropy], abs=1e-9)


def test_first_table_chances_and_costs_equal_those_of_the_essay(visit):
    golden = [["1.25", "1.25", "0.90"], ["1.25", "1.45", "1.32"], ["0.90", "1.32", "1.53"]]
    assert open_step(visit, 3).page.evaluate(READ, [{}])[0]["heat"]["Logits, one table"] == golden
    chances = open_step(visit, 5).page.evaluate(READ, [{}])[0]["heat"]["Chances"]
    assert (chances[0][1], chances[1][0]) == ("0.37", "0.30")  # the values in the text of the answer
    costs = open_step(visit, 4).page.evaluate(READ, [{}])[0]["bars"]["Parameters"]
    assert [text for _, text in costs] == ["204,800,000", "16,777,216 (8.2 %)", "134,217,728 (65.5 %)"]


def test_reader_finishes_the_story_by_answering_every_question(visit):
    page = visit("at=symmetry").page
    rights = dict(part.split("=") for answer in ANSWERED.values() for part in answer.split("&"))
    for number in range(1, 6):
        assert page.locator(".steps [aria-current]").inner_text().startswith(str(number))
        # the first step opens with its picture; all other figures appear after the guess
        assert page.locator(".panel").count() == (1 if number == 1 else 0)
        while (open_questions := page.locator(".guess:not(:has(.answer p)) .choice")).count():
            open_questions.locator("button").first.click()
        answers = page.locator(".answer").all_inner_texts()
        assert all(answer.startswith(("Right. ", "It is: ")) for answer in answers)
        assert page.locator(".panel").count() > 0
        if number < 5:
            page.get_by_role("button", name="Next").click()
            assert page.evaluate("document.activeElement.tagName") == "H2"
            assert f"story={number + 1}" in page_address(page)
    page.wait_for_url(re.compile("guess-reverse"))  # browsers limit address changes per second
    taken = dict(part.split("=") for part in page_address(page).split("&"))
    assert taken.keys() == {*rights, "at", "story"}


def test_story_takes_between_five_and_ten_minutes_to_read(visit):
    """Assume 238 words per minute (Brysbaert 2019, silent reading of non-fiction), 10 s per guess, 5 s per picture."""
    minutes = 0.0
    page = visit(f"at=symmetry&{'&'.join(ANSWERED.values())}").page
    assert "Five steps, ten minutes" in page.locator("#symmetry").inner_text()
    for number in ANSWERED:
        page.locator(".steps button").nth(number - 1).click()
        shown = page.locator("#symmetry .step")
        texts = shown.locator("h2:visible, p:visible, figcaption:visible, .guess button:visible").all_inner_texts()
        words = sum(len(text.split()) for text in texts)
        guesses, pictures = (shown.locator(what).count() for what in (".guess", "figure:visible"))
        assert words > 100, f"step {number} tells nothing"
        minutes += words / 238 + guesses * 10 / 60 + pictures * 5 / 60
    assert 5 < minutes <= 10, minutes


def test_typing_randomise_and_reset_update_pictures_and_address(visit):
    shown = open_step(visit, 3)
    page = shown.page
    box = page.get_by_label("The table, New, 1st number")
    box.fill("2")
    assert "W_E=2,0.5,0.8" in page_address(page)
    assert page.evaluate(READ, [{}])[0]["heat"]["Logits, one table"][0] == ["4.25", "2.05", "1.20"]
    box.press("ArrowRight")
    assert page.evaluate("document.activeElement.ariaLabel") == "The table, New, 2nd number"
    again = visit(page_address(page)).page  # the address restores the picture
    assert again.evaluate(READ, [{}]) == page.evaluate(READ, [{}])
    seen = {page_address(page)}
    for _ in range(3):
        page.get_by_role("button", name="Randomise").click()
        result = page.evaluate(READ, [{}])[0]
        typed = [float(page.locator("table.matrix input").nth(k).input_value()) for k in range(6)]
        exact = np.reshape(typed, (3, 2))
        assert_rounded(result["heat"]["Logits, one table"], exact @ exact.T)
        seen.add(page_address(page))
    assert len(seen) == 4
    page.get_by_role("button", name="As at first").click()
    assert "W_E" not in page_address(page)
    assert page.evaluate(READ, [{}])[0]["heat"]["Logits, one table"][0] == ["1.25", "1.25", "0.90"]


def test_dragging_moves_the_residual_and_buttons_draw_new_counts(visit):
    page = open_step(visit, 1).page
    page.locator("svg.plane").scroll_into_view_if_needed()
    frame = page.locator("svg.plane").bounding_box()
    page.mouse.move(frame["x"] + frame["width"] / 2, frame["y"] + frame["height"] / 2)
    page.mouse.down()
    page.mouse.move(frame["x"] + 1, frame["y"] + frame["height"] - 1)
    page.mouse.up()
    assert "residual=-2,-2" in page_address(page)
    assert page.evaluate(READ, [{}])[0]["bars"]["Logits"][0] == ["New", "−3.00"]
    assert page.get_by_label("Residual, 1st number").first.input_value() == "-2"
    page = open_step(visit, 5).page
    for name in ("Randomise", "Both ways alike", "No word twice"):
        page.get_by_role("button", name=name).click()
        typed = [int(page.locator("table.matrix input").nth(k).input_value()) for k in range(9)]
        counts = np.reshape(typed, (3, 3))
        assert_rounded(page.evaluate(READ, [{}])[0]["heat"]["Target"], counts / counts.sum(1, keepdims=True))
    page.get_by_label("The target: counts of the next word, New, York").fill("0")  # no finite logit gives probability 0
    assert page.locator("input[aria-invalid=true]").count() == 1
    assert "counts=1,80,19" in page_address(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_step_fits_a_phone_and_meets_wcag_aa_contrast(visit, scheme):
    page = visit(f"at=symmetry&{'&'.join(ANSWERED.values())}", width=390, scheme=scheme).page
    wide = "[...document.querySelectorAll('.panel')].filter(p => p.scrollWidth > p.clientWidth).map(p => p.innerText)"
    for number in range(5):
        page.locator(".steps button").nth(number).click()
        assert page.locator(".panel").count() > 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.evaluate(wide) == []
        assert page.evaluate(CONTRASTS) == []


@pytest.mark.parametrize(
    "at",
    [f"story={number}" for number in ("99", "x", "-1", "3&W_E=1e300,1,1,1,1,1", "5&counts=0,0,0", "5&W_E=9,9,9,9,9,9")],
)
def test_invalid_address_shows_a_step(visit, at):
    answers = "&".join(ANSWERED.values())
    page = visit(f"at=symmetry&{at}&{answers}&word=Paris&residual=9,9&sizes=0,0", width=390).page
    assert page.locator(".panel").count() > 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert "NaN" not in page.locator("#symmetry").inner_text()
