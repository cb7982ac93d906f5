"""Test `tiewise.compare` and `tiewise.train` from Python: their results, files and error messages."""

import inspect
import json
import random

import pytest

import tiewise
from tiewise.core.errors import RunError
from tiewise.lab.call_settings import read_settings

TINY = {"width": 16, "layers": 1, "heads": 2, "length": 16, "batch": 4, "steps": 6, "tokenizer": "bytes"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = ["tie", "wise", "the", "two", "ends", "of", "a", "model"]
    path.write_text("\n\n".join(" ".join(draw.choices(words, k=40)) for _ in range(40)))
    return str(path)


def test_compare_returns_comparison_and_writes_report(text, tmp_path, capfd):
    comparison = tiewise.compare(text, arms=["tied", "untied"], seeds=2, out=tmp_path / "run", **TINY)
    assert comparison.folder == tmp_path / "run"
    assert json.loads((comparison.folder / "results.json").read_text()) == comparison.record()
    assert (comparison.folder / "report.html").is_file()
    assert comparison.command.startswith(f"tiewise.compare('{text}', arms=['tied', 'untied'], seeds=2, ")
    assert comparison.command.endswith(f"out='{tmp_path / 'run'}')")
    assert comparison.finding.partition(":")[0] in comparison._repr_html_()
    assert str(comparison).startswith(comparison.finding)
    assert len(comparison.to_pandas()) == 4
    assert {"differences", "curves", "parameters"} <= set(comparison.figures())
    out, err = capfd.readouterr()
    assert (out, "%|" in err) == ("", False)  # a library whose stderr is a file shows no progress bar
    assert "4/4 untied seed 2: validation loss" in err
    assert tiewise.compare(out=tmp_path / "run", resume=True, quiet=True) == comparison
    assert capfd.readouterr() == ("", "")


def test_train_returns_single_run_with_loadable_model(text, tmp_path):
    trained = tiewise.train(text, boundary="factored:8", out=tmp_path / "run", quiet=True, **TINY)
    assert trained.record()["model"] == str(trained.model)
    assert trained.result.arm == "factored:8"
    assert tiewise.load(trained.model).get_input_embeddings().weight.shape[-1] == 8
    assert "factored:8" in trained._repr_html_()
    assert repr(trained).startswith("factored:8, seed 1: validation loss")
    assert list(trained.to_pandas()["arm"]) == ["factored:8"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"arms": ["glued"]}, "unknown boundary 'glued'"),
        ({"breadth": 3}, "tiewise.compare has no setting 'breadth'; did you mean"),
        ({"resume": True, "width": 3}, "resume takes its settings from the run"),
        ({"recipe": "lstm"}, "no recipe 'lstm'"),
        ({"text": []}, "text in the settings must be a list of text"),
        ({"resume": True, "text": "runs/mine"}, "leave text out; `out` names the folder"),
    ],
)
def test_compare_refuses_wrong_settings_with_one_line_and_leaves_nothing(settings, says, tmp_path):
    with pytest.raises(tiewise.TiewiseError, match=says) as refused:
        tiewise.compare(out=tmp_path / "run", quiet=True, **settings)
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_compare_and_train_refuse_text_file_as_folder(text):
    for call in (tiewise.compare, tiewise.train):
        with pytest.raises(RunError, match=rf"tiewise.{call.__name__}\('{text}'\)"):
            call(out=text)


@pytest.mark.parametrize("texts", ["tied", ["tied", "untied"]])
def test_compare_takes_no_arms_for_a_text(texts):
    with pytest.raises(RunError, match=r'tiewise.compare\("my.txt", arms="tied(,untied)?"\)'):
        tiewise.compare(texts)


def test_signature_of_calls_lists_settings_with_defaults():
    parameters = inspect.signature(tiewise.compare).parameters
    assert next(iter(parameters)) == "text"
    assert (parameters["seeds"].default, parameters["steps"].default) == (3, 600)
    assert "seed" not in parameters
    assert "arms" not in inspect.signature(tiewise.train).parameters


def test_compare_accepts_arms_as_list_or_string_and_boundary(text, tmp_path):
    settings = {**TINY, "seeds": 1, "quiet": True}
    assert list(tiewise.compare(text, arms="tied,factored:4", out=tmp_path / "a", **settings).arms) == [
        "tied",
        "factored:4",
    ]
    assert list(tiewise.compare(text, boundary="tied", out=tmp_path / "b", **settings).arms) == ["tied"]
    with pytest.raises(RunError, match="both arms and boundary"):
        tiewise.compare(text, boundary="tied", arms=["tied"], out=tmp_path / "c", **settings)
    with pytest.raises(RunError, match=r"has no setting 'seedz'; did you mean seeds\?"):
        tiewise.compare(text, seedz=3, out=tmp_path / "c")


@pytest.mark.parametrize("share", ["none,all:groups=2", ["none", "all:groups=2"]])
def test_share_of_a_call_trains_every_arm_with_each_sharing(share, tmp_path):
    """The arms are those of `tiewise compare --share none,all:groups=2`."""
    call = {"recipe": "albert-small", "arms": "tied,untied", "share": share}
    settings = read_settings(call, tmp_path, resume=False)
    assert settings.arms == (
        *("tied+share=none", "tied+share=all:groups=2"),
        *("untied+share=none", "untied+share=all:groups=2"),
    )
    assert settings.checked().arms == settings.arms


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"share": "all"},
            "share needs an ALBERT, and model = 'llama'; add recipe='albert-small'",
        ),
        ({"share": 3, "recipe": "albert-small"}, 'share must be text or a list of text, not 3; write share="none,all"'),
        ({"share": "al", "recipe": "albert-small"}, "unknown sharing 'al'.*did you mean all"),
        (
            {"share": "all", "recipe": "albert-small", "arms": "tied+share=none"},
            r"tied\+share=none says itself what its layers share; leave \+share= out, or share",
        ),
    ],
)
def test_compare_refuses_wrong_share(settings, says, text, tmp_path):
    with pytest.raises(tiewise.TiewiseError, match=says):
        tiewise.compare(text, out=tmp_path / "run", quiet=True, **settings)
