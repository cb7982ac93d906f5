"""Test the budget page against the rows that `tiewise plan` prints, digit by digit, at random sizes."""

import json
import random
import shlex
import subprocess
import sys

import pytest

from tiewise.planning import plan_rows
from tiewise.planning.catalogue import find
from tiewise.planning.costs import Setting
from tiewise.planning.plan import plan
from tiewise.planning.read_config import Sizes
from tiewise.planning.resized import LETTERS, config_like
from tiewise.report.explorer.page import facts

FACTS = facts()
PRESETS = {preset["name"]: preset["sizes"] for preset in FACTS["presets"]}
NAMES = {letter: name for name, letter in LETTERS.items()}
READ_ROWS = """(asked) => asked.map(({ name, at, kinds, dtype, but }) => {
  const found = choices(name, at, kinds);
  return { wrong: refusalOf(name, at), rows: planRows(found, dtype), near: neighbourRows(neighbours(at, but)),
    command: planCommand(name, at, kinds, dtype) };
})"""


def draw_sizes(draw, name):
    """Draw (sizes, sharing kinds, dtype) for a preset: its sizes, or any valid ones."""
    own = PRESETS[name]
    at = dict(own)
    if draw.random() < 0.85:
        at["H"] = draw.choice([1, 2, 6, 8, 12, 16, 71])
        at |= {"V": draw.randint(2, 300_000), "D": at["H"] * draw.randint(1, 400), "L": draw.randint(1, 24)}
        at |= {"F": draw.randint(1, 60_000), "K": draw.choice([k for k in range(1, at["H"] + 1) if at["H"] % k == 0])}
        at = {letter: at[letter] for letter in own}
    widest = next(f["table_width"] for p in FACTS["presets"] for f in [FACTS["forms"][p["form"]]] if p["name"] == name)
    k, g = draw.randint(1, widest.get("", at["D"])), draw.choice([1, draw.randint(1, at["L"])])
    kinds = draw.choice([["none"], ["none", "attention"], ["none", "ffn"], ["none", "all"], ["all"]])
    return {**at, "k": k, "g": g}, kinds, draw.choice(["float32", "bfloat16"])


def plan_in_python(name, at, kinds, dtype):
    """Return (rows, neighbours) that Python plans for the same input, limited to the rows of the page."""
    sizes = {NAMES[letter]: at[letter] for letter in PRESETS[name]}
    moved = any(at[letter] != value for letter, value in PRESETS[name].items())
    described = Sizes(**sizes, gated=FACTS["plain"][name]) if name in FACTS["plain"] else config_like(name, **sizes)
    shares = [kind if kind == "none" or at["g"] == 1 else f"{kind}:groups={at['g']}" for kind in kinds]
    model = described if moved or name in FACTS["plain"] else name
    record = plan(model, ("untied", "tied", f"factored:{at['k']}"), shares, Setting(dtype=dtype)).record()
    rows = plan_rows.rows(record)
    return rows[: rows.index(["further memory of a step"])], plan_rows.neighbours(record)


def test_facts_are_small_and_hold_every_model_of_uniform_layers():
    assert len(json.dumps(FACTS, separators=(",", ":"))) < 60_000
    assert {"gpt2", "llama-3-8b", "gemma-3-1b", "qwen3-30b-a3b", "albert-base-v2", "falcon-7b"} <= PRESETS.keys()
    # these have two depths or different layers
    assert not {"t5-small", "modernbert-base", "deepseek-v3"} & PRESETS.keys()


def test_page_prints_the_rows_of_plan_for_every_preset_and_random_sizes(visit, monkeypatch):
    nothing = {"nll": 0.0, "own": 0.0, "assumed": ""}  # the page omits it, and it takes most of a plan's time
    monkeypatch.setattr("tiewise.planning.costs.first_loss", lambda *_: nothing)
    draw = random.Random(3)
    settings = [(name, *draw_sizes(draw, name)) for name in [*PRESETS, *draw.choices(list(PRESETS), k=40)]]
    alike = [name if at.items() >= PRESETS[name].items() else None for name, at, *_ in settings]
    keys = ("name", "at", "kinds", "dtype", "but")
    inputs = [dict(zip(keys, (*each, but), strict=True)) for each, but in zip(settings, alike, strict=True)]
    results = visit("at=budget").page.evaluate(READ_ROWS, inputs)
    assert len(results) > 150
    for setting, shown in zip(settings, results, strict=True):
        rows, near = plan_in_python(*setting)
        assert shown["wrong"] is None, setting
        assert shown["rows"] == rows, setting
        assert shown["near"] == near, setting


