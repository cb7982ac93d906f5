"""Test the engine of the rewriting verbs: written and linked files, refusals, and folders after failures."""

import errno
import hashlib
import json
import os
import shutil
from functools import partial
from inspect import signature
from unittest.mock import Mock

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st
from rewrite_models import hash_files, hash_without_times, run_child
from safetensors.numpy import load_file, save_file
from tests.checkpoint.tiny_checkpoints import llama, llama_config, llama_tensors, table, write_checkpoint, write_sparse

from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.rewrite import (
    engine,
    factor,
    file_writing,
    new_folder,
    repair,
    resize,
    rewrite,
    tie,
    untie,
    verb,
)
from tiewise.checkpoint.rewrite.change import DELETE, Change, NewTensor
from tiewise.checkpoint.rewrite.file_plan import _in_old_order, plan_files
from tiewise.checkpoint.rewrite.json_edits import edit_json
from tiewise.checkpoint.stored import read_header
from tiewise.core.errors import CheckpointError
from tiewise.core.progress import listen_to_progress

UNDO = partial(factor, undo=True)

# duplicate tensors


@pytest.mark.parametrize(("duplicates", "named"), [("ab", "b"), ("a", None)])
def test_plan_refuses_every_tensor_that_two_files_would_store(tmp_path, duplicates, named):
    """`a` is dropped from both files, and `b` from none."""
    tensors = {name: table(seed=seed) for seed, name in enumerate("abc")}
    write_checkpoint(tmp_path / "x", llama_config(), tensors)
    (tmp_path / "x" / "model.safetensors").rename(tmp_path / "x" / "first.safetensors")
    save_file({name: tensors[name] for name in duplicates}, tmp_path / "x" / "second.safetensors")
    folder, change = open_folder(tmp_path / "x"), Change(drop=frozenset("a"))
    assert len(folder.copies) == len(duplicates)
    if named is None:
        assert "a" not in plan_files(folder, change).tensors
        return
    with pytest.raises(CheckpointError, match=f"x: {named} is stored twice, also in "):
        plan_files(folder, change)


# config text

KEYS = st.text(st.characters(codec="utf-8", exclude_characters="."), min_size=1, max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100)
@given(
    record=st.dictionaries(KEYS, VALUES, max_size=5),
    inner=st.dictionaries(KEYS, VALUES, max_size=3),
    key=KEYS,
    value=VALUES | st.just(DELETE),
    indent=st.sampled_from([None, 0, 2, "\t"]),
    nested=st.booleans(),
)
def test_edit_json_equals_edit_of_parsed_record(record, inner, key, value, indent, nested):
    record = record | {"level": dict(inner)}
    text = json.dumps(record, indent=indent, ensure_ascii=False)
    made = json.loads(edit_json(text, {f"level.{key}" if nested else key: value}))
    place = record["level"] if nested else record
    place.pop(key, None) if value is DELETE else place.update({key: value})
    assert made == record


def test_edit_json_keeps_all_other_characters():
    text = '{\r\n  "a": 1.50,\r\n  "c": {"x": 1E5 , "y":[ ]},\r\n  "d": "\\u00e9"\r\n}\r\n'
    assert edit_json(text, {"b": True}) == text.replace("1.50,\r\n", '1.50,\r\n  "b": true,\r\n')
    assert edit_json(text, {"c.y": 2, "d": None}) == text.replace("[ ]", "2").replace('"\\u00e9"', "null")
    assert edit_json(text, {"a": DELETE}) == text.replace('\r\n  "a": 1.50,', "")
    assert edit_json(text, {"d": DELETE}) == text.replace(',\r\n  "d": "\\u00e9"', "")
    assert edit_json('{"b": 1, "a": 2}', {"c": 3}) == '{"b": 1, "a": 2, "c": 3}'
    assert edit_json("{}", {"a": 1}) == '{"a": 1}'
    assert edit_json('{"a": 1, "a": 2}', {"a": 3}) == '{"a": 1, "a": 3}'  # readers use the last value
    with pytest.raises(KeyError):
        edit_json(text, {"none.x": 1})


