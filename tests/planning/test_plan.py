"""Test `plan` on every kind of model description, and the input that it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.checkpoint import saved_models

from tiewise.checkpoint.families import FAMILIES
from tiewise.core.errors import CheckpointError, PlanError, SpecError, TiewiseError
from tiewise.planning import catalogue
from tiewise.planning.built_counts import count_on_meta
from tiewise.planning.costs import Setting
from tiewise.planning.plan import plan
from tiewise.planning.plan_rows import columns, lookup_tables, main_rows, model_in_words, operations, rows
from tiewise.planning.read_config import Sizes, read

READERS = sorted(kind for kind, one in FAMILIES.items() if one.reader is not None and one.written_keys is None)

CONFIG = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12}


def totals(plan_result):
    return [choice["parameters"]["total"] for choice in plan_result.choices]


def test_plan_is_the_same_for_every_description_of_a_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    paths = [tmp_path, tmp_path / "config.json"]
    described = ["gpt2", CONFIG, *paths, *map(str, paths), catalogue.find("gpt2"), read(CONFIG)]
    assert {totals(plan(each))[0] for each in described} == {124_439_808}


def test_plan_lists_choices_in_the_order_of_its_arguments():
    gpt2_choices = plan("gpt2", ("untied", "tied", "factored:128", "tied"), ("none", "all"))
    expected = [(boundary, share) for boundary in ("untied", "tied", "factored:128") for share in ("none", "all")]
    assert [(choice["boundary"], choice["share"]) for choice in gpt2_choices.choices] == expected
    untied, tied = gpt2_choices.choices[0], gpt2_choices.choices[2]
    assert (untied["saved"], tied["saved"]) == (0, 50257 * 768)
    assert tied["saved_share"] == 50257 * 768 / totals(gpt2_choices)[0]
    assert str(gpt2_choices.architecture.boundary) == "tied"


def test_record_serialises_to_json_and_its_parameters_sum_to_the_total():
    setting = Setting(2, 128, "bfloat16", 8, 4)
    record = json.loads(json.dumps(plan("albert-base-v2", setting=setting).record(), allow_nan=False))
    assert record["model"]["share"] == "all"
    for choice in record["choices"]:
        parameters = dict(choice["parameters"])
        total, active = parameters.pop("total"), parameters.pop("active")
        assert parameters.pop("trainable") == total
        assert 0 < active <= total
        assert total == sum(parameters.values())
        assert choice["checkpoint_bytes"]["float32"] == 4 * total
        named = [rank["layout"] for rank in choice["ranks"]]
        kept_and_stock = ["fsdp, tables kept sharded", "stock tensor parallel"]
        assert named == ["data parallel", "fsdp", "vocabulary parallel", *kept_and_stock]


@pytest.mark.parametrize("row", [row for row in catalogue.models() if row.parameters], ids=lambda row: row.name)
def test_plan_counts_catalogue_models_of_supported_families_exactly(row):
    architecture = plan(row, arms=()).architecture
    if row.family in READERS:
        assert architecture.total == row.parameters
    else:
        assert architecture.estimated


def test_plan_of_sizes_alone_is_an_estimate():
    for row in (row for row in catalogue.models() if not row.config and row.vocab):
        estimate = plan(row, arms=()).architecture
        assert estimate.estimated
        assert estimate.notes
    estimate = plan(Sizes(32_000, 1024, 12, heads=16))
    assert estimate.architecture.estimated
    # untied: 216,530,944 = 2·V·D + 12 layers · 12·D², rounded to three digits
    assert totals(estimate) == [184_000_000, 217_000_000]
    assert estimate.choices[0]["saved"] == 32_768_000


def test_plan_refuses_to_share_layers_of_a_built_unknown_family():
    config = {"model_type": "codegen", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 16}
    built = count_on_meta(config | {"rotary_dim": 4})
    assert totals(plan(built))[1] == built.total
    with pytest.raises(PlanError, match="layers one by one; leave share out"):
        plan(built, share=("all",))
    for wrong in ({"model_type": "nothing_known"}, {**config, "n_head": 5}, {"model_type": "vit"}):
        with pytest.raises(PlanError):
            count_on_meta(wrong)


REFUSED = [(text, plan, TiewiseError) for text in ("[1]", "null", "{", '{"model_type": ["x"]}', '{"text_config": {}}')]
REFUSED += [('{"vocab_size": 1e400}', plan, TiewiseError)]
REFUSED += [('{"model_type": "llama", "vocab_size": -3}', plan, PlanError)]
REFUSED += [("{}", lambda _: plan(Path("/nowhere")), CheckpointError)]
REFUSED += [("{}", lambda _: plan("gpt2", ("tied",), ("all:groups=13",)), SpecError)]
REFUSED += [("{}", lambda _: plan(Sizes(100, 64, layers=1.5)), PlanError)]


@pytest.mark.parametrize(("text", "call", "error"), REFUSED)
def test_plan_refuses_invalid_input_in_one_line_with_a_remedy(tmp_path, text, call, error):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(error) as caught:
        call(tmp_path)
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def gpt2_plan():
    return plan("gpt2", ("tied", "untied", "factored:128"), ("none", "all"), Setting(2, 128, world=8, tp=4))


def notes_of(*arguments):
    return plan(*arguments).record()["notes"]


def test_rows_have_a_cell_for_each_choice_and_components_sum_to_the_total(gpt2_plan):
    assert len(columns(gpt2_plan.record())) == 6
    shown = rows(gpt2_plan.record())
    assert {len(row) for row in shown} == {1, 7}
    names = [row[0] for row in shown if len(row) == 1]
    assert names[0] == "parameters"
    assert names[-5:-2] == ["data parallel: 8 replicas", "fsdp: 8 shards", "vocabulary parallel: tp 4 × 2 replicas"]
    assert names[-2:] == ["fsdp, tables kept sharded: 8 shards", "stock tensor parallel: tp 4 × 2 replicas"]
    first = next(i for i, row in enumerate(shown) if row[0] == "total")
    numbers = [[int(c.replace(",", "").replace("–", "0")) for c in row[1:]] for row in shown[1 : first + 1]]
    assert [sum(column) for column in zip(*numbers[:-1], strict=True)] == numbers[-1] == totals(gpt2_plan)


def test_repr_of_a_plan_shows_its_table(gpt2_plan):
    assert "gpt2" not in {model["name"] for model in gpt2_plan.record()["neighbours"]}
    record, lines = gpt2_plan.record(), repr(gpt2_plan).splitlines()
    answer = record["recommendation"]["sentences"]
    assert lines[: len(answer) + 1] == [*answer, model_in_words(record)]
    header = lines[len(answer) + 1]
    assert header.split()[-6:] == ["factored:128,", "share", "none", "factored:128,", "share", "all"]
    for name, *cells in main_rows(record):
        (line,) = [line for line in lines if line.split() == [*name.split(), *" ".join(cells).split()]][:1]
        assert len(line) == len(header) or not cells


def test_plan_of_one_rank_shows_no_layouts_and_no_single_sharing():
    record = plan("gpt2").record()
    assert not any("of 1" in name or "parallel" in name for name, *_ in rows(record))
    assert columns(record) == ["tied", "untied"]
    assert columns(plan("gpt2", share=("none", "all")).record())[1] == "tied\nshare all"


def test_notes_recommend_gathering_or_keeping_the_tables():
    (few,) = [line for line in notes_of("gpt2", ["tied"], None, Setting(1, 512, world=8)) if "FSDP over" in line]
    assert few.startswith(
        "tied, FSDP over 8 ranks: keep the tables sharded to send less. Gathered tables send 270 MB a "
    )
    # 8 · 6,283 rows of 768 · 2 · 4 bytes, over a token's 4 · 768 · 4 (states) + 16 (ids, targets) + 8 · 8 (loss) bytes
    limit = f"Sharded tables send less below {8 * (6283 * 6144 // 12368):,} tokens a step; this plan has 4,096."
    assert limit in notes_of("gpt2", ["tied"], None, Setting(1, 512, world=8))
    (taken,) = [
        line for line in notes_of("gpt2", ["tied"], None, Setting(world=8, tp=2, fsdp=4)) if "tiewise train" in line
    ]
    assert taken == "`tiewise train` on 8 processes uses fsdp × vocabulary parallel: 4 shards × tp 2."
    (many,) = [line for line in notes_of("gpt2", ["tied"], None, Setting(8, 512, world=8)) if "FSDP over" in line]
    assert "gather the tables to send less" in many
    for alone in (Setting(), Setting(world=8, fsdp=1)):
        assert not any("FSDP over" in line for line in notes_of("gpt2", ["tied"], None, alone))


def test_notes_name_every_unknown_fact(monkeypatch):
    about = model_in_words(plan("opt-350m").record())
    assert about == "opt-350m: vocabulary 50,272, width 1,024, tables of width 512, 24 layers; as it is: tied"
    assert "sharing all" in model_in_words(plan("albert-base-v2").record())
    assert any("only matrices are counted" in line for line in notes_of(Sizes(1000, 64, 2)))
    assert any("No source says whether" in line for line in notes_of("starcoder2-15b"))
    assert not any("catalogue" in line or "No source" in line for line in notes_of("gpt2"))
    other = replace(plan(Sizes(1000, 64, 2)), name="gpt2").record()["notes"]
    assert "The catalogue gives gpt2 124,439,808 parameters; this plan estimates 162 k." in other
    named = replace(catalogue.find("gemma-4-e2b"), name="acme-31b")  # a row without a config
    monkeypatch.setattr(catalogue, "models", lambda: (named,))
    assert any("gives 31 billion parameters" in line for line in notes_of("acme-31b"))


def test_plan_counts_a_schedule_at_its_first_step():
    assert totals(plan("gpt2", ["tied+untie_at=400"])) == [124_439_808]
    assert any("counted as it is at the start" in line for line in notes_of("gpt2", ["tied+untie_at=400"]))
    assert not any("at the start" in line for line in notes_of("gpt2"))


def test_thresholds_state_the_ratios_that_they_depend_on():
    record = plan(Sizes(32_000, 1024, 12)).record()
    thresholds = lookup_tables(record)[0]
    assert thresholds.header[0].startswith("V/d = 31.25, c = B/d² ≈ 144,")
    estimated = {name: value for name, value, _ in thresholds.rows}
    assert estimated["V/d above which tying saves more than 30 %"] == "≈ 108"
    assert estimated["share of the untied model that tying saves"] == "≈ 0.151"
    exact = {name: value for name, value, _ in lookup_tables(plan("gpt2").record())[0].rows}
    assert exact["share of the untied model that tying saves"] == "0.2367"  # 38,597,376 / 163,037,184


def test_plan_describes_a_model_without_a_head_as_one_table():
    headless = plan({"model_type": "bert", "architectures": ["BertModel"]})
    record = headless.record()
    assert model_in_words(record).endswith("as it is: one table and no head")
    assert {choice["saved"] for choice in headless.choices} == {0}
    assert record["model"]["boundary"] is None
    thresholds = lookup_tables(record)[0]
    assert thresholds.header[0].startswith("V/d = 39.74, c = B/d² = ")
    texts = [*record["notes"], *(name for name, _, _ in thresholds.rows)]
    assert [line for line in texts if "tying" in line] == []
    assert [line for line in texts if "nothing to tie" in line] != []
    assert record["recommendation"]["sentences"] == ["Nothing to tie: this model class has no output head."]


@pytest.mark.parametrize(("value", "text"), [(15.5e9, "15.5 GFLOP"), (999.6e3, "1 MFLOP"), (3e15, "3 PFLOP")])
def test_operations_prints_flop_counts_with_unit_prefixes(value, text):
    assert operations(value) == text


SIZES = {"vocab_size": 64, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
LONGCAT = SIZES | {"model_type": "longcat_flash_ngram", "ngram_vocab_size_ratio": 5.5}
LONGCAT |= {"emb_split_num": 2, "emb_neighbor_num": 4}


@pytest.mark.parametrize("name", ["Gemma3nForCausalLM", "Gemma4ForCausalLM"])
def test_per_layer_tables_count_like_those_of_transformers(name):
    model = saved_models.tiny(name)
    held = {key: value.numel() for key, value in model.named_parameters() if "per_layer" in key and "norm" not in key}
    config, table = model.config.to_dict(), held["model.embed_tokens_per_layer.weight"]
    counted, built = read(config).around["other_tables"], count_on_meta(config)
    assert counted.parameters == sum(held.values())
    assert counted.multiplied == counted.parameters - table
    assert built.around["other_tables"].parameters == table
    assert built.around["other_tables"].multiplied == 0  # `other` counts its projection
    whole = sum(count.parameters for count in built.around.values()) + built.ends.vocab * built.ends.width
    assert whole == sum(value.numel() for value in model.parameters())


def test_n_gram_tables_are_counted_one_by_one():
    count, each = read(LONGCAT).around["other_tables"], 24 // 6
    tables = [(352 + 2 * i + 1) * each for i in range(6)]
    assert count.parameters == sum(tables) + 6 * each * 24
    assert (count.multiplied, count.read) == (6 * each * 24, 6 * each + 6 * each * 24)
    with pytest.raises(PlanError, match="24 is not a multiple of 10"):
        read(LONGCAT | {"emb_split_num": 5, "emb_neighbor_num": 3})
    assert read(LONGCAT | {"hidden_size": 10**12, "emb_split_num": 10**6, "emb_neighbor_num": 10**6 + 1, "head_dim": 4})


def test_read_counts_no_other_tables_without_their_config_keys():
    llama = SIZES | {"model_type": "llama"}
    assert "other_tables" not in read(llama).around
    gemma = SIZES | {"model_type": "gemma4_text", "num_key_value_heads": 1, "hidden_size_per_layer_input": 0}
    assert "other_tables" not in read(gemma).around
    assert not any("further tokens" in note for note in read(llama).notes)
    assert any("further tokens" in note for note in read(llama | {"num_nextn_predict_layers": 1}).notes)


def test_plan_accepts_sizes_and_setting_as_keywords():
    sizes = {"vocab": 32_000, "width": 2048, "layers": 24, "heads": 16, "gated": True}
    setting = Setting(2, 128, "bfloat16", world=8, tp=4, std=0.01, fsdp=2)
    by_keywords = plan(**sizes, batch=2, length=128, dtype="bfloat16", init=0.01, world=8, tp=4, fsdp=2)
    assert by_keywords.record() == plan(Sizes(**sizes), setting=setting).record()
    assert plan("gpt2", width=1024, layers=24, heads=16).record()["model"]["name"] == "like gpt2"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, r"a NoneType cannot be planned; give a name of the catalogue.*tiewise\.plan\(vocab=32_000"),
        ({"vocab_size": 10}, r"no argument 'vocab_size'; did you mean vocab\? help\(tiewise\.plan\) lists all"),
        ({"model": "gpt2", "lenght": 10}, "no argument 'lenght'; did you mean length?"),
        ({"vocab": "10", "width": 4, "layers": 1}, "vocab = '10'; vocab must be a whole number from 1 to"),
        ({"model": "gpt2", "width": "1024"}, "width = '1024'; width must be a whole number"),
        ({"vocab": 10, "width": 4, "layers": 1, "gated": "yes"}, "gated = 'yes'; gated must be True or False"),
        ({"vocab": 10, "width": 4}, "layers missing; sizes need vocab, width and layers"),
        ({"model": "gpt2", "gated": True}, "gated does not apply to gpt2, whose class decides it"),
        ({"model": "gpt2", "kv_heads": 4}, "gpt2 has no size kv_heads; leave kv_heads out"),
        (
            {"model": {"model_type": "gpt2"}, "width": 8},
            "width with a dict as the model; change the sizes in its config",
        ),
        ({"model": "gpt2", "batch": 1.5}, "batch = 1.5; it must be a whole number, 1 or more"),
        ({"model": "gpt2", "init": "small"}, "init='small'; give a positive number"),
        ({"model": "gpt2", "dtype": "bf16"}, "dtype = 'bf16'; did you mean bfloat16"),
        ({"model": "gpt2", "setting": Setting(), "tp": 2}, r"both setting and tp are given; .*Setting\(tp="),
    ],
)
def test_plan_refuses_wrong_keywords_and_shows_the_right_ones(arguments, said):
    with pytest.raises(PlanError, match=said):
        plan(**arguments)
