"""Test that `tiewise data show` prints training rows with their labels and masks."""

import json
import re

import pytest
import typer

from tiewise.cli import data


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("shown") / "text.jsonl"
    rows = [{"text": " ".join(f"Row {i} has line {j} here." for j in range(6))} for i in range(60)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def show(*arguments):
    app = typer.Typer()
    app.command()(data.show)
    app([*arguments, "--tokenizer", "bpe:300"], standalone_mode=False)


@pytest.mark.parametrize("objective", ["sop", "nsp", "none"])
def test_data_show_json_labels_match_order_of_sentences(objective, source, capsys):
    show("-t", source, "--objective", objective, "--length", "60", "-n", "12", "--json")
    record = json.loads(capsys.readouterr().out)
    assert 0 < record["documents"] < 60  # the other documents are held out
    assert record["sentences"] == 6 * record["documents"]
    seen_labels = set()
    for row in record["rows"]:
        row_text = re.sub(r"\[[^\]|]*\|([^\]]*)\]", r"\1", row["a"] + row["b"])
        assert row_text.startswith("[CLS]")
        a, b = (re.findall(r"Row (\d+) has line (\d)", part) for part in row_text.split("[SEP]")[:2])
        label = row["label"]
        seen_labels.add((label, row["says"]))
        if a and b and label is not None:
            same, ordered = a[-1][0] == b[0][0], a[-1][1] < b[0][1]
            assert (same and ordered) == bool(label)
        assert row["predicted"] == sum(wanted != -100 for wanted in row["labels"]) > 0
    expected = {"sop": "label 0: swapped", "nsp": "label 0: B is from another document", "none": "no label"}
    assert expected[objective] in {words for _, words in seen_labels}


def test_data_show_prints_rows_and_masks_as_text(source, capsys):
    show("-t", source, "-n", "1", "--masking", "0.9", "--length", "40")
    out = capsys.readouterr().out
    assert "rows per epoch" in out
    assert "  A: [CLS]" in out
    assert "[MASK|" in out
