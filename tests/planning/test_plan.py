"""`plan` from every kind of description, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tiewise.core.errors import CheckpointError, PlanError, SpecError, TiewiseError
from tiewise.planning import catalogue
from tiewise.planning.costs import Tokens, World
from tiewise.planning.plan import Setting, plan
from tiewise.planning.read_config import READERS, Sizes, count_on_meta, read

CONFIG = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12}


def test_every_description_of_one_model_gives_one_plan(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    described = [
        "gpt2",
        CONFIG,
        tmp_path,
        tmp_path / "config.json",
        str(tmp_path),
        str(tmp_path / "config.json"),
        catalogue.find("gpt2"),
        read(CONFIG),
    ]
    totals = {plan(each).choices[0].budget.total for each in described}
    assert totals == {124_439_808}


def test_choices_stand_side_by_side_in_the_order_asked():
    found = plan("gpt2", ("untied", "tied", "factored:128", "tied"), ("none", "all"))
    assert [choice.name for choice in found.choices] == [
        f"{boundary}, share {share}" for boundary in ("untied", "tied", "factored:128") for share in ("none", "all")
    ]
    untied, tied = found.choices[0], found.choices[2]
    assert untied.saved == 0
    assert tied.saved == 50257 * 768
    assert tied.saved_share == 50257 * 768 / untied.budget.total
    assert str(found.architecture.boundary) == "tied"


def test_the_record_is_json_and_sums():
    setting = Setting(Tokens(2, 128), "bfloat16", World(8, 4))
    record = json.loads(json.dumps(plan("albert-base-v2", setting=setting).record(), allow_nan=False))
    assert record["model"]["share"] == "all"
    for choice in record["choices"]:
        parameters = dict(choice["parameters"])
        total, _ = parameters.pop("total"), parameters.pop("trainable")
        assert total == sum(parameters.values())
        assert choice["checkpoint_bytes"]["float32"] == 4 * total
        assert [rank["layout"] for rank in choice["ranks"]] == ["data parallel", "fsdp", "vocabulary parallel"]


@pytest.mark.parametrize("row", [row for row in catalogue.models() if row.parameters], ids=lambda row: row.name)
def test_every_known_family_of_the_catalogue_counts_as_recorded(row):
    architecture = plan(row, boundaries=()).architecture
    if row.family in READERS:
        assert architecture.total == row.parameters
    else:
        assert architecture.estimated


def test_a_row_known_by_sizes_alone_is_estimated():
    rows = [row for row in catalogue.models() if not row.config and row.vocab]
    for row in rows:
        found = plan(row)
        assert found.architecture.estimated
        assert found.architecture.notes


def test_sizes_alone():
    found = plan(Sizes(32_000, 1024, 12, heads=16))
    assert [choice.budget.total for choice in found.choices] == [216_530_944 - 32_768_000, 216_530_944]
    assert found.architecture.estimated


def test_an_unknown_family_is_counted_when_it_is_built():
    config = {"model_type": "codegen", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 16}
    config |= {"rotary_dim": 4, "n_ctx": 16}
    built = count_on_meta(config)
    from transformers import CodeGenConfig, CodeGenForCausalLM

    model = CodeGenForCausalLM(CodeGenConfig(**{k: v for k, v in config.items() if k != "model_type"}))
    assert built.total == sum(p.numel() for p in model.parameters())
    assert plan(built).choices[1].budget.total == built.total
    with pytest.raises(PlanError, match="not told apart"):
        plan(built, share=("all",))
    for wrong in ({"model_type": "nothing_known"}, {**config, "n_head": 5}, {"model_type": "vit"}):
        with pytest.raises(PlanError):
            count_on_meta(wrong)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: plan(Path("/nowhere")), CheckpointError),
        (lambda: plan({"model_type": "llama", "vocab_size": -3}), PlanError),
        (lambda: plan("gpt2", ("tied",), ("all:groups=13",)), SpecError),
    ],
)
def test_refusals_are_one_line_with_the_way_out(call, error):
    with pytest.raises(error) as caught:
        call()
    assert isinstance(caught.value, TiewiseError)
    assert caught.value.fix
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["[1]", "null", "{", '{"model_type": ["x"]}', '{"vocab_size": 1e400}', '{"text_config": {}}']
)
def test_a_damaged_config_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(TiewiseError):
        plan(tmp_path)


def test_planning_a_model_of_the_catalogue_imports_nothing_heavy():
    code = "import sys; from tiewise.planning.plan import plan; plan('gpt2').record(); print(sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for heavy in ("'torch'", "'transformers'", "'scipy'", "'numpy'", "'typer'"):
        assert heavy not in run.stdout
