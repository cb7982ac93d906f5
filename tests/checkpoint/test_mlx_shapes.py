"""Test the shapes of tables that mlx-lm's models need. Slow tests load the tables with mlx-lm."""

from pathlib import Path

import pytest
import torch
from test_loaders_by_family import write_saved
from test_mlx_runs import mlx_outcome, whole_models  # noqa: F401 - the fixture applies to this file

from tiewise.checkpoint import loader_columns as columns
from tiewise.checkpoint.family_record import mlx_data
from tiewise.checkpoint.mlx_runs import MlxRun
from tiewise.checkpoint.mlx_shapes import MlxEndShapes
from tiewise.checkpoint.stored import Stored

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
RESHAPED = {
    "half the width": lambda table: table[:, ::2],
    "twice the width": lambda table: table.repeat(1, 2),
    "a row less": lambda table: table[:-1],
    "8 rows more": lambda table: torch.cat([table, table[:8]]),
    "transposed": lambda table: table.T,
    "flat": lambda table: table.flatten(),
    "a third axis": lambda table: table[None],
    "a scalar": lambda table: table[0, 0],
    "as it is": lambda table: table,
}


def packed_at(bits, group_size):
    """Return a change that packs a table and the scales of it, and writes the section that has other numbers."""

    def change(checkpoint, name):
        rows, width = checkpoint.tensors[name].shape
        module = name.removesuffix(".weight")
        checkpoint.tensors[name] = torch.randint(0, 2**31, (rows, width * bits // 32)).to(torch.uint32)
        for part in ("scales", "biases"):
            checkpoint.tensors[f"{module}.{part}"] = torch.ones(rows, max(width // group_size, 1))
        checkpoint.config["quantization"] = {"group_size": 32, "bits": 4}

    return change


def reshaped(how):
    """Return a change of one table's shape."""
    return lambda checkpoint, name: checkpoint.tensors.update({name: RESHAPED[how](checkpoint.tensors[name])})


def with_fewer_rows_of(part):
    """Return a change that packs a table, and removes a row of its numbers, scales or biases."""

    def change(checkpoint, name):
        packed_at(4, 32)(checkpoint, name)
        part_name = name.removesuffix("weight") + part
        checkpoint.tensors[part_name] = checkpoint.tensors[part_name][:-1]

    return change


CHANGES = {
    **{how: reshaped(how) for how in RESHAPED},
    **{f"packed at {bits} bits": packed_at(bits, 32) for bits in (2, 3, 7, 8)},
    "packed in groups of 16": packed_at(4, 16),
    **{f"packed, a row less of {part}": with_fewer_rows_of(part) for part in ("weight", "scales", "biases")},
}

RECORD = MlxRun(**mlx_data()["families"]["llama"])
COMPOSITE = MlxRun(**mlx_data()["families"]["gemma3"])
SIZES = {"vocab_size": 99, "hidden_size": 32}
AFFINE = {"quantization": {"group_size": 64, "bits": 4}}


def stored(name, dtype, *shape):
    return Stored(name, Path("model.safetensors"), dtype, shape, 0, 0)


def misfit(*tensors, config=SIZES, run=RECORD):
    by_name = {tensor.name: tensor for tensor in tensors}
    return MlxEndShapes(run, config, by_name).misfit([*run.inputs, *run.heads])


@pytest.mark.parametrize(
    ("shape", "fits"),
    [((99, 32), True), ((99, 16), False), ((98, 32), False), ((32, 99), False), ((3168,), False), ((1, 99, 32), False),
     ((), False)],
)  # fmt: skip
def test_plain_table_has_the_shape_of_the_config(shape, fits):
    for name in (TABLE, HEAD):
        sentence = misfit(stored(name, "F32", *shape))
        assert sentence == (None if fits else f"{name} has the shape {list(shape)}, and its model [99, 32].")


# bits and numbers a scale, and whether mlx packs them so
@pytest.mark.parametrize(
    ("bits", "group_size", "is_packable"),
    [(1, 32, True), (4, 32, True), (4, 64, True), (8, 128, True), (7, 32, False), (4, 16, False), (16, 32, False)],
)
def test_packed_table_has_bits_and_groups_that_mlx_packs(bits, group_size, is_packable):
    parts = [stored(TABLE, "U32", 99, 128 * bits // 32)]
    parts += [stored(f"model.embed_tokens.{part}", "F16", 99, 128 // group_size) for part in ("scales", "biases")]
    sentence = misfit(*parts, config=SIZES | AFFINE | {"hidden_size": 128})
    assert (sentence is None) == is_packable


@pytest.mark.parametrize("wrong", ["weight", "scales", "biases"])
def test_every_part_of_a_packed_table_has_its_rows(wrong):
    columns_of = {"weight": ("U32", 4), "scales": ("F16", 1), "biases": ("F16", 1)}
    parts = []
    for part, (dtype, width) in columns_of.items():
        parts.append(stored(f"lm_head.{part}", dtype, 99 - (part == wrong), width))
    assert f"lm_head.{wrong} has the shape [98, " in misfit(*parts, config=SIZES | AFFINE)
    assert misfit(*parts).endswith("its model has no lm_head.scales.")  # without a section it unpacks nothing


def test_rows_of_a_composite_are_those_of_the_level_that_its_class_reads():
    """Gemma 3 in mlx-lm takes the rows from the root, and the width from the text part."""
    (name,) = COMPOSITE.inputs
    table = stored(name, "F32", 99, 32)
    config = {"vocab_size": 99, "text_config": {"vocab_size": 70, "hidden_size": 32}}
    assert misfit(table, config=config, run=COMPOSITE) is None
    assert misfit(table, config=config | {"vocab_size": 70}, run=COMPOSITE) is not None


def test_absent_size_is_the_recorded_default_or_not_compared():
    (name,) = COMPOSITE.inputs
    table = stored(name, "F32", 99, 32)
    config = {"text_config": {"vocab_size": 99, "hidden_size": 32}}
    assert "[262208, 32]" in misfit(table, config=config, run=COMPOSITE)
    assert misfit(stored(TABLE, "F32", 99, 16), config={"vocab_size": 99}) is None


def test_table_in_another_mode_or_with_its_own_entry_is_not_compared():
    parts = [stored(TABLE, "U32", 99, 4), stored("model.embed_tokens.scales", "U8", 99, 2)]
    assert misfit(*parts, config=SIZES | AFFINE) is None
    parts[1] = stored("model.embed_tokens.scales", "F16", 99, 1)
    of_its_own = {"model.embed_tokens": {"group_size": 32, "bits": 8}}
    assert misfit(*parts, config=SIZES | {"quantization": AFFINE["quantization"] | of_its_own}) is None
    in_another_layout = stored(TABLE, "U8", 1584, 1)
    assert misfit(in_another_layout, config=SIZES | {"quantization_config": {"quant_method": "bitsandbytes"}}) is None


MALFORMED = ("32", 0, -32, True, 32.0, None, [32])


@pytest.mark.parametrize("value", MALFORMED)
@pytest.mark.parametrize("key", SIZES)
def test_size_must_be_a_positive_whole_number(key, value):
    assert f"for {key}." in misfit(config=SIZES | {key: value})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gptj", "mistral3"])
def test_mlx_lm_refuses_malformed_sizes(kind, tmp_path_factory):
    pytest.importorskip("mlx_lm")
    from observed_loads import observe_mlx

    def with_size(path, value):
        def change(checkpoint):
            *levels, key = path.split(".")
            level = checkpoint.config
            for name in levels:
                level = level[name]
            level[key] = value

        return change

    for path in mlx_data()["families"][kind]["shape"]:
        for value in MALFORMED:
            folder = tmp_path_factory.mktemp("model")
            write_saved(folder, kind, with_size(path, value), flag=False, tables=columns.DIFFERENT)
            assert observe_mlx(folder, None, None).error, (path, value)


def write_changed(path, kind, flag, end, change):
    """Write a family's untied tiny model with one end changed; return the names and values of both."""
    written = []

    def changed(checkpoint):
        for name in getattr(checkpoint, end):
            CHANGES[change](checkpoint, name)
        written.append(checkpoint)

    write_saved(path, kind, changed, flag=flag, tables=columns.DIFFERENT)
    (checkpoint,) = written
    return checkpoint


# a head that is dropped, refused or read whatever the flag; sizes under other keys, and of two levels
FAMILIES = ("llama", "glm4_moe_lite", "gemma2", "gemma3", "helium", "gptj", "mistral3")


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("end", ["inputs", "heads"])
def test_mlx_lm_loads_changed_table_as_predicted(kind, end, tmp_path_factory):
    pytest.importorskip("mlx_lm")
    from observed_loads import observe_mlx

    for change in CHANGES:
        for flag in (True, False):
            path = tmp_path_factory.mktemp("model")
            checkpoint = write_changed(path, kind, flag, end, change)
            predicted = mlx_outcome(path)
            seen = observe_mlx(path, checkpoint.stored(checkpoint.inputs), checkpoint.stored(checkpoint.heads))
            assert predicted.outcome in seen.outcomes, (change, flag, predicted.sentence, seen)


# family, flag, changed end, change, outcome of mlx-lm 0.32.2
SEEN = [
    ("llama", True, "heads", "flat", columns.DROPPED),
    ("llama", False, "heads", "flat", columns.ERROR),
    ("llama", True, "inputs", "packed at 8 bits", columns.DROPPED),
    ("llama", False, "inputs", "packed at 7 bits", columns.ERROR),
    ("glm4_moe_lite", False, "heads", "half the width", columns.ERROR),
    ("gemma3", True, "heads", "transposed", columns.ERROR),
    ("helium", True, "heads", "packed at 8 bits", columns.DROPPED),
]


@pytest.mark.parametrize(("kind", "flag", "end", "change", "outcome"), SEEN)
def test_predict_compares_shape_of_changed_table(tmp_path, kind, flag, end, change, outcome):
    write_changed(tmp_path, kind, flag, end, change)
    assert mlx_outcome(tmp_path, builds=False).outcome == outcome
