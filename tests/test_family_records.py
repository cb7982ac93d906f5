"""Test that every command uses the one record of a family, and that all report an unknown family alike."""

import ast
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from rich.console import Console
from safetensors.numpy import load_file, save_file

import tiewise
from tiewise.checkpoint.audit_view import audit_view
from tiewise.checkpoint.claims import class_ends
from tiewise.checkpoint.families import FAMILIES, family
from tiewise.checkpoint.family_record import ConfigKeys, Family, FamilyEnds, class_defaults, family_data, read_with
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.loader_columns import LLAMA_CPP_NAMED
from tiewise.core.errors import CheckpointError, InstallError, PlanError
from tiewise.inspection.sections.first_mlp import first_block
from tiewise.inspection.tables.open_path import open_path
from tiewise.planning.built_counts import count_on_meta
from tiewise.planning.model_families import READERS
from tiewise.planning.plan_rows import certainty_sentence
from tiewise.planning.read_config import read

ROOT = Path(tiewise.__file__).parent
UNKNOWN = "acme is a family that tiewise does not know"
V, D = 24, 8
SIZES = {"hidden_size": D, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
USUAL = ("model.embed_tokens.weight", "lm_head.weight")  # names of the two ends that most families have
ODD = ("core.symbols.weight", "core.readout.weight")  # names that no list has
OURS = {"tiewise", "tiewise-rnn", "tiewise-albert"}
REMOTE_CODE = {"nemotron_parse", "nemotron3_5_transcribe", "kimi_k2"}  # transformers has no class of these types


def write_checkpoint(folder, tensors, **config):
    """Write a checkpoint with a random table for each name, and its config."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    save_file({name: draw.normal(size=(V, D)).astype(np.float32) for name in tensors}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"vocab_size": V, **config}))
    return folder


def write_acme(folder, tensors=USUAL[:1], tied=True, **config):
    """Write a checkpoint of an unknown family."""
    return write_checkpoint(folder, tensors, model_type="acme", tie_word_embeddings=tied, **config)


def names_of(kind):
    """Return the names under which the main class of a family stores its two ends."""
    ends = class_ends(kind, None)
    if ends is None or ends.output is None or not ends.inputs:
        return USUAL
    return [f"{ends.disk.get(end, end)}.weight" for end in (ends.inputs[0], ends.output)]


# keys that the class itself requires
WITHOUT_DEFAULT = {"lfm2_moe": {"layer_types": ["full_attention"] * 32}}


# every record, for every consumer


@pytest.mark.parametrize("kind", FAMILIES)
def test_plan_counts_family_exactly_or_reports_why_not(kind):
    known = FAMILIES[kind]
    if known.reader is not None:
        assert known.reader.name in READERS
        assert kind in class_defaults() or known.written_keys is not None
        sizes = WITHOUT_DEFAULT.get(kind, {}) if known.written_keys is None else {"vocab_size": V, **SIZES}
        sizes_read = read({"model_type": kind, **sizes})
        assert not sizes_read.estimated
        assert not sizes_read.not_counted
        return
    sizes_read = read({"model_type": kind, "vocab_size": V, **SIZES})
    assert sizes_read.estimated
    says = f"{kind} is not a family that tiewise counts exactly"
    assert sizes_read.not_counted or any(says in note for note in sizes_read.notes)


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind not in ("tiewise", "kyutai_speech_to_text")])
def test_inspect_applies_final_norm_or_reports_why_not(kind, tmp_path):
    known = FAMILIES[kind]
    folder = open_folder(write_checkpoint(tmp_path / "m", names_of(kind), model_type=kind, hidden_size=D))
    if known.final_norm is not None and known.final_norm.stored:
        with pytest.raises(CheckpointError, match=rf"the final norm \S*{known.final_norm.norm}\.weight is not stored"):
            open_path(folder)
        return
    text = open_path(folder).notes[0]
    assert text.startswith("layer norm applied" if known.final_norm else "the final norm of a model")


@pytest.mark.parametrize("kind", FAMILIES)
def test_first_block_uses_first_mlp_of_family_or_refuses(kind):
    class Model(torch.nn.Module):
        config = transformers.PretrainedConfig(model_type=kind)
        base_model = torch.nn.Module()

    Model.config.model_type = kind
    says = "has no layers" if FAMILIES[kind].first_mlp is not None else "the first MLP of .* is not known"
    with pytest.raises(InstallError, match=says):
        first_block(Model())


@pytest.mark.parametrize("kind", FAMILIES)
def test_family_record_has_classes_or_is_tokenless(kind):
    known = family(kind)
    assert known is FAMILIES[kind]
    assert known.model_type == kind
    assert known.has_ends or known.is_tokenless or kind in OURS | REMOTE_CODE
    assert known.llama_cpp in LLAMA_CPP_NAMED
    assert known.vllm in ("", "no head", "own head")
    assert known.sglang in ("", "dropped head")
    assert known.unit_table in ("", "scaled", "not scaled", "scaled if tied")


def test_family_has_facts_for_every_family_of_transformers():
    generated = [*family_data()["families"], *family_data()["tokenless"]]
    assert len(generated) > 700
    assert all(family(kind).has_facts for kind in generated)
    assert family("llama").ends.classes["LlamaForCausalLM"].output == "lm_head"


@pytest.mark.parametrize("kind", ["acme", "", None, 5, ["llama"], {}])
def test_family_returns_empty_record_for_unknown_type(kind):
    assert not family(kind).has_facts
    assert not family(kind).is_headless
    assert family(kind).ends == FamilyEnds()
    assert family(kind).keys == ConfigKeys()


SEVERAL_TYPES = {  # modules that name several model types for another reason than a fact of each
    "planning/model_families.py": "one reader of several families",
    "training/kinds/decoder.py": "bodies that `train` builds",
    "training/kinds/seq2seq.py": "bodies that `train` builds",
    "training/settings.py": "bodies that `train` builds",
}


def test_no_other_module_has_a_table_of_families():
    modules = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            of = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
            texts = {part.value for part in of if isinstance(part, ast.Constant) and isinstance(part.value, str)}
            if len(texts & FAMILIES.keys()) > 1:
                modules.add(path.relative_to(ROOT).as_posix())
    assert modules == SEVERAL_TYPES.keys()


# an unknown family


def test_plan_reports_estimates_for_unknown_family():
    plan = tiewise.plan({"model_type": "acme", "vocab_size": V, **SIZES})
    assert certainty_sentence(plan.record()).startswith(f"{UNKNOWN}. ≈: estimated")
    assert plan.record()["model"]["notes"][0].startswith(f"{UNKNOWN}. Only attention and ffn matrices")


def test_plan_refuses_unknown_family_without_sizes():
    with pytest.raises(PlanError, match=f"^{UNKNOWN}: the config has no hidden_size or d_model; .*sizes: vocab, width"):
        tiewise.plan({"model_type": "acme", "vocab_size": V, "dim": D})
    with pytest.raises(PlanError, match=f"^{UNKNOWN}, and transformers has no class of this type"):
        count_on_meta({"model_type": "acme", "vocab_size": V})


def test_plan_reports_unknown_family_and_uncounted_parts():
    record = tiewise.plan({"model_type": "acme", "vocab_size": V, **SIZES, "num_experts": 4}).record()
    assert certainty_sentence(record).startswith(f"{UNKNOWN}. No total: ")


@pytest.mark.parametrize(("names", "source"), [(USUAL, "usual names"), (ODD, "shapes")])
def test_check_reports_unknown_family_and_source_of_its_ends(names, source, tmp_path):
    audit = tiewise.check(write_acme(tmp_path / "m", names, tied=False))
    screen = io.StringIO()
    Console(file=screen, width=300).print(audit_view(audit))
    assert f"{UNKNOWN}: its ends were identified by {source}" in screen.getvalue()
    assert audit.outcomes[0].sentence == f"{UNKNOWN}: its own code decides."


def test_inspect_reports_unknown_family_and_applies_no_final_norm(tmp_path):
    path = open_path(open_folder(write_acme(tmp_path / "m")))
    assert path.notes[0].startswith(f"{UNKNOWN}: no final norm is applied")


def test_first_block_refuses_unknown_family():
    class Model(torch.nn.Module):
        config = transformers.PretrainedConfig()

    Model.config.model_type = "acme"
    with pytest.raises(InstallError, match=f"^{UNKNOWN}"):
        first_block(Model())


class AcmeConfig(transformers.LlamaConfig):
    """Config of an unknown family."""

    model_type = "acme"


class AcmeForCausalLM(transformers.LlamaForCausalLM):
    """Model of the unknown family."""

    config_class = AcmeConfig


def test_install_accepts_unknown_family_and_notes_it():
    model = AcmeForCausalLM(AcmeConfig(vocab_size=V, **SIZES))
    link = tiewise.install(model, "tied")
    assert link.notes[0].startswith(f"{UNKNOWN}: its ends come from the model's own methods")
    assert UNKNOWN in repr(link)
    link.untie()
    table_in, table_out = link.tables()
    assert table_in is not table_out
    assert torch.equal(table_in, table_out)


def test_install_adds_no_note_for_known_family():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=V, **SIZES))
    assert tiewise.install(model).notes == ()


def test_untie_and_tie_use_usual_names_and_note_unknown_family(tmp_path):
    untied = tiewise.untie(write_acme(tmp_path / "m"), tmp_path / "untied")
    assert untied.notes[0] == f"{UNKNOWN}: the two ends were identified by usual names, {USUAL[0]} and {USUAL[1]}"
    tensors = load_file(tmp_path / "untied" / "model.safetensors")
    np.testing.assert_array_equal(tensors[USUAL[0]], tensors[USUAL[1]])
    tied = tiewise.tie(tmp_path / "untied", tmp_path / "tied")
    assert tied.notes[0].startswith(f"{UNKNOWN}: the two ends")
    assert load_file(tmp_path / "tied" / "model.safetensors").keys() == {USUAL[0]}


def test_repair_and_resize_note_unknown_family(tmp_path):
    source = write_checkpoint(tmp_path / "m", ODD[:1], model_type="acme")  # it lacks the flag, so repair writes it
    assert tiewise.repair(source, tmp_path / "repaired").notes[0].startswith(f"{UNKNOWN}: the two ends")
    assert (
        tiewise.checkpoint.resize(source, tmp_path / "longer", vocab=V + 8)
        .notes[0]
        .startswith(f"{UNKNOWN}: the two ends")
    )


@pytest.mark.parametrize("verb", ["untie", "tie"])
def test_verbs_refuse_head_without_known_name_and_suggest_install(verb, tmp_path):
    source = write_acme(tmp_path / "m", ODD[:1])
    with pytest.raises(CheckpointError) as refused:
        getattr(tiewise.checkpoint, verb)(source, tmp_path / "new")
    text = str(refused.value)
    assert f"{UNKNOWN}: its config says that the head is the input table" in text
    assert "tiewise.install(model" in text
    assert "without a token head" not in text
    assert not (tmp_path / "new").exists()


def test_untie_refuses_known_class_without_head(tmp_path):
    source = write_checkpoint(tmp_path / "m", ["embed_tokens.weight"], model_type="llama", architectures=["LlamaModel"])
    with pytest.raises(CheckpointError, match="no output head is stored, so untie has nothing to change"):
        tiewise.untie(source, tmp_path / "new")


# a new row is all that a family needs


def test_one_row_makes_a_family_known_to_every_command(tmp_path, monkeypatch):
    llama = FAMILIES["llama"]
    row = Family(
        "acme",
        read_with("llama"),
        final_norm=llama.final_norm,
        first_mlp=llama.first_mlp,
        written_ends=llama.ends,
        written_keys=llama.keys,
    )
    monkeypatch.setitem(FAMILIES, "acme", row)
    of_acme = read({"model_type": "acme", "vocab_size": V, **SIZES})
    of_llama = read({"model_type": "llama", "vocab_size": V, **SIZES})
    assert (of_acme.total, of_acme.estimated) == (of_llama.total, False)
    folder = write_acme(tmp_path / "m", architectures=["LlamaForCausalLM"])
    assert tiewise.check(folder).claims.has_family_data
    assert tiewise.untie(folder, tmp_path / "new").notes == ()
