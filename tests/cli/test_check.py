"""`tiewise check` and the rewriting verbs as a person meets them, on a checkpoint that transformers wrote."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

CONFIG = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 64,
    "n_embd": 8,
    "n_layer": 0,
    "n_head": 2,
    "n_positions": 16,
    "tie_word_embeddings": True,
}


def tiewise(*arguments, **environment):
    command = [sys.executable, "-m", "tiewise", *map(str, arguments)]
    env = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"} | environment
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    table = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    tensors = {
        "transformer.wte.weight": table,
        "transformer.wpe.weight": np.ones((16, 8), np.float32),
        "transformer.ln_f.weight": np.ones(8, np.float32),
        "transformer.ln_f.bias": np.zeros(8, np.float32),
        "lm_head.weight": table.copy(),
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    return folder


def differ(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][5] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_says_what_is_stored_twice_and_how_to_drop_it(checkpoint):
    done = tiewise("check", checkpoint)
    assert done.returncode == 0, done.stderr
    assert "identical, byte by byte; 2.05 kB stored twice" in done.stdout
    assert "B013 warning" in done.stdout
    assert f"tiewise dedupe {checkpoint} --to NEW_DIR" in " ".join(done.stdout.split())
    assert not done.stderr


def test_exits_1_on_an_error_unless_told_otherwise(checkpoint):
    differ(checkpoint)
    assert tiewise("check", checkpoint).returncode == 1
    assert tiewise("check", checkpoint, "--fail-on", "fatal").returncode == 0
    assert tiewise("check", checkpoint, "--fail-on", "never").returncode == 0
    assert tiewise("check", checkpoint, "--ignore", "B012,B08").returncode == 0
    assert tiewise("check", checkpoint, "--select", "B03").returncode == 0


def test_json_is_one_object_with_a_version(checkpoint):
    done = tiewise("check", checkpoint, "--json")
    record = json.loads(done.stdout)
    assert record["schema"] == 1
    assert record["ends"]["kind"] == "identical"
    assert record["spare_bytes"] == 64 * 8 * 4
    both = json.loads(tiewise("check", checkpoint, checkpoint, "--json").stdout)
    assert [audit["path"] for audit in both["audits"]] == [str(checkpoint)] * 2


def test_headers_alone_do_not_tell_equal_from_different(checkpoint):
    differ(checkpoint)
    done = tiewise("check", checkpoint, "--headers")
    assert done.returncode == 0
    assert "not compared (headers only)" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["/no/such/place"], "no such file or folder"),
        ([], "give a checkpoint"),
        (["--explain", "B999"], "no rule 'B999'"),
        (["{}", "--select", "B999"], "no rule 'B999'"),
        (["{}", "--fail-on", "some"], "choose one of"),
        (["{}", "--headers", "--deep"], "reads every row"),
        (["{}", "--base", "/tmp"], "not an adapter"),
    ],
)
def test_one_line_and_exit_2(checkpoint, arguments, says):
    done = tiewise("check", *(item.format(checkpoint) for item in arguments))
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_unreadable_path_does_not_keep_the_others_back(checkpoint, tmp_path):
    done = tiewise("check", tmp_path / "none", checkpoint)
    assert done.returncode == 2
    assert "no such file" in done.stderr
    assert "identical" in done.stdout


def test_explains_every_rule(checkpoint):
    listed = tiewise("check", "--explain", "all").stdout.splitlines()
    assert len(listed) >= 30
    one = tiewise("check", "--explain", "b013").stdout
    assert "What to do:" in one
    assert "Sources:" in one


def test_markup_in_names_is_printed_as_it_is(checkpoint):
    folder = checkpoint.rename(checkpoint.with_name("[red]model"))
    done = tiewise("check", folder)
    assert not done.stderr
    assert "[red]model" in done.stdout


def test_imports_neither_torch_nor_transformers(checkpoint):
    script = (
        "import sys; from tiewise.cli.main import command_line\n"
        f"command_line(['check'])(['check', {str(checkpoint)!r}], standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'safetensors.torch', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_dedupe_then_untie_gives_the_tensors_back(checkpoint, tmp_path):
    once, twice = tmp_path / "once", tmp_path / "twice"
    before = load_file(checkpoint / "model.safetensors")
    done = tiewise("dedupe", checkpoint, "--to", once)
    assert done.returncode == 0, done.stderr
    assert "largest change 0" in done.stdout
    assert "lm_head.weight" not in load_file(once / "model.safetensors")
    receipt = json.loads(tiewise("untie", once, "--to", twice, "--json").stdout)
    assert receipt["written"] == ["lm_head.weight"]
    assert receipt["logit_change"] == 0.0
    after = load_file(twice / "model.safetensors")
    assert {name: array.tobytes() for name, array in after.items()} == {n: a.tobytes() for n, a in before.items()}
    assert json.loads((twice / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_dry_run_writes_nothing(checkpoint, tmp_path):
    done = tiewise("dedupe", checkpoint, "--to", tmp_path / "new", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "would write" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_tie_of_different_tables_asks_which_to_keep(checkpoint, tmp_path):
    differ(checkpoint)
    done = tiewise("tie", checkpoint, "--to", tmp_path / "new")
    assert done.returncode == 2
    assert "--keep" in done.stderr
    assert not (tmp_path / "new").exists()
    assert tiewise("tie", checkpoint, "--to", tmp_path / "new", "--keep", "output").returncode == 0
    wanted = load_file(checkpoint / "model.safetensors")["lm_head.weight"]
    np.testing.assert_array_equal(load_file(tmp_path / "new" / "model.safetensors")["transformer.wte.weight"], wanted)


def test_an_existing_folder_is_never_written_into(checkpoint, tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine.txt").write_text("mine")
    done = tiewise("dedupe", checkpoint, "--to", tmp_path / "new")
    assert done.returncode == 2
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["mine.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "new"]


@pytest.mark.parametrize(
    ("verb", "options", "says"),
    [
        ("factor", ["--rank", "8"], "rank"),
        ("factor", ["--rank", "0"], "rank"),
        ("resize", [], "vocab"),
        ("resize", ["--vocab", "10"], "shrink"),
        ("densify", [], "plain"),
        ("repair", ["--to", "/proc/new"], "/proc"),
    ],
)
def test_a_verb_that_cannot_do_it_says_why(checkpoint, tmp_path, verb, options, says):
    to = [] if "--to" in options else ["--to", tmp_path / "new"]
    done = tiewise(verb, checkpoint, *to, *options)
    assert done.returncode == 2, done.stdout
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