# tensor files


def rewrite_with(path, to, **change):
    return rewrite(path, to, lambda facts, *, force: Change(**change))


def test_rewrite_writes_tensor_files_that_safetensors_reads(tmp_path):
    made = {"b": table(5, 3), "a": table(3, 3).astype(np.float16), "i": np.arange(3, dtype=np.int8)}
    write_checkpoint(tmp_path / "a", llama_config(), made, metadata={"format": "pt", "who": "é", "n": "a"})
    new = {"n": table(2, 3, 9), "w": table(1, 1).astype(np.float64), "u": np.arange(5, dtype=np.uint8)}
    kinds = {"n": "F32", "w": "F64", "u": "U8"}
    put = (NewTensor(n, kinds[n], v.shape, "model.safetensors", partial(iter, [v.tobytes()])) for n, v in new.items())
    rewrite_with(tmp_path / "a", tmp_path / "b", drop=frozenset({"i"}), put=tuple(put))
    back, want = load_file(tmp_path / "b" / "model.safetensors"), {n: v for n, v in (made | new).items() if n != "i"}
    assert {n: (v.dtype, v.tolist()) for n, v in back.items()} == {n: (v.dtype, v.tolist()) for n, v in want.items()}
    old, header = (read_header(tmp_path / to / "model.safetensors") for to in "ab")
    assert [n for n in header.tensors if n in made] == [
        n for n in old.tensors if n != "i"
    ]  # kept tensors keep their order
    assert header.metadata == {"format": "pt", "who": "é"}  # drops "n", which now names a tensor
    assert header.data_start % 8 == 0
    for tensor in header.tensors.values():
        assert (tensor.start - header.data_start) % (tensor.nbytes // max(1, int(np.prod(tensor.shape)))) == 0


def test_rewrite_keeps_tensors_aligned_after_odd_lengths(tmp_path):
    """Another tool wrote a narrow tensor of odd length first; tensors after it must stay aligned."""
    (tmp_path / "a").mkdir()
    narrow, wide = np.arange(4, dtype=np.int8), table(2, 2)
    data = {"n": narrow.tobytes(), "w": wide.tobytes()}
    write_sparse(tmp_path / "a" / "model.safetensors", {"n": ("I8", [4]), "w": ("F32", [2, 2])}, data)
    new = NewTensor("n", "I8", (3,), "model.safetensors", lambda: iter([b"\1\2\3"]))
    rewrite_with(tmp_path / "a", tmp_path / "b", put=(new,))
    header, back = (read(tmp_path / "b" / "model.safetensors") for read in (read_header, load_file))
    assert (header.tensors["w"].start - header.data_start) % 4 == 0
    assert (back["n"].tolist(), back["w"].tolist()) == ([1, 2, 3], wide.tolist())


def test_rewrite_removes_shard_without_tensors(tmp_path):
    made = {"model.embed_tokens.weight": table(), "lm_head.weight": table(), "model.norm.weight": table(1, 8)[0]}
    repair(write_checkpoint(tmp_path / "a", llama_config(), made, shards=3), tmp_path / "b")
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert files == sorted(p.name for p in (tmp_path / "b").glob("*.safetensors"))
    assert (len(files), index["metadata"]["total_size"]) == (2, table().nbytes + 32)


# verbs


@verb
def forget(facts, *, name, force=False):
    """Drop one tensor.

    Args:
        name: of the tensor.
    """
    assert facts.folder.tensors
    return Change(drop=frozenset({name}), notes=("a <b> note",))


def test_verb_decorator_adds_arguments_and_receipt_renders_as_html_table(tmp_path):
    receipt = forget(llama(tmp_path / "a"), tmp_path / "b", name="model.norm.weight")
    assert (receipt.verb, receipt.dropped) == ("forget", ("model.norm.weight",))
    assert "model.norm.weight" not in load_file(tmp_path / "b" / "model.safetensors")
    assert list(signature(forget).parameters) == ["source", "to", "name", "dry_run", "force"]
    assert "Drop one tensor." in forget.__doc__
    assert "name: of the tensor.\n    dry_run:" in forget.__doc__
    page = receipt._repr_html_()
    assert f"<tr><th>written</th><td>{tmp_path / 'b'}, " in page
    assert page.startswith("<p>forget: 0 tensors written, 1 removed.</p><table>")
    assert "<td>model.norm.weight</td>" in page
    assert "a &lt;b&gt; note" in page


def test_receipt_names_heal_once_and_not_in_dry_run(tmp_path):
    source = llama(tmp_path / "a", head=table(seed=7))
    for dry_run, count in ((True, 0), (False, 1)):
        receipt = tie(source, tmp_path / "b", keep="mean", dry_run=dry_run)
        for printed in (str(receipt), receipt._repr_html_()):
            assert printed.count(f"Next: {receipt.next_command}") == printed.count("tiewise heal") == count


# other files


def test_rewrite_links_unchanged_weights_and_copies_other_files(tmp_path):
    path = llama(tmp_path / "a", shards=2, files={"generation_config.json": {"a": 1}})
    for name in ("sub/deep/words.txt", "pytorch_model.bin", ".git/HEAD"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("words")
    receipt = untie(path, tmp_path / "b")
    for name in receipt.linked:
        assert os.path.samefile(path / name, tmp_path / "b" / name) or (tmp_path / "b" / name).stat().st_nlink == 1
    assert sorted(name.rpartition(".")[2] for name in receipt.linked) == ["bin", "safetensors"]
    for name in ("sub/deep/words.txt", "generation_config.json"):
        assert (tmp_path / "b" / name).read_bytes() == (path / name).read_bytes()
        assert not os.path.samefile(tmp_path / "b" / name, path / name)
    assert not (tmp_path / "b" / ".git").exists()
    assert [any(said in note for note in receipt.notes) for said in ("pytorch_model.bin", ".git stays")] == [True] * 2


def test_rewrite_turns_linked_snapshot_into_files(tmp_path):
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    llama(blobs)
    snapshot.mkdir(parents=True)
    for path in list(blobs.iterdir()):
        path.rename(blobs / f"{path.name}-sha")
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}-sha")
    untie(snapshot, tmp_path / "b")
    made = {path.name: path.is_symlink() for path in (tmp_path / "b").iterdir()}
    assert made == {"config.json": False, "model.safetensors": False, "tiewise.json": False}


def test_rewrite_refuses_links_that_lead_outside_folder(tmp_path):
    path = llama(tmp_path / "a")
    (tmp_path / "secret.txt").write_text("secret")
    (path / "notes.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(CheckpointError, match="a link to a file outside the folder"):
        untie(path, tmp_path / "b")
    assert not (tmp_path / "b").exists()


# destinations


def test_rewrite_refuses_unsuitable_destinations(tmp_path):
    path = llama(tmp_path / "a")
    llama(tmp_path / "full")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(path)
    for to in (path, path / "inside", tmp_path, tmp_path / "link", tmp_path / "link" / "inside"):
        with pytest.raises(CheckpointError, match="contain one another"):
            untie(path, to)
    says = {
        "full": "not empty",
        "file": "a file has this path",
        "file/x": "is not a folder",
        "none/x": "is not a folder",
    }
    for to, what in says.items():
        with pytest.raises(CheckpointError, match=what):
            untie(path, tmp_path / to)
    for to in ("/proc/made-by-nobody", "/proc/self/fd/made"):
        with pytest.raises(CheckpointError, match=r"no space|cannot be written|are free"):
            untie(path, to)
    with pytest.raises(CheckpointError, match="cannot be written"):
        untie(path, tmp_path / ("x" * 250))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "file", "full", "link"]


@pytest.mark.parametrize("verb_", [untie, partial(factor, rank=3), partial(resize, vocab=50), UNDO])
def test_dry_run_writes_nothing_and_predicts_receipt(tmp_path, verb_):
    path = llama(tmp_path / "a", rows=40, width=12, shards=2)
    if verb_ is UNDO:
        path = factor(path, tmp_path / "factored", rank=3).to
    before = hash_files(tmp_path)
    foreseen = verb_(path, tmp_path / "b", dry_run=True)
    assert hash_files(tmp_path) == before
    (tmp_path / "b").mkdir()  # an empty folder is a valid destination
    done = verb_(path, tmp_path / "b")
    assert (tmp_path / "b" / "config.json").is_file()
    assert foreseen.record() | {"dry_run": False} == json.loads(json.dumps(done.record()))


# failures


DISK = [OSError(code, os.strerror(code)) for code in (errno.ENOSPC, errno.EDQUOT, errno.EIO)]


@pytest.mark.parametrize("error", [*DISK, KeyboardInterrupt("x"), MemoryError("x")], ids=repr)
def test_failed_write_leaves_no_files(tmp_path, monkeypatch, error):
    path = llama(tmp_path / "a", shards=2)
    before = hash_files(tmp_path)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=error))
    expected = CheckpointError if error in DISK else type(error)
    with pytest.raises(expected, match=getattr(error, "strerror", "x")):
        untie(path, tmp_path / "b")
    assert hash_files(tmp_path) == before


