"""Test B023 and B090 on model code, with transformers running the code as the oracle of B023."""

import warnings

import pytest
from rule_runs import run_rule
from tiny_checkpoints import llama

from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.rules.code_classes import MOST_BYTES, read_code
from tiewise.checkpoint.rules.custom_code import auto_map

HEAD = """import torch
from transformers import PreTrainedConfig, PreTrainedModel


class TinyConfig(PreTrainedConfig):
    model_type = "tiewise_tiny"

    def __init__(self, vocab_size=24, hidden_size=8, CONFIG**kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        super().__init__(**kwargs)


class TinyPreTrainedModel(PreTrainedModel):
    config_class = TinyConfig
    base_model_prefix = "model"


class TinyModel(TinyPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.post_init()


class TinyForCausalLM(TinyPreTrainedModel):
KEYS
    def __init__(self, config):
        super().__init__(config)
        self.model = TinyModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head
METHOD"""
RIGHT = '_tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}'
OLD = """
    def tie_weights(self):
        self.lm_head.weight = self.model.embed_tokens.weight
"""
NEW = OLD.replace("(self)", "(self, missing_keys=None, recompute_mapping=True)")
AUTO = {"AutoConfig": "modeling_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}


def source(keys=RIGHT, method="", config=""):
    return HEAD.replace("CONFIG", config).replace("KEYS", f"    {keys}\n" if keys else "").replace("METHOD", method)


def save_code(path, code, tied=True, auto=AUTO, **config):
    config = {"model_type": "tiewise_tiny", "auto_map": auto} | config
    folder = llama(path, tied, config=config)
    for name, text in ({"modeling_tiny.py": code} if isinstance(code, str | bytes) else code).items():
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def load_model(path, text):
    """Run a source that the test wrote and return its loaded model."""
    space = {"__name__": "tiewise_tiny_source"}
    exec(compile(text, "modeling_tiny.py", "exec"), space)
    return space["TinyForCausalLM"].from_pretrained(path, config=space["TinyConfig"].from_pretrained(path))


def is_tied(path, text):
    model = load_model(path, text)
    return model.lm_head.weight is model.model.embed_tokens.weight


MISNAMED = ("_tied_weight_keys", "_tie_weights_keys", "_dynamic_tied_weights_keys", "tied_weights_keys")
HEALTHY = [
    {"code": source()},
    {"code": source("", NEW)},  # ties by its own method
    {"code": source(RIGHT, OLD.replace("(self)", "(self, **kwargs)"))},
    {"code": source(""), "tied": False},
    {"code": source("_tied_weights_keys = ['a']"), "auto": None},  # no auto_map uses this code
    {"code": source() + '\nPATTERN = "\\d"\n'},  # Python warns of this escape
    *({"code": source(f'{RIGHT}\n    {name} = ["lm_head.weight"]')} for name in MISNAMED),
]


@pytest.mark.filterwarnings("ignore:.*invalid escape")  # the test itself compiles the code
@pytest.mark.parametrize("how", HEALTHY)
def test_b023_is_silent_on_code_that_ties(tmp_path, how):
    path = save_code(tmp_path, **how)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_rule("B023", path) == []
    assert "auto" in how or is_tied(path, how["code"]) == how.get("tied", True)


NO_KEYS = "object has no attribute 'keys'"
SIGNATURE = "def tie_weights(self, missing_keys=None, recompute_mapping=True):"
# source, reported line, words of the evidence, suggested code, error of loading; without one it loads untied
BROKEN = [
    (source('_tied_weights_keys = ["lm_head.weight"]'), "_tied_weights_keys", f"'list' {NO_KEYS}", RIGHT, NO_KEYS),
    (source('_tied_weights_keys: list = ("lm_head.weight",)'), "_tied_weights_keys", "", RIGHT, NO_KEYS),
    *((source(f'{name} = ["lm_head.weight"]'), name, f"sets {name}", RIGHT, "") for name in MISNAMED),
    (source(""), "class TinyForCausalLM", "has get_output_embeddings and no _tied_weights_keys", RIGHT, ""),
    (source(RIGHT, OLD), "def tie_weights", "", SIGNATURE, r"tie_weights\(\) got an unexpected keyword argument"),
]


@pytest.mark.parametrize(("text", "line", "evidence", "fix", "stops"), BROKEN)
def test_b023_reports_code_that_fails_to_tie(tmp_path, text, line, evidence, fix, stops):
    path = save_code(tmp_path, text)
    (found,) = run_rule("B023", path)
    number = next(number for number, words in enumerate(text.splitlines(), 1) if line in words)
    assert (found.rule, found.severity, found.where) == ("B023", "error", f"modeling_tiny.py:{number}")
    assert evidence in found.evidence
    assert found.repair == f"write: {fix}"
    if stops:
        with pytest.raises((AttributeError, TypeError), match=stops):
            load_model(path, text)
    else:
        assert not is_tied(path, text)


@pytest.mark.parametrize("text", [text for text, *_, stops in BROKEN if stops == NO_KEYS])
def test_b023_warns_of_key_list_that_prevents_saving_untied_model(tmp_path, text):
    untied = save_code(tmp_path / "untied", text, tied=False)
    assert [found.severity for found in run_rule("B023", untied)] == ["warning"]
    model = load_model(untied, text)
    with pytest.raises(AttributeError, match=NO_KEYS):
        model.save_pretrained(tmp_path / "out")


def test_b023_accepts_tied_keys_of_base_class(tmp_path):
    text = source("").replace("(TinyPreTrainedModel):\n\n    def __init__", "(Above):\n    def __init__")
    above = "from transformers import PreTrainedModel\nclass Above(PreTrainedModel):\n    " + RIGHT + "\n"
    assert "(Above)" in text
    assert run_rule("B023", save_code(tmp_path / "m", {"modeling_tiny.py": text, "above.py": above})) == []
    assert run_rule("B023", save_code(tmp_path / "n", text)) == []  # a class outside the folder may define them


def test_b023_warns_of_config_class_without_tie_default(tmp_path):
    path = save_code(tmp_path / "m", source(), tie_word_embeddings=None)
    (found,) = run_rule("B023", path)
    assert (found.severity, found.where) == ("warning", "modeling_tiny.py:5")
    assert "tie_word_embeddings=True among the arguments of TinyConfig" in found.repair
    assert not is_tied(path, source())
    declared = source(config="tie_word_embeddings=True, ").replace(
        "super().__init__(**kwargs)", "super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)"
    )
    path = save_code(tmp_path / "n", declared, tie_word_embeddings=None)
    assert run_rule("B023", path) == []
    assert is_tied(path, declared)


NO_PYTHON = ["class Config(:", f"Config = {'-' * 200_000}1", f"Config = {'(' * 5000}", f"Config = {'1+' * 100_000}1"]
NO_PYTHON += ["Config = 1\0", b"Config = '\xff\xfe'"]
UNREAD = [*((text, "cannot be read as Python") for text in NO_PYTHON), ("# Config\n" + "#" * MOST_BYTES, "bytes")]


@pytest.mark.parametrize(("text", "says"), UNREAD)
def test_b023_warns_of_unreadable_code_files(tmp_path, text, says):
    path = save_code(tmp_path / "m", {"modeling_tiny.py": source(), "other.py": text})
    (found,) = run_rule("B023", path)
    assert (found.severity, found.where) == ("warning", "other.py")
    assert says in found.evidence
    assert "\n" not in found.evidence


def test_b023_never_runs_code(tmp_path):
    mark = tmp_path / "ran"
    text = f"open({str(mark)!r}, 'w')\nclass Config: pass\n"
    run_rule("B023", save_code(tmp_path / "m", {"modeling_tiny.py": text, "__init__.py": text}))
    assert not mark.exists()


def test_read_code_follows_no_links_outside_folder(tmp_path):
    (tmp_path / "secret.py").write_text("class Config(:")
    path = save_code(tmp_path / "m", source())
    (path / "linked.py").symlink_to(tmp_path / "secret.py")
    assert "a link to a file outside" in read_code(open_folder(path))[1][0].problem


@pytest.mark.parametrize(
    "entries", [None, 3, [], {"AutoModel": 3}, {"AutoModel": ["a", None]}, {"AutoModel": "a--b.C"}]
)
def test_auto_map_ignores_malformed_entries(entries):
    assert auto_map({"auto_map": entries}) == {}


def test_b023_reports_code_beyond_limit_as_unread(tmp_path):
    chain = "".join(f"class C{i}(C{i + 1}): tie_weights = 1\n" for i in range(2200))
    files = {f"part{number}.py": chain.replace("C", f"C{number}_") for number in range(20)}
    path = save_code(tmp_path / "m", {"modeling_tiny.py": source()} | files)
    found = run_rule("B023", path)
    assert found
    assert all("more code than any model has" in finding.evidence for finding in found)


NORM_HEAD = """import torch
from torch import nn
from torch.nn import functional as F


class NormHead(nn.Module):
    def __init__(self, hidden_size, vocab_size):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, hidden_states):
        return F.linear(hidden_states, nn.functional.normalize(self.weight))
"""
NORMALISES = {  # file, and the reported class
    "as Baichuan 2 has it": (NORM_HEAD, "NormHead"),
    "by its name alone": ("class NormHead:\n    pass\n", "NormHead"),
    "by what it does": (NORM_HEAD.replace("NormHead", "OutputHead"), "OutputHead"),
    "its data": (NORM_HEAD.replace("NormHead", "Head").replace("self.weight))", "self.weight.data, dim=-1))"), "Head"),
    "a model": (NORM_HEAD.replace("NormHead", "XForCausalLM").replace("(self.weight)", "(self.lm_head.weight)"),
                "XForCausalLM"),
}  # fmt: skip


@pytest.mark.parametrize("case", NORMALISES)
def test_b090_names_a_head_that_normalises_its_rows(tmp_path, case):
    code, name = NORMALISES[case]
    path = llama(tmp_path / "m", tied=False, config={"model_type": "baichuan"})
    (path / "modeling_baichuan.py").write_text(code)
    (found,) = run_rule("B090", path)
    line = code[: code.index(f"class {name}")].count("\n") + 1
    assert (found.severity, found.where) == ("info", f"modeling_baichuan.py:{line}")
    assert found.evidence.startswith(f"{name} divides the rows of the head by their lengths")


def test_b090_reads_norm_head_of_the_config(tmp_path):
    for value, count in ((True, 1), (False, 0), (None, 0), ("yes", 0)):
        config = {"model_type": "bailing_moe", "norm_head": value}
        found = run_rule("B090", llama(tmp_path / str(value), tied=False, config=config))
        assert [one.where for one in found] == ["norm_head"] * count


OTHERS = {  # code that normalises something else
    "a codebook": NORM_HEAD.replace("NormHead", "Codebook"),
    "the hidden states": NORM_HEAD.replace("NormHead", "LMHead").replace("normalize(self.weight)", "normalize(x)"),
    "a norm before a head": "class LayerNormHeadless:\n    pass\n\n\nclass Head:\n    pass\n",
    "nothing that can be read": NORM_HEAD + "def (:",
}


@pytest.mark.parametrize("case", OTHERS)
def test_b090_is_silent_on_code_that_normalises_something_else(tmp_path, case):
    path = llama(tmp_path / "m", tied=False)
    (path / "modeling_x.py").write_text(OTHERS[case])
    assert run_rule("B090", path) == []