@pytest.mark.parametrize("name", ["gpt2", "sizes alone, gated"])
def test_command_of_the_page_prints_the_same_rows(visit, name):
    at = {**PRESETS[name], "D": 1536, "K": 12, "L": 7, "F": 5_000, "k": 77, "g": 2}
    at = {letter: at[letter] for letter in (*PRESETS[name], "k", "g")}
    page_input = {"name": name, "at": at, "kinds": ["none", "ffn"], "dtype": "bfloat16", "but": None}
    (shown,) = visit("at=budget").page.evaluate(READ_ROWS, [page_input])
    command = [sys.executable, "-m", *shlex.split(shown["command"]), "--json"]
    record = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert plan_rows.rows(record)[: len(shown["rows"])] == shown["rows"]


def test_number_box_keeps_a_typed_value_and_slider_moves_in_steps(visit):
    page = visit("at=budget").page
    box, slide = page.get_by_role("spinbutton", name="Vocabulary"), page.get_by_role("slider", name="Vocabulary")
    assert box.input_value() == "50257"
    box.focus()
    page.keyboard.press("ArrowUp")
    assert box.input_value() == "50258"
    assert "38,598,144" in page.get_by_role("region", name="Costs by choice").inner_text()
    box.fill("1.5")
    assert box.get_attribute("aria-invalid") == "true"
    assert "38,598,144" in page.get_by_role("region", name="Costs by choice").inner_text()
    slide.focus()
    page.keyboard.press("ArrowRight")
    assert int(box.input_value()) % 256 == 0
    assert f"sizes={box.input_value()},768,12,3072,12" in page.url


def test_page_refuses_invalid_sizes_and_accepts_the_next_valid_ones(visit):
    page = visit("at=budget").page
    page.get_by_role("spinbutton", name="Attention heads").fill("13")
    assert "Choose H = 12 or 16, or another D." in page.locator(".finding").inner_text()
    page.get_by_role("spinbutton", name="Attention heads").fill("16")
    assert "124,439,808" in page.locator(".finding").inner_text()
    page.get_by_role("spinbutton", name="Factored table").fill("769")
    assert "Choose k ≤ 768" in page.locator(".finding").inner_text()


def test_address_restores_the_chosen_model_and_options(visit):
    page = visit("at=budget&like=nobody&sizes=1,x,-3,,&k=1e9&share=some&groups=-1&dtype=int4").page
    assert "124,439,808" in page.locator(".finding").inner_text()  # invalid values fall back to the defaults
    page.get_by_label("Like this model").select_option("llama-3-8b")
    page.get_by_role("button", name="nothing").click()
    page.get_by_role("button", name="bfloat16").click()
    wanted = page.locator("#budget").inner_text()
    assert "8,030,261,248" in wanted
    again = visit(page.url.partition("#")[2]).page
    assert again.locator("#budget").inner_text() == wanted


READ_SCALE = """() => [...document.querySelectorAll('[aria-label="Tables in models of three sizes"] tbody tr')]
  .map(row => [...row.children].map(cell => cell.textContent))"""


def test_shares_of_the_tables_equal_those_of_published_parameter_counts(visit):
    """`table_share` of the catalogue divides V · D by the published number of parameters."""
    page = visit("at=budget&like=llama-3-8b").page
    rows = page.evaluate(READ_SCALE)
    names = ["llama-3.2-1b", "llama-2-7b", "llama-3-70b", "llama-3-8b"]
    assert [row[0].removeprefix("yours: ") for row in rows] == names
    bars = page.get_by_role("group", name="Share of the tables").locator(":scope > div > :last-child").all_inner_texts()
    for name, row, bar in zip(names, rows, bars, strict=True):
        model = find(name)
        assert row[1:4] == [f"{model.vocab:,}", f"{model.width:,}", str(model.layers)]
        table, body = model.vocab * model.width, model.parameters - model.vocab * model.width * (1 if model.tied else 2)
        assert row[5] == f"{100 * table / (body + table):.1f} %"
        assert row[6] == f"{100 * 2 * table / (body + 2 * table):.1f} %"
        assert bar == f"{100 * model.table_share:.1f} %"
        assert model.config_source in page.locator(".scale figcaption").inner_text()


def test_share_of_sizes_alone_is_marked_as_an_estimate_and_follows_the_sliders(visit):
    page = visit("at=budget&like=sizes%20alone").page
    before = page.evaluate(READ_SCALE)[-1]
    assert all(text.startswith("≈ ") for text in before[4:])
    page.get_by_role("spinbutton", name="Layers").fill("48")
    after = page.evaluate(READ_SCALE)[-1]
    assert after[3] == "48"
    assert float(after[5].strip("≈ %")) < float(before[5].strip("≈ %"))
