"""Test the gradients of the page against autograd in fp64, for the text, seed and step of its address."""

import random
import re

import pytest
import torch

from tiewise.core.measurement import plain

WORDS = ["the", "cat", "sat", "on", "mat", "dog", "bird", "rug"]


def mulberry32(seed):
    """Yield the random numbers of the page (mulberry32)."""
    state, mask = seed, 2**32 - 1
    while True:
        state = (state + 0x6D2B79F5) & mask
        t = ((state ^ (state >> 15)) * (1 | state)) & mask
        t = ((t + (((t ^ (t >> 7)) * (61 | t)) & mask)) & mask) ^ t
        yield (t ^ (t >> 14)) / 2**32


class Model:
    """Reference model of the page in PyTorch, with separate gradients for each use of the tied table."""

    def __init__(self, rows, text, seed):
        draw = mulberry32(seed)
        ids = [rows.index(word) for word in text]
        self.inputs, self.targets = ids[:-1], ids[1:]
        self.table = torch.tensor([[2 * next(draw) - 1 for _ in "xy"] for _ in rows], dtype=torch.float64)
        self.map = torch.tensor([[0.5 * (2 * next(draw) - 1) for _ in "xy"] for _ in "xy"], dtype=torch.float64)

    def gradients(self):
        """Return (loss, lookup path, head path, gradient of the map, gradient of the looked-up rows)."""
        lookup, head, body = (x.clone().requires_grad_() for x in (self.table, self.table, self.map))
        looked_up = lookup[self.inputs]
        looked_up.retain_grad()
        hidden = looked_up + torch.tanh(looked_up @ body)
        loss = torch.nn.functional.cross_entropy(hidden @ head.T, torch.tensor(self.targets), reduction="sum")
        loss.backward()
        return loss.item(), lookup.grad, head.grad, body.grad, looked_up.grad

    def train(self, steps, rate, alpha):
        """Train for `steps` steps, with the lookup path's gradient scaled by `alpha`."""
        for _ in range(steps):
            _, lookup, head, body, _ = self.gradients()
            self.table = self.table - rate * (alpha * lookup + head)
            self.map = self.map - rate * body


def random_settings(count):
    """Yield (rows, text, address) of the worked example and random texts, each at a random training step."""
    draw = random.Random(16)
    for i in range(count):
        text = ["2", "1", "2", "3"] if i < 10 else [draw.choice(WORDS[:5]) for _ in range(draw.randint(2, 9))]
        more = ["4"] if i < 10 else draw.sample(WORDS[5:], draw.randint(1, 3))
        rows = sorted({*text, *more})
        alpha, rate = draw.choice([0, 0.5, 1, 1, 1.75, 3]), draw.choice([0.01, 0.05, 0.1])
        address = {
            "text": " ".join(text),
            "more": " ".join(more),
            "seed": draw.randint(0, 9999),
            "row": draw.choice(rows),
        }
        yield rows, text, address | {"alpha": alpha, "rate": rate, "step": draw.choice([0, 1, 5, 40])}


READ = """all => all.map(one => {
  keep(Object.fromEntries(Object.entries(one).map(([name, value]) => [`g.${name}`, value])));
  const cells = (e) => [...e.querySelectorAll("tbody tr")]
    .map(row => [...row.querySelectorAll("td")].map(td => td.textContent));
  const place = document.getElementById("gradients"), grids = [...place.querySelectorAll("table.heat")].map(cells);
  return { grids, terms: cells(place.querySelector(".terms table")),
    legends: [...place.querySelectorAll(".panels:not(.beside) .legend b")].map(b => b.textContent) };
})"""


