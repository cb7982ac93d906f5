"""Test that a script repairs broken checkpoints by the lines of `check --format agent` alone.

The folders are those of the tables of rules and of `tests/answers/faults.py` on which an error is reported. Their own
files suffice to repair a folder if no tensor is lost, the owner has no choice, and no program code has to change. A
person wrote down which folders these are: rows whose repair is safe, and the names below.
"""

import itertools
import json
import os
import random
import shlex
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_rules_integrity import FIRES as INTEGRITY
from test_rules_quantised import FIRES as QUANTISED
from test_rules_token_tables import BROKEN as TOKEN_TABLES
from test_rules_tying import FIRES as TYING
from test_rules_types_and_rows import FIRES as TYPES_AND_ROWS
from tests.answers.faults import FAULTS
from tiny_checkpoints import D, V, bpe_tokenizer, table, write_checkpoint, written
from typer.testing import CliRunner

from tiewise.checkpoint.claims import FLAG
from tiewise.cli.main import command_line

TABLES = {
    "integrity": INTEGRITY,
    "quantised": QUANTISED,
    "token tables": TOKEN_TABLES,
    "tying": TYING,
    "types and rows": TYPES_AND_ROWS,
}
MOST_COMMANDS, MOST_CHARACTERS = 3, 2000
DRAWN, SEED = 20, 0
# rows (rules, severity, place) whose first finding has no safe repair, and that are repaired all the same: by another
# file name, by the safe repair of the cause, by new rows for ids that have none
OTHERWISE = {
    "B002 error weights.safetensors",
    "B080 B012 warning a",
    "B017 error model.embed_tokens_per_layer.weight",
    "B017 error model.layers.1.embed_tokens.weight",
    "B031 fatal tokenizer.json",
    "B031 error tokenizer.json",
    "B034 error image_token_index",
    "B034 error image_token_id",
    "B034 error visual_indicator_token_ids",
    "B034 error text_config.image_token_id",
}
# rows whose safe repair leaves an error: a flag that is no boolean and no head; a head that SGLang reads without scale
NOT_ALONE = {"B020 B011 warning tie_word_embeddings", "B054 B052 error quantization_config.ignore"}
TRUE_AS_TEXT = {"config": {"tie_word_embeddings": "true"}}  # such a flag says what the tensors show
LOST_SCALE = " has weight\n"  # end of a row's words on integers without their scale
REPAIRABLE_FAULTS = ["b002-moved", "b012-rows", "b012-noise", "b016", "b017", "b020", "b031", "b033", "b041-zero"]
REPAIRABLE_FAULTS += ["b050", "b050-said", "b054"]


class Broken(NamedTuple):
    """A broken folder: the function that writes it, and whether its own files suffice to repair it."""

    write: object
    is_repairable: bool


def _broken_rows():
    """Return {name: broken folder} of the rows of all tables."""
    rows = {}
    for name_of_table, cases in TABLES.items():
        for number, (names, severity, where, is_safe, how, *words) in enumerate(cases):
            key = f"{names} {severity} {where}"
            leaves_error = key in NOT_ALONE or any(text.endswith(LOST_SCALE) for text in words)
            if how == TRUE_AS_TEXT:
                leaves_error = False
            is_repairable = (is_safe and not leaves_error) or key in OTHERWISE
            rows[f"{name_of_table} {number}"] = Broken(lambda path, how=how: written(path, how), is_repairable)
    return rows


def _broken_faults():
    """Return {name: broken folder} of the faults with an error or worse."""
    return {name: Broken(write, name in REPAIRABLE_FAULTS) for name, write in FAULTS.items() if "outside" not in name}


POOL = _broken_rows() | _broken_faults()


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIEWISE_NO_VERIFY_LOAD", "1")
    monkeypatch.setenv("COLUMNS", "80")


