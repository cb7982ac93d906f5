"""The run's folder: whole or as it was, never another's, and of checkpoints only the whole ones."""

import json

import pytest

from tiewise.core.errors import RunError
from tiewise.training import folder
from tiewise.training.folder import folder_name, newest_checkpoint, read_json, saved_run, starting, write_json
from tiewise.training.settings import FILE, Settings


def tree(root):
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in sorted(root.rglob("*"))}


def begin(out, settings, data="tokens", **options):
    with starting(out, **{"overwrite": False, **options}) as stage:
        (stage / "data").mkdir()
        (stage / "data" / "train.bin").write_text(data)
        write_json(stage / "env.json", {"command": data})
        settings.save(stage)


@pytest.fixture
def old(tmp_path):
    """A finished run, with a note beside it."""
    out = tmp_path / "runs" / "old"
    begin(out, Settings(arms=("tied", "factored:64")), "old")
    for name in ("tied/seed-1/result.json", "factored-64/seed-1/result.json", "tuning/x/y", "mine/notes.txt"):
        (out / name).parent.mkdir(parents=True)
        (out / name).write_text("{}")
    for name in ("results.json", "report.html", "tuning.json"):
        (out / name).write_text("{}")
    return out


def test_a_run_is_there_whole(tmp_path):
    out = tmp_path / "a" / "b"
    begin(out, Settings(steps=5))
    assert saved_run(out) == Settings(steps=5)
    assert set(tree(out)) == {"data", "data/train.bin", "env.json", "run.yaml"}


def fail(out, stop, **options):
    with starting(out, **options) as stage:
        (stage / "data").mkdir()
        raise stop


def test_a_start_that_fails_leaves_nothing_not_even_parents(tmp_path):
    with pytest.raises(RunError, match="no good"):
        fail(tmp_path / "a" / "b", RunError("no good"), overwrite=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stop", [RunError("no good"), KeyboardInterrupt()])
def test_a_start_that_fails_leaves_the_old_run(old, stop):
    before = tree(old)
    with pytest.raises(type(stop)):
        fail(old, stop, overwrite=True)
    assert tree(old) == before


def test_overwriting_replaces_the_run_and_keeps_what_is_not_ours(old):
    begin(old, Settings(arms=("untied",)), "new", overwrite=True)
    assert set(tree(old)) == {"data", "data/train.bin", "env.json", "run.yaml", "mine", "mine/notes.txt"}
    assert (old / "data" / "train.bin").read_text() == "new"


def test_an_empty_folder_is_taken(tmp_path):
    begin(tmp_path, Settings())
    assert saved_run(tmp_path) == Settings()


def test_what_a_killed_start_left_is_no_obstacle(tmp_path):
    (tmp_path / "out" / ".starting" / "data").mkdir(parents=True)
    begin(tmp_path / "out", Settings())
    assert set(tree(tmp_path / "out")) == {"data", "data/train.bin", "env.json", "run.yaml"}


@pytest.mark.parametrize("moves", range(4))
def test_killed_while_the_new_run_is_put_in_place(old, monkeypatch, moves):
    """Whichever move was the last one, a resume finds the new run whole."""
    real, left = folder.replace_path, [moves]

    def limited(made, final):
        left[0] -= 1
        if left[0] < 0:
            raise SystemExit
        real(made, final)

    monkeypatch.setattr(folder, "replace_path", limited)
    if moves < 3:
        with pytest.raises(SystemExit):
            begin(old, Settings(arms=("untied",)), "new", overwrite=True)
    else:
        begin(old, Settings(arms=("untied",)), "new", overwrite=True)
    monkeypatch.setattr(folder, "replace_path", real)
    assert saved_run(old) == Settings(arms=("untied",))
    assert set(tree(old)) == {"data", "data/train.bin", "env.json", "run.yaml", "mine", "mine/notes.txt"}
    assert (old / "data" / "train.bin").read_text() == "new"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_something_else_is_refused(tmp_path, overwrite):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunError, match="is no run of tiewise; choose another --out"):
        begin(tmp_path, Settings(), overwrite=overwrite)
    assert tree(tmp_path) == {"thesis.tex": b"x"}


def test_a_run_is_not_replaced_unasked(old):
    before = tree(old)
    with pytest.raises(RunError, match="--overwrite to replace it"):
        begin(old, Settings())
    assert tree(old) == before


def test_a_damaged_run_is_not_replaced(old):
    (old / FILE).write_text("arms: [..]")
    before = tree(old)
    with pytest.raises(ValueError, match="unknown boundary"):
        begin(old, Settings(), overwrite=True)
    assert tree(old) == before


@pytest.mark.parametrize("below", [False, True])
def test_a_file_in_the_way(tmp_path, below):
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(RunError, match=r"choose another --out"):
        begin(path / "out" if below else path, Settings())
    assert tree(tmp_path) == {"file": b"x"}


def test_no_run_to_resume(tmp_path):
    with pytest.raises(RunError, match="holds no run to resume"):
        saved_run(tmp_path)


def test_names_of_folders_are_readable_and_never_two_alike():
    assert folder_name("factored-untied:in=64,out=128+bias") == "factored-untied-in=64-out=128+bias"
    arms = ["tied+vectors=a/b", "tied+vectors=a-b", "tied+vectors=" + "x" * 200, "tied+vectors=" + "x" * 201]
    names = [folder_name(arm) for arm in arms]
    assert len(set(names)) == 4
    assert all("/" not in name and len(name) < 100 for name in names)


def checkpoint(root, step, state):
    path = root / f"checkpoint-{step}"
    path.mkdir()
    (path / "model.safetensors").write_text("weights")
    if state is not None:
        (path / "trainer_state.json").write_text(state)


def test_the_newest_whole_checkpoint_is_taken_and_torn_ones_go(tmp_path):
    for step in (4, 8, 12):
        checkpoint(tmp_path, step, json.dumps({"global_step": step}))
    checkpoint(tmp_path, 100, None)
    checkpoint(tmp_path, 16, '{"global_step": 1')
    checkpoint(tmp_path, 20, json.dumps({"global_step": 16}))
    checkpoint(tmp_path, "last", json.dumps({"global_step": 1}))
    assert newest_checkpoint(tmp_path) == (tmp_path / "checkpoint-12", 12)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-12", "checkpoint-4", "checkpoint-8"]


def test_no_checkpoint(tmp_path):
    assert newest_checkpoint(tmp_path) == (None, 0)


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert read_json(path) == {"a": 1}
    path.write_text('{"a"')
    assert read_json(path) is None
