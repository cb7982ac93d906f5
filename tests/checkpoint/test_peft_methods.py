"""Compare the findings on adapters of every method of PEFT with the loads and merges of PEFT itself."""

import copy
import functools
import inspect
import shutil
import warnings
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft", exc_type=ImportError)
transformers = pytest.importorskip("transformers")

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tiny_classes import TEXT_CONFIGS  # noqa: E402

import tiewise  # noqa: E402
from tiewise.checkpoint.audit import check  # noqa: E402
from tiewise.checkpoint.peft_methods import METHODS  # noqa: E402
from tiewise.core.errors import CheckpointError  # noqa: E402

CONFIGS = {kind.value: config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
OPTIONS = {"r": 4, "vector_length": 4, "topk": 2, "num_vectors": 8, "n_frequency": 10, "block_size": 4}
OPTIONS |= {"boft_block_size": 4, "oft_block_size": 4, "num_virtual_tokens": 3, "encoder_hidden_size": 8}
OPTIONS |= {"adapter_layers": 1, "adapter_len": 2, "total_step": 10, "token_indices": [1, 3], "num_tasks": 1}
OPTIONS |= {"cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 1], "theta_d_length": 8}
OPTIONS |= {"u": 4, "num_subspaces": 2, "subspace_rank": 1, "effective_rank": 2, "group_size": 8}
OPTIONS |= {"shadow_num_hidden_layers": 1, "encoder_num_layers": 1, "feedforward_modules": [], "task_type": "CAUSAL_LM"}
LACKING = {"OFT": ["r"], "BOFT": ["r"], "PREFIX_TUNING": ["encoder_hidden_size"]}  # options that exclude others
BLOCKS = {"SHADOW": ["model.layers.0"], "ADAPTION_PROMPT": "self_attn"}  # targets of methods that change whole layers
NOT_BUILT = {"XLORA": "it needs stored LoRA adapters", "ADAMSS": "it needs scikit-learn"}
BUILT = sorted(CONFIGS.keys() - NOT_BUILT.keys())
ON_THE_BASE = ("B060", "B061", "B062", "B063")
CHANGES_BOTH, TWO_TABLES = "changes the other end too", "makes two tables, and leaves tie_word_embeddings true"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def base(request, tmp_path_factory):
    """Return the folder of a tiny Llama."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = TEXT_CONFIGS["llama"](tie_word_embeddings=request.param)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@functools.cache
def read_once(base):
    """Return the model of a folder, which no test changes."""
    return transformers.LlamaForCausalLM.from_pretrained(base)


def loaded(base):
    """Return the model of a folder for a test that changes it."""
    return copy.deepcopy(read_once(base))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Return a function that saves an adapter of the queries once, and returns its folder, which no test changes."""

    @functools.cache
    def adapter(base, kind):
        folder = tmp_path_factory.mktemp("stored")
        save(trained(base, config_of(kind, ["q_proj"])), folder)
        return folder

    return adapter


def config_of(kind, targets, **more):
    """Return the settings of one method, with those of `OPTIONS` that it has."""
    known = inspect.signature(CONFIGS[kind]).parameters
    chosen = OPTIONS | {"target_modules": BLOCKS.get(kind, targets)}
    options = {key: value for key, value in chosen.items() if key in known and key not in LACKING.get(kind, ())}
    return CONFIGS[kind](**options | more)


def trained(base, config):
    """Return a PEFT model whose new parameters are random."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(loaded(base), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.3)
    return model


def save(model, folder, **how):
    """Save an adapter without its model card, which takes half of the time and which no command reads."""
    card = mock.patch.object(peft.PeftModel, "create_or_update_model_card")
    with warnings.catch_warnings(), card:
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, **how)


def reloaded(base, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT warns of missing keys
        warnings.filterwarnings("ignore", message="(?!Found missing adapter keys)")
        return peft.PeftModel.from_pretrained(loaded(base), folder)


def findings(folder, base, *rules):
    return check(folder, base=base, select=rules, build=False).findings


def test_every_method_of_the_installed_peft_is_known():
    assert METHODS.keys() == CONFIGS.keys()


@pytest.mark.parametrize("kind", BUILT)
def test_b062_accepts_adapters_that_peft_loads(tmp_path, base, stored, kind):
    adapter = stored(base, kind)
    save(reloaded(base, adapter), tmp_path)
    tensors, again = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, tmp_path))
    assert tensors.keys() == again.keys() != set()
    assert all(torch.equal(tensor, again[name]) for name, tensor in tensors.items())
    assert findings(adapter, base, *ON_THE_BASE) == ()


@pytest.mark.parametrize("kind", [kind for kind in BUILT if METHODS[kind].prefix])
def test_b062_reports_modules_of_another_base(tmp_path, base, stored, kind):
    shutil.copytree(stored(base, kind), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "adapter_model.safetensors"
    tensors = {name.replace("model.layers.", "model.blocks."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    found = findings(tmp_path, base, "B062")
    if any(name.startswith("base_model.model.") for name in tensors):
        assert [one.severity for one in found] == ["error"]
        assert "model.blocks." in found[0].evidence
    else:  # only shared tensors
        assert found == ()


def test_b062_makes_no_claim_on_an_unknown_method(tmp_path, base, stored):
    shutil.copytree(stored(base, "LOHA"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "adapter_config.json"
    file.write_text(file.read_text().replace("LOHA", "NEWER"))
    assert findings(tmp_path, base, *ON_THE_BASE) == ()


def merge(base, folder):
    """Return PEFT's merge, None if PEFT refuses it."""
    try:
        return reloaded(base, folder).merge_and_unload()
    except (AttributeError, NotImplementedError, ValueError):
        return None


HEAD_TARGETS = [kind for kind in BUILT if METHODS[kind].prefix and kind not in ("ADAPTION_PROMPT", "SHADOW")]


@pytest.mark.parametrize("kind", HEAD_TARGETS)
def test_b060_says_what_a_merge_of_peft_does_to_a_changed_head(tmp_path, base, kind):
    adapter = tmp_path / "adapter"
    save(trained(base, config_of(kind, ["lm_head"])), adapter)
    before, merged = read_once(base), merge(base, adapter)
    assert METHODS[kind].merges == (merged is not None)
    found = findings(adapter, base, "B060")
    if merged is None or not before.config.tie_word_embeddings or kind == "TRAINABLE_TOKENS":
        assert found == ()
        return
    is_shared = merged.lm_head.weight is merged.model.embed_tokens.weight
    is_changed = not torch.equal(merged.model.embed_tokens.weight, before.model.embed_tokens.weight)
    assert is_shared == is_changed == (CHANGES_BOTH in found[0].evidence)
    assert (not is_shared) == (TWO_TABLES in found[0].evidence)
    assert merged.config.tie_word_embeddings is True
    assert ("tiewise adapter merge" in found[0].repair) == (kind == "LORA")
    if kind != "LORA":
        with pytest.raises(CheckpointError, match="not LORA"):
            tiewise.checkpoint.merge(adapter, tmp_path / "merged", base=base)
        untied = tmp_path / "untied"
        tiewise.checkpoint.untie(base, untied)
        in_two_tables = merge(untied, adapter)
        wanted = logits(reloaded(base, adapter))
        torch.testing.assert_close(logits(in_two_tables), wanted, rtol=1e-4, atol=1e-4)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(8)[None]).logits


BOTH_TARGETS = ["HIRA", "OFT", "TINYLORA"]  # methods of nn.Linear and nn.Embedding, besides LoRA


@pytest.mark.parametrize("kind", BOTH_TARGETS)
def test_b060_reports_updates_of_both_ends_of_a_tied_base(tmp_path, base, kind):
    save(trained(base, config_of(kind, ["embed_tokens", "lm_head"])), tmp_path / "both")
    found = findings(tmp_path / "both", base, "B060")
    assert len(found) == read_once(base).config.tie_word_embeddings
    for one in found:
        assert "applies both updates to the one table" in one.evidence
        tiewise.checkpoint.untie(base, tmp_path / "untied")
        single, double = merge(tmp_path / "untied", tmp_path / "both"), merge(base, tmp_path / "both")
        for table in (single.lm_head.weight, single.model.embed_tokens.weight):
            assert not torch.allclose(double.lm_head.weight, table, atol=1e-4)


@pytest.mark.parametrize("kind", ["ADALORA", "LOHA", "VERA"])
def test_b063_names_the_option_of_peft_that_leaves_out_the_copied_table(tmp_path, base, kind):
    model = trained(base, config_of(kind, ["lm_head"]))
    save(model, tmp_path / "fat")
    (found,) = findings(tmp_path / "fat", base, "B063")
    assert "repeats a table of the base (1.54 kB)" in found.evidence
    assert found.repair == "save it again with save_pretrained(…, save_embedding_layers=False)"
    save(model, tmp_path / "slim", save_embedding_layers=False)
    assert findings(tmp_path / "slim", base, "B063") == ()
    assert torch.equal(logits(reloaded(base, tmp_path / "slim")), logits(reloaded(base, tmp_path / "fat")))


VARIANTS = [
    {"layer_replication": [[0, 2], [1, 2]]},
    {"init_lora_weights": "pissa"},
    {"velora_config": peft.tuners.lora.config.VeloraConfig()},
    {"monteclora_config": peft.tuners.lora.config.MontecloraConfig()},
]


@pytest.mark.parametrize("setting", VARIANTS, ids=str)
def test_no_command_refuses_the_lora_adapter_that_it_is_offered_for(tmp_path, base, setting):
    config = config_of("LORA", ["q_proj", "lm_head"], r=2, **setting)
    save(trained(base, config), tmp_path)
    found = findings(tmp_path, base, "B060", "B062")
    assert len(found) == read_once(base).config.tie_word_embeddings
    assert all("tiewise adapter merge" not in one.repair for one in found)


def test_b060_is_silent_on_a_lora_adapter_that_peft_does_not_merge(tmp_path, base):
    save(trained(base, config_of("LORA", ["lm_head"], alora_invocation_tokens=[1])), tmp_path)
    assert merge(base, tmp_path) is None
    assert findings(tmp_path, base, "B060", "B062") == ()


def test_b060_judges_an_adapter_without_tensors_as_peft_does(tmp_path, base):
    """OSF changes linear layers only, and stores nothing for an embedding."""
    save(trained(base, config_of("OSF", ["embed_tokens"])), tmp_path)
    assert findings(tmp_path, base, *ON_THE_BASE) == ()
    before, merged = read_once(base), merge(base, tmp_path)
    assert torch.equal(before.model.embed_tokens.weight, merged.model.embed_tokens.weight)