def test_page_prints_the_gradients_of_autograd_to_the_last_digit(visit):
    inputs = list(random_settings(100))  # alpha, rate and step have 60 combinations
    results = visit("at=gradients").page.evaluate(READ, [address for _, _, address in inputs])
    for (rows, text, at), shown in zip(inputs, results, strict=True):
        model = Model(rows, text, at["seed"])
        model.train(at["step"], at["rate"], at["alpha"])
        loss, lookup, head, _, back = model.gradients()
        scaled, j = at["alpha"] * lookup, rows.index(at["row"])
        wanted = [[[plain(x, 3) for x in row] for row in grid.tolist()] for grid in (scaled, head, scaled + head)]
        assert shown["grids"] == wanted, at

        vectors = [f"({', '.join(plain(x, 4) for x in row)})" for row in back[[i == j for i in model.inputs]].tolist()]
        assert [value for _, value in shown["terms"]][: len(vectors)] == vectors, at
        totals = [f"({', '.join(plain(x, 4) for x in row[j].tolist())})" for row in (lookup, head, scaled + head)]
        assert [shown["terms"][i][1] for i in (len(vectors), -2, -1)] == totals, at

        norms = scaled.norm().item(), head.norm().item()
        cosine = (scaled * head).sum().item() / (norms[0] * norms[1]) if all(norms) else None
        if cosine is not None:  # at alpha 0 the lookup path has no curve
            assert shown["legends"] == [plain(x, 4) for x in (loss / len(model.inputs), *norms, cosine)], at


def test_formula_of_the_worked_example_names_every_term(visit):
    """With inputs 2, 1, 2 and targets 1, 2, 3, row 2 is read at positions 1 and 3 and predicted at 2."""
    page = visit("at=gradients").page
    text = page.locator(".formula").inner_text().replace("\n", "")
    assert text == "∂L/∂w(2) = [ h̄1 + h̄3 ] + [ p1(2)·h1 + (p2(2) − 1)·h2 + p3(2)·h3 ]"
    page.get_by_role("group", name="The row of").get_by_role("button", name="4").click()
    assert page.locator(".formula").inner_text() == "∂L/∂w(4) = [ 0 ] + [ p1(4)·h1 + p2(4)·h2 + p3(4)·h3 ]"
    assert "zero: no position reads 4" in page.locator(".terms").inner_text()


def test_buttons_train_the_model_and_the_address_restores_the_page(visit):
    page = visit("at=gradients").page
    page.get_by_role("button", name="None: it is never used").click()
    assert "It is: The head path's." in page.locator(".guess").inner_text()
    page.get_by_role("button", name="One step").click()
    assert page.locator(".finding").inner_text().startswith("Step 1:")
    page.get_by_role("button", name="Play").click()
    page.locator(".finding", has_text=re.compile(r"Step ([3-9]|\d\d+):")).wait_for()
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("slider", name="α").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="A sentence").click()
    assert page.get_by_label("Words of the vocabulary").input_value() == "bird fish"
    page.wait_for_url(re.compile("g.more=bird"))
    sent = page.evaluate("location.hash.slice(1)")
    assert visit(sent).page.locator("#gradients").inner_text() == page.locator("#gradients").inner_text()
    page.get_by_role("textbox", name="The text").fill("alone")
    assert "at least two words" in page.locator(".finding").inner_text()
    page.get_by_role("textbox", name="The text").fill(" ".join(f"w{i}" for i in range(40)))
    assert "Only the first 24 words, and 12 different ones" in page.locator(".finding").inner_text()


@pytest.mark.parametrize(
    "address", ["g.alpha=x&g.step=-3&g.row=nobody", "g.step=1e9&g.rate=NaN&g.text=%20", "g.seed=1e99"]
)
def test_invalid_address_shows_the_nearest_valid_setting(visit, address):
    assert re.search(r"Step \d+:|at least two", visit(f"at=gradients&{address}").page.locator(".finding").inner_text())


def test_curves_are_readable_by_keyboard_and_as_a_table(visit):
    page = visit("at=gradients").page
    curve = page.get_by_role("slider", name="Length of each gradient")
    curve.focus()
    for key in ("End", "ArrowLeft"):
        page.keyboard.press(key)
    value = curve.get_attribute("aria-valuetext")
    assert value.startswith("step 199: lookup path ")
    page.locator("figure", has=curve).locator("summary").click()
    assert page.get_by_role("region", name="Length of each gradient").get_by_role("row").count() > 40