class Script:
    """The script: it knows the grammar of the last line, and counts commands and characters."""

    def __init__(self):
        self.commands, self.characters, self.path = 0, 0, ""

    def run(self, line):
        """Run one command line as a shell does; return its exit code and its output."""
        self.commands += 1
        words = shlex.split(line)
        if words[0] == "mv":
            os.rename(*words[2:])
            return 0, ""
        assert words[0] == "tiewise"
        done = CliRunner().invoke(command_line(words[1:]), words[1:])
        output = done.output
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            output += f"tiewise: {done.exception}\n"
        self.characters += len(output)
        return done.exit_code, output

    def follow(self, path):
        """Check a folder and run the commands of the last lines; return the last check's exit code and last line."""
        self.path = path
        while True:
            code, output = self.run(f"tiewise check {shlex.quote(self.path)} --format agent")
            last = output.splitlines()[-1]
            assert last.startswith("repair=")
            if last.startswith("repair=none reason=") or code == 0:
                return code, last
            command = last.removeprefix("repair=")
            done, said = self.run(command)
            assert done == 0, (command, said)
            words = shlex.split(command)
            if "--to" in words:
                self.path = words[words.index("--to") + 1]


def broken_names(is_repairable):
    """Return the names of the folders of one kind, in the order that the seed draws."""
    names = sorted(name for name, broken in POOL.items() if broken.is_repairable is is_repairable)
    random.Random(SEED).shuffle(names)
    return names


def write_broken(name):
    """Write a folder; return its path, or None if `check` finds no error in it."""
    path = name.replace(" ", "-")
    POOL[name].write(Path(path))
    code, _ = Script().run(f"tiewise check {path}")
    return path if code == 1 else None


def stored(folder):
    """Return the bytes of every tensor of a folder, as the format of safetensors describes them."""
    tensors = []
    for path in Path(folder).glob("*.safetensors"):
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        offsets = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        tensors += [raw[8 + size + start : 8 + size + end] for start, end in offsets]
    return tensors


def assert_repaired(path):
    """Follow the lines of a broken folder, and check that they repair it and lose no byte of a tensor."""
    before = stored(path)
    script = Script()
    code, last = script.follow(path)
    assert code == 0, (path, last)
    assert script.commands <= MOST_COMMANDS
    assert script.characters <= MOST_CHARACTERS
    after = stored(script.path)
    for tensor in before:  # equal, or with new rows
        assert any(one.startswith(tensor) for one in after), path


def test_script_repairs_twenty_drawn_folders(tmp_path):
    paths = filter(None, map(write_broken, broken_names(is_repairable=True)))
    for path in itertools.islice(paths, DRAWN):
        assert_repaired(path)
    assert len(list(tmp_path.iterdir())) > DRAWN


@pytest.mark.slow
@pytest.mark.parametrize("name", broken_names(is_repairable=True))
def test_script_repairs_every_folder_that_can_be_repaired(name):
    path = write_broken(name)
    if path is not None:
        assert_repaired(path)


TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
HEAD_ALONE = {TABLE: None, HEAD: table()}


@pytest.mark.parametrize(
    "how",
    [
        {"tensors": {TABLE: None, f"_orig_mod.{TABLE}": table(), HEAD: table()}},
        {"tensors": {TABLE: None, f"module.{TABLE}": table(), HEAD: table()}, "config": {FLAG: 1}},
        {"tensors": HEAD_ALONE, "tokenizer": bpe_tokenizer(V + 3)},
        {"tensors": HEAD_ALONE, "config": {"vocab_size": V + 3}},
    ],
    ids=["wrapped table, equal head", "no flag", "head alone, further tokens", "head alone, other vocab_size"],
)
def test_script_repairs_two_faults_of_one_table(how):
    assert Script().run(f"tiewise check {written(Path('model'), how)}")[0] == 1
    script = Script()
    assert script.follow("model")[0] == 0
    (file,) = Path(script.path).glob("*.safetensors")
    stored_tables = load_file(file)
    assert HEAD not in stored_tables
    assert np.array_equal(stored_tables[TABLE][:V], table())


def of_class(name, model_type, tensors, **keys):
    """Return a function that writes a tied folder of a class with these tables, by name."""
    config = {"architectures": [name], "model_type": model_type, "vocab_size": V, "hidden_size": D, FLAG: True}
    return lambda path: write_checkpoint(path, config | keys, tensors)