def test_full_file_system_during_write_leaves_no_files(tmp_path):
    path = llama(tmp_path / "a", rows=4096, width=64)
    before = hash_files(tmp_path)
    result = run_child("untie", path, tmp_path / "b", limit=1_500_000)
    assert "a file became too large (File too large); raise the limit on the size of a file" in result["error"]
    assert hash_files(tmp_path) == before


def test_rewrite_checks_free_space_before_writing(tmp_path, monkeypatch):
    path = llama(tmp_path / "a")
    need = sum(array.nbytes for array in llama_tensors().values()) + table().nbytes
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Mock(free=1))
    with pytest.raises(CheckpointError, match=r"([\d,]+) bytes are needed and 1 are free") as raised:
        untie(path, tmp_path / "b")
    said = int(str(raised.value).split(" bytes are needed")[0].rsplit(" ", 1)[1].replace(",", ""))
    assert need <= said <= need + 1000


@pytest.mark.parametrize("what", ["grows", "shrinks", "is touched", "goes"])
def test_rewrite_refuses_source_that_changes_while_read(tmp_path, what):
    path = llama(tmp_path / "a", rows=4096, width=64)
    source = path / "model.safetensors"

    def change(task, *_):
        if task == "reading headers":
            return  # the rewrite has not noted the files' sizes and times yet
        if what == "goes":
            source.unlink(missing_ok=True)
        elif what == "is touched":
            os.utime(source, ns=(1, 1))
        else:
            os.truncate(source, 10_000_000 if what == "grows" else 200)

    with (
        pytest.raises(CheckpointError, match=r"changed while it was read|became shorter|no such file"),
        listen_to_progress(change),
    ):
        untie(path, tmp_path / "b")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_rewrite_discards_result_that_breaks_rule_or_differs_from_source(tmp_path, monkeypatch):
    path = llama(tmp_path / "a")
    with pytest.raises(CheckpointError, match="the result was not kept: B011"):
        rewrite_with(path, tmp_path / "b", config={"tie_word_embeddings": False})
    write = file_writing.write_tensors

    def damage(target, *rest):
        done = write(target, *rest)
        data = bytearray(target.read_bytes())
        data[read_header(target).data_start] ^= 1
        target.write_bytes(data)
        return done

    monkeypatch.setattr(file_writing, "write_tensors", damage)
    with pytest.raises(CheckpointError, match=r"the result was not kept: .* differs from the source"):
        untie(path, tmp_path / "b")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_rewrite_discards_result_that_lacks_new_tensor(tmp_path, monkeypatch):
    path, write = llama(tmp_path / "a"), file_writing.write_tensors
    monkeypatch.setattr(
        file_writing, "write_tensors", lambda target, tensors, *rest: write(target, [*tensors][:-1], *rest)
    )
    with pytest.raises(CheckpointError, match=r"the result was not kept: .* is not stored as planned"):
        untie(path, tmp_path / "b", force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_rewrite_fails_if_another_process_takes_destination(tmp_path, monkeypatch):
    path = llama(tmp_path / "a")
    monkeypatch.setattr(engine, "verify", lambda *given: llama(tmp_path / "b"))
    with pytest.raises(CheckpointError, match="cannot get its name"):
        untie(path, tmp_path / "b")
    assert hash_files(tmp_path / "b") == hash_files(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_rewrite_removes_only_leftovers_of_dead_runs(tmp_path):
    path = llama(tmp_path / "a")
    names = {
        ".b.tiewise-999-0123abcd": False,
        ".b.tiewise-999-4567cdef": True,  # locked by a live process
        ".c.tiewise-999-0123abcd": True,  # belongs to another destination
        ".b.tiewise-old": True,
    }
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
    held = tmp_path / ".b.tiewise-999-4567cdef"
    with FileLock(f"{held}.lock"):
        untie(path, tmp_path / "b")
    assert {name: (tmp_path / name).exists() for name in names} == names
    new_folder.remove_leftovers(tmp_path / "b")
    assert not held.exists()
    assert not (tmp_path / f"{held.name}.lock").exists()


def test_rewrite_copies_files_if_links_fail(tmp_path, monkeypatch):
    path = llama(tmp_path / "a", shards=2)
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EXDEV, "Invalid cross-device link")))
    monkeypatch.setattr(new_folder, "fcntl", None)
    receipt = untie(path, tmp_path / "b")
    assert receipt.linked == ()
    name = next(name for name in receipt.copied if name.endswith(".safetensors"))
    assert (tmp_path / "b" / name).read_bytes() == (path / name).read_bytes()
    assert not os.path.samefile(path / name, tmp_path / "b" / name)


