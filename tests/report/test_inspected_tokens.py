"""Words, tables and figures of tokens: numbers as they were measured, sentences that say no more than these show."""

import html
from dataclasses import replace

import numpy as np
import pytest
from tests.report.opened_page import page_of

from tiewise.analysis.row_directions import anisotropy, moments, plane
from tiewise.analysis.single_rows import NearUnused, RowState, Suspect, norms_of
from tiewise.analysis.token_contexts import contexts, grouped
from tiewise.analysis.token_table import HeldTable
from tiewise.analysis.token_texts import Groups, by_frequency
from tiewise.analysis.tokens import ContextsFound, Notable, TableTokens, TokensFound
from tiewise.report.inspected import tokens, tokens_figures
from tiewise.report.sheet import Section

V = 200
TEXT = np.random.default_rng(0).permutation(np.repeat(np.arange(150), np.arange(150) + 1))
COUNTS = np.bincount(TEXT, minlength=V)
HALVES = Groups(("Latin", "Han"), np.arange(V) // 100)


def table_found(name, values, mapped=False, near=None):
    table = HeldTable(values)
    sums = moments(table)
    norms = norms_of(sums.norms, COUNTS, by_frequency(COUNTS), HALVES)
    state = None if mapped else RowState((3,), ((5, 6),), 1, 2, 50, near)
    shape = (V, values.shape[1])
    shown = plane(table, sums, np.arange(40))
    return TableTokens(name, mapped, *shape, norms, anisotropy(table, sums), shown, state)


def contexts_found(text):
    around = contexts(text, V)
    named = (Notable(7, "<b>x</b>", 101, 0.6, 0.1),)
    levels = around.weighted(around.plug_in), around.weighted(around.coin), around.guessed
    return ContextsFound(*levels, grouped(around, by_frequency(COUNTS)), grouped(around, HALVES), named)


def found_of(sign=-1.0, text=TEXT, names=("input", "output"), near=None):
    values = np.random.default_rng(1).standard_normal((V, 6)) * (1 + np.log1p(COUNTS))[:, None] ** sign
    made = tuple(table_found(name, values, "after" in name, near) for name in names)
    labels = tuple(["the", "<b>", "café", "$x$"] * 10)
    sampled = tuple(map(int, COUNTS[:40]))
    return TokensFound(made, len(text), 150, contexts_found(text), tuple(range(40)), labels, sampled, 12, 0, ())


@pytest.fixture(scope="module")
def found():
    return {"<tied>": found_of(names=("both ends",)), "untied": found_of(sign=1.0)}


def test_sentences_carry_the_measured_numbers(found):
    said = tokens.lines(found)
    rho = found["untied"].tables[0].norms.frequency.spearman
    (line,) = [line for line in said if line.startswith("In untied, input")]
    assert "frequent tokens have longer rows" in line
    assert f"{rho.value:+.3f}" in line
    assert "150 tokens of the text" in line
    assert any(line.startswith("In <tied>, both ends, frequent tokens have shorter rows") for line in said)
    assert any("1 zero rows, 2 rows equal to another, 12 rows of no token" in line for line in said)
    assert all(line.endswith(".") for line in said)


def test_a_correlation_within_chance_is_no_finding(found):
    one = found["untied"]
    table = one.tables[0]
    frequency = table.norms.frequency
    weak = replace(frequency, spearman=replace(frequency.spearman, value=0.9 * 1.96 * frequency.chance))
    table = replace(table, norms=replace(table.norms, frequency=weak))
    (line,) = [line for line in tokens.lines({"m": replace(one, tables=(table,))}) if line.startswith("In m")]
    assert "neither longer nor shorter rows than rare ones, as far as is shown" in line


def test_contexts_are_said_to_differ_only_where_guesses_show_it(found):
    shuffled = tokens.lines({"m": found["untied"]})
    assert any("is not shown to differ from what follows" in line for line in shuffled)
    directed = tokens.lines({"m": found_of(text=np.tile(np.arange(150), 60))})
    assert any("What precedes a token differs from what follows" in line for line in directed)


def test_one_text_is_said_once_and_two_texts_twice(found):
    names = [names for names, _ in tokens.different_contexts(found)]
    assert names == ["<tied>, untied"]
    other = found | {"third": found_of(text=np.tile(np.arange(150), 60))}
    assert [names for names, _ in tokens.different_contexts(other)] == ["<tied>, untied", "third"]
    titles = [panel.title for panel in tokens_figures.panels(other)]
    assert sum("Left and right contexts by frequency" in title for title in titles) == 2
    assert len(set(titles)) == len(titles)


def test_rows_near_unused_ones_are_candidates(found):
    near = NearUnused(12, 0.5, 3, 0.016, (Suspect(9, 0.1, 0.99),))
    one = {"m": found_of(near=near)}
    assert any("3 rows in use (1.6 %)" in line and "may be untrained" in line for line in tokens.lines(one))
    assert not any("may be untrained" in line for line in tokens.lines(found))
    (states,) = [table for caption, table in tokens.tables(one) if caption == "Rows that say little"]
    assert states.rows[0] == ["m, input", "1", "2", "50", "3", "12", "#9"]


def test_tables_are_text_of_one_width(found):
    made = tokens.tables(found)
    assert len(made) == 8
    for _, table in made:
        assert table.rows
        assert all(len(row) == len(table.header) for row in table.rows)
        assert all(isinstance(cell, str) for row in table.rows for cell in row)


def test_without_a_text(found):
    bare = {}
    for label, one in found.items():
        tables = tuple(replace(t, norms=replace(t.norms, frequency=None, bins=())) for t in one.tables)
        bare[label] = replace(one, tables=tables, contexts=None, counts=(), text=0, seen=0)
    assert not any("precedes" in line or "frequent" in line for line in tokens.lines(bare))
    titles = [panel.title for panel in tokens_figures.panels(bare)]
    assert titles[0] == "How many directions a table fills"
    assert len(titles) == 3


def test_figures_show_what_was_measured(found):
    made = {panel.title: panel for panel in tokens_figures.panels(found)}
    norms = made["Length of rows by token frequency"].figure
    assert [trace.name for trace in norms.data] == ["&lt;tied&gt;, both ends", "untied, input", "untied, output"]
    assert list(norms.data[1].y) == [group.median for group in found["untied"].tables[0].norms.bins]
    spectrum = made["How many directions a table fills"].figure
    assert spectrum.data[0].y[-1] == pytest.approx(1)
    assert sum("Gaussian" in trace.name for trace in spectrum.data) == 1
    view = made["Rows in two dimensions: untied"].figure
    share = found["untied"].tables[1].plane.shares[0]
    assert f"{100 * share:.1f} % of the variance" in view.layout.xaxis2.title.text
    drawn = sum(len(trace.x) for trace in view.data if trace.mode == "markers")
    assert drawn == 2 * 40
    for panel in made.values():
        assert panel.caption
        assert panel.table.rows
        assert panel.figure.layout.height


def test_text_of_strangers_is_escaped(found):
    drawn = tokens_figures.panels(found)
    texts = [t for panel in drawn for trace in panel.figure.data for t in trace.text or ()]
    assert html.escape("<b>") in texts
    assert not any("<b>" in text for text in texts)
    page = page_of(Section("Tokens", drawn))
    assert "<tied>" not in page