@pytest.mark.parametrize("wrapper", ["_orig_mod", "module._orig_mod", "base_model.model"])
@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("head", [table(), table(seed=1)], ids=["equal head", "other head"])
def test_script_repairs_complete_model_inside_wrapper(wrapper, flag, head):
    """torch.compile, and PEFT after a merge, put a prefix before the names of every tensor."""
    tensors = {TABLE: None, HEAD: None, f"{wrapper}.{TABLE}": table(), f"{wrapper}.{HEAD}": head}
    assert Script().run(f"tiewise check {written(Path('model'), {'tensors': tensors, 'config': {FLAG: flag}})}")[0] == 1
    assert_repaired("model")


def test_repair_leaves_names_of_adapter_that_is_not_merged():
    prefixed = {f"base_model.model.{name}": table() for name in (TABLE, HEAD, "model.embed_tokens.lora_A.weight")}
    how = {"tensors": {TABLE: None, HEAD: None, **prefixed}, "config": {FLAG: False}}
    written(Path("model"), how)
    assert Script().follow("model")[1].startswith("repair=none reason=B010 needs you: rename it")


@pytest.mark.parametrize("wrapper", ["", "_orig_mod."])
def test_script_keeps_equal_head_of_t5_whose_flag_is_false(wrapper):
    """For T5, false also means that nothing is scaled before the head, and transformers 4 reads the head then."""
    tensors = {f"{wrapper}shared.weight": table(), f"{wrapper}lm_head.weight": table()}
    config = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "vocab_size": V, "d_model": D}
    write_checkpoint(Path("model"), config | {FLAG: False}, tensors)
    script = Script()
    assert script.follow("model")[0] == 0
    (file,) = Path(script.path).glob("*.safetensors")
    assert load_file(file).keys() == {"shared.weight", "lm_head.weight"}
    assert json.loads(Path(script.path, "config.json").read_text())[FLAG] is False


OTHER = table(seed=1)
TEXT = {"model_type": "qwen2", "vocab_size": V, "hidden_size": D}


@pytest.mark.parametrize(
    "how",
    [
        of_class(
            "MvpForConditionalGeneration",
            "mvp",
            {"model.shared.weight": table(), "model.decoder.embed_tokens.weight": OTHER},
            **{FLAG: "true"},
        ),
        of_class(
            "SeamlessM4TForSpeechToText",
            "seamless_m4t",
            {"shared.weight": table(), "text_decoder.embed_tokens.weight": OTHER},
            **{FLAG: "true"},
        ),
        of_class(
            "FSMTForConditionalGeneration",
            "fsmt",
            {
                "model.encoder.embed_tokens.weight": table(),
                "model.decoder.embed_tokens.weight": table(),
                "model.decoder.output_projection.weight": OTHER,
            },
            tgt_vocab_size=V,
            src_vocab_size=V,
        ),
        of_class(
            "GPT2LMHeadModel",
            "gpt2",
            {"transformer.wte.weight": table(), "extra.weight": OTHER},
            **{"n_embd": D, "image_token_id": V + 3},
        ),
        of_class("BambaForCausalLM", "bamba", {f"language_model.{HEAD}": table()}),
        of_class(
            "Ovis2ForConditionalGeneration",
            "ovis2",
            {"model.language_model.embed_tokens.weight": table(), HEAD: table(V + 8)},
            **{"vocab_size": V + 8, "text_config": TEXT, "visual_indicator_token_ids": [V + 9], FLAG: False},
        ),
    ],
    ids=["mvp", "seamless", "fsmt", "matrix without role", "bamba in another model", "ovis with two sizes"],
)
def test_script_gets_no_command_that_refuses(how):
    """`Script.follow` fails if an offered command does. Nothing is written, so no tensor is lost."""
    how(Path("model"))
    _, output = Script().run("tiewise check model --format agent")
    assert "severity=" in output
    assert Script().follow("model")[1].startswith("repair=none reason=B")


def test_last_line_gives_a_reason_for_every_other_folder():
    paths = list(filter(None, map(write_broken, broken_names(is_repairable=False))))
    assert len(paths) > 60
    for path in paths:
        script = Script()
        _, last = script.follow(path)
        assert last.startswith("repair=none reason=B"), (path, last)
        assert script.commands <= MOST_COMMANDS
        assert script.characters <= MOST_CHARACTERS