# provenance


def test_provenance_records_operations_and_differs_only_in_time(tmp_path):
    def operations(to):
        return json.loads((tmp_path / to / "tiewise.json").read_text())["operations"]

    path = llama(tmp_path / "a", shards=2)
    for source, verb_, to in (("a", untie, "b"), ("a", untie, "c"), ("b", tie, "d")):
        verb_(tmp_path / source, tmp_path / to)
    assert hash_without_times(tmp_path / "b") == hash_without_times(tmp_path / "c")
    first, second = operations("d")
    assert [first] == operations("b")
    assert (first["command"], first["added"], first["source"]["name"]) == ("untie", ["lm_head.weight"], "a")
    flag = {"tie_word_embeddings": True}
    assert (second["command"], second["dropped"], second["config"]) == ("tie", ["lm_head.weight"], flag)
    digest = hashlib.sha256((path / "config.json").read_bytes()).hexdigest()
    assert first["source"]["sha256"]["config.json"] == digest
    (path / "tiewise.json").write_text("not json")  # an unrelated file of that name is replaced
    untie(path, tmp_path / "e")
    assert len(operations("e")) == 1


@pytest.mark.parametrize(
    ("old", "names", "ordered"),
    [
        (["a", "c", "d"], ["d", "b", "a"], ["a", "b", "d"]),  # a sorted index stays sorted
        (["d", "a"], ["a", "b", "d"], ["d", "a", "b"]),  # new names come last
    ],
)
def test_in_old_order_keeps_order_of_index(old, names, ordered):
    assert _in_old_order(names, old) == ordered
