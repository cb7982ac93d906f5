"""Test the GGUF reader on handwritten and hostile bytes, and rules B070 and B071 on a file's two ends."""

import random
import struct

import numpy as np
import pytest
from gguf_writer import FORMS, gguf, info, model, numbers, opening, scalar, string, strings, text
from hostile_child import HUGE, memory_below, mutate_bytes
from rule_runs import summaries
from tiny_checkpoints import llama, table

from tiewise.checkpoint.audit import check
from tiewise.checkpoint.rules.gguf_file import BY_NUMBER, open_gguf, read_gguf
from tiewise.core.errors import CheckpointError


def save(path, data, name="m.gguf"):
    (path / name).write_bytes(data)
    return path / name


def test_read_gguf_returns_values_of_every_type_and_all_tensors(tmp_path):
    values = {"u8": 200, "i8": -3, "u16": 60000, "i16": -300, "u32": 2**31, "i32": -5, "f32": 0.5, "bool": True}
    values |= {"u64": 2**63, "i64": -(2**40), "f64": 0.1}
    keys = [(f"x.{kind}", scalar(kind, value)) for kind, value in values.items()]
    keys += [("general.alignment", scalar("u32", 64)), ("general.architecture", string("llama"))]
    keys += [("tokenizer.ggml.tokens", strings(["a", "", "ü" * 500])), ("long", string("y" * 300_000))]
    keys += [(f"array.{kind}", numbers(kind, [1, 0, 1])) for kind in FORMS]
    plain = np.arange(96, dtype=np.float32).reshape(3, 32)
    packed = bytes(range(34)) * 6  # Q8_0: 34 bytes for 32 values
    tensors = [("token_embd.weight", (32, 3), 0, plain.tobytes()), ("q", (64, 3), 8, packed), ("v", (3,), 1, b"abcdef")]
    path = save(tmp_path, gguf(keys, tensors, align=64))
    found = read_gguf(path)
    assert {key.removeprefix("x."): value for key, value in found.metadata.items() if key.startswith("x.")} == values
    assert found.metadata["general.architecture"] == "llama"
    assert found.metadata["long"] == "y" * 4096
    assert found.arrays == {f"array.{kind}": 3 for kind in FORMS} | {"tokenizer.ggml.tokens": 3}
    assert {name: (t.dtype, t.shape, t.nbytes) for name, t in found.tensors.items()} == {
        "token_embd.weight": ("F32", (3, 32), 384),
        "q": ("Q8_0", (3, 64), 204),
        "v": ("F16", (3,), 6),
    }
    data = path.read_bytes()
    assert data[found.tensors["q"].start : found.tensors["q"].end] == packed
    np.testing.assert_array_equal(found.table.read(), plain)


def test_block_sizes_match_layouts_of_ggml():
    # (values, bytes), the sum of the fields of each block in ggml-common.h
    sizes = {"Q4_0": (32, 2 + 16), "Q5_1": (32, 2 + 2 + 4 + 16), "Q8_0": (32, 2 + 32), "Q8_1": (32, 2 + 2 + 32)}
    sizes |= {"Q2_K": (256, 16 + 64 + 4), "Q3_K": (256, 32 + 64 + 12 + 2), "Q4_K": (256, 4 + 12 + 128)}
    sizes |= {"Q5_K": (256, 4 + 12 + 32 + 128), "Q6_K": (256, 128 + 64 + 16 + 2), "Q8_K": (256, 4 + 256 + 32)}
    sizes |= {"IQ4_XS": (256, 2 + 2 + 4 + 128), "TQ1_0": (256, 48 + 4 + 2), "TQ2_0": (256, 64 + 2)}
    sizes |= {"MXFP4": (32, 1 + 16), "IQ1_M": (256, 32 + 16 + 8), "BF16": (1, 2), "F64": (1, 8)}
    found = {kind.name: (kind.block, kind.nbytes) for kind in BY_NUMBER.values()}
    assert {name: found[name] for name in sizes} == sizes


def test_read_gguf_skips_vocabulary_larger_than_buffer(tmp_path):
    words = ["w" * (i % 997) for i in range(20_000)] + ["x" * 700_000]
    keys = [("tokenizer.ggml.tokens", strings(words)), ("after", scalar("u32", 7))]
    found = read_gguf(save(tmp_path, gguf(keys)))
    assert (found.tokens, found.metadata) == (20_001, {"after": 7})


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "does not begin"),
        (b"GGUF", "does not begin"),
        (opening(0, 0, magic=b"GGML"), "does not begin"),
        (opening(0, 0, version=1), "GGUF version 1"),
        (opening(0, 0, version=3 << 24), "big-endian"),
        (opening(HUGE, 0), "claims 1,152,921,504,606,846,976 tensors"),
        (opening(0, HUGE), "keys in 24 bytes"),
        (opening(0, 1) + struct.pack("<Q", HUGE) + b"\0" * 9, "claims 1,152,921,504,606,846,976 bytes"),
        (opening(0, 1) + text("k") + struct.pack("<IQ", 8, HUGE), "text k at byte"),
        (opening(0, 1) + text("k") + struct.pack("<I", 99) + b"\0" * 9, "unknown type 99"),
        (opening(0, 1) + text("k") + struct.pack("<IIQ", 9, 4, HUGE), "array k at byte"),
        (opening(0, 1) + text("k") + struct.pack("<IIQ", 9, 8, HUGE), "claims 1,152,921,504,606,846,976 texts"),
        (opening(0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 2**20), "array k at byte"),
        (opening(0, 1) + text("k") + struct.pack("<IIQQ", 9, 8, 1, HUGE), "array k at byte"),
        (opening(0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1) + b"\0" * 16, "an array of arrays"),
        (opening(0, 1) + text("k") + struct.pack("<IIQ", 9, 77, 1) + b"\0" * 16, "elements of the unknown type 77"),
        (gguf([("k", scalar("u8", 1)), ("k", scalar("u8", 1))]), "names the key k twice"),
        (gguf([("general.alignment", scalar("u32", 0))]), "general.alignment is 0"),
        (gguf([("general.alignment", scalar("u32", 33))]), "general.alignment is 33"),
        (gguf([("general.alignment", string("32"))]), "general.alignment is 32"),
        (gguf([("split.count", scalar("u32", 2**31))]), "split.count is 2147483648"),
        (gguf([], [("a", (4,), 0, b"\0" * 16)])[:-20], "ends 4 bytes before tensor a"),
        (gguf([], [("a", (4,), 0, b""), ("a", (4,), 0, b"\0" * 16)]), "names the tensor a twice"),
        (gguf([], [("a", (4,), 0, b""), ("b", (4,), 0, b"\0" * 16)]), "tensor b overlaps tensor a"),
        (gguf([], [("a", (33,), 8, b"\0" * 34)]), "no multiple of Q8_0's 32"),
        (gguf([], [("a", (32,), 31, b"\0" * 34)]), "Q4_0_4_4, which ggml has removed"),
        (gguf([], [("a", (32,), 1000, b"\0" * 34)]), "unknown type 1,000"),
        (gguf([], [("a", (2**63, 2**63), 0, b"\0" * 34)]), "the file ends"),
        (gguf([], [("a", (1, 1, 1, 1, 1), 0, b"\0" * 4)]), "claims 5 axes"),
        (opening(1, 0) + info("a", (1,), 0, HUGE) + b"\0" * 64, "the file ends"),
        (opening(1, 0) + info("a", (1,), 0, 4) + b"\0" * 64, "no multiple of 32"),
        (opening(1, 0) + text("a") + struct.pack("<I", 2**31) + b"\0" * 64, "claims 2,147,483,648 axes"),
    ],
)
def test_read_gguf_refuses_hostile_files(tmp_path, data, says):
    path = save(tmp_path, data)
    with memory_below(2**21), pytest.raises(CheckpointError, match=says) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [500, pytest.param(5000, marks=pytest.mark.slow)])
def test_read_gguf_raises_only_checkpoint_error_for_mutated_files(tmp_path, count):
    rng = random.Random(0)
    keys = [("general.alignment", scalar("u32", 32)), ("a", numbers("f32", [1, 2, 3])), ("b", scalar("f64", 0.1))]
    seed = model(head=b"\1" * 1024, keys=keys)
    seed = seed[: len(seed) - 1900]  # so that most mutations hit the header
    small = model(rows=2, head=b"\1" * 256, keys=keys)
    path, refused = tmp_path / "m.gguf", 0
    with memory_below(2**22):
        for _ in range(count):
            path.write_bytes(mutate_bytes(rng, seed if rng.random() < 0.3 else small))
            try:
                read_gguf(path)
            except CheckpointError:
                refused += 1
    assert 0.4 * count < refused < count  # some mutations leave a valid file


def test_open_gguf_reads_all_parts_of_split_file(tmp_path):
    keys = [("split.count", scalar("u16", 2)), ("tokenizer.ggml.tokens", strings(["a"] * 4))]
    raw = bytes(4 * 32 * 4)
    for number, name in ((1, "token_embd.weight"), (2, "output.weight")):
        data = gguf(keys, [(name, (32, 4), 0, raw)])
        save(tmp_path, data, f"m-{number:05d}-of-00002.gguf")
    for number in (1, 2):
        found = open_gguf(tmp_path / f"m-{number:05d}-of-00002.gguf")
        assert set(found.tensors) == {"token_embd.weight", "output.weight"}
        assert found.head.path.name == "m-00002-of-00002.gguf"
        assert found.size == 2 * len(data)
    with pytest.raises(CheckpointError, match="does not say which"):
        open_gguf(save(tmp_path, data, "renamed.gguf"))
    save(tmp_path, gguf(keys, [("token_embd.weight", (32, 4), 0, raw)]), "m-00002-of-00002.gguf")
    with pytest.raises(CheckpointError, match="lies in m-00001-of-00002"):
        open_gguf(tmp_path / "m-00001-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match="no such file"):
        open_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_open_gguf_accepts_any_storage_order_and_refuses_overlap(tmp_path):
    head = opening(2, 1) + text("general.architecture") + string("llama")
    for order, overlaps in (((1024, 0), False), ((0, 1024), False), ((992, 0), True)):
        listed = b"".join(info(name, (32, 8), 0, at) for name, at in zip((IN, OUT), order, strict=True))
        whole = head + listed
        path = save(tmp_path, whole + b"\0" * (-len(whole) % 32) + bytes(2048))
        if overlaps:
            with pytest.raises(CheckpointError, match=r"tensor token_embd\.weight overlaps tensor output\.weight"):
                open_gguf(path)
        else:
            assert [tensor.nbytes for tensor in open_gguf(path).tensors.values()] == [1024, 1024]


V, D = 8, 32


def findings(folder, data, source=None, scan=True):
    """Return the findings for a file, optionally compared with its source folder."""
    original = None if source is None else llama(folder / "source", **({"rows": V, "width": D} | source))
    return check(save(folder, data), original=original, scan=scan).findings


TIED, UNTIED = {}, {"tied": False}
LORA = gguf([("general.type", string("adapter"))], [("blk.0.attn_q.weight.lora_a", (32, 4), 0, bytes(512))])
NINE = ("tokenizer.ggml.tokens", strings(["a"] * 9))
NORM = [("output_norm.weight", (32,), 0, bytes(128))]
RAW, OTHER = table(V, D).tobytes(), table(V, D, 2).tobytes()
CHANGED = RAW[:-1] + bytes([RAW[-1] ^ 1])
COARSE = {"kind": 12, "table": bytes(V * 144)}
IN, OUT = "token_embd.weight", "output.weight"
# file, source folder, findings, words of the first finding
CASES = [
    (model(V, D), None, []),
    (model(V, D, head=OTHER), None, []),
    (model(V, D, table=RAW), TIED, []),
    (model(V, D, head=OTHER), UNTIED, []),
    (model(V, D), UNTIED | {"head": table(V, D)}, []),  # a head that equals the table
    (gguf([NINE]), None, []),
    (LORA, None, []),
    (model(V, D), UNTIED, [f"B070 error {OUT}"], "lm_head.weight F32 [8, 32]: 8 of 8 rows differ"),
    (model(V, D, tokens=9), None, [f"B070 error {IN}"], "has 8 rows, and tokenizer.ggml.tokens has 9 entries"),
    (model(V, D, tokens=9, head=b"\1" * V * D * 4), None, [f"B070 error {IN}", f"B070 error {OUT}"]),
    (model(V, D), {"rows": V + 4}, [f"B070 warning {IN}"],
     "F32 [8, 32], and its source's model.embed_tokens.weight F32 [12, 32]"),
    (model(V, D), {"rows": V - 4}, [f"B070 error {IN}"]),
    (gguf([NINE], NORM), None, ["B070 fatal m.gguf"]),
    (model(V, D, table=RAW, head=RAW), None, [f"B071 info {OUT}"], "which costs 1.02 kB of"),
    (model(V, D, table=RAW, head=CHANGED), None, []),
    (model(V, 256, **COARSE), None, [f"B071 warning {IN}"], "Q4_K, 4.50 bits"),
    (model(V, 256, kind=14, table=bytes(V * 210)), None, []),
    (model(V, 256, **COARSE, head=bytes(V * 210), head_kind=14), None, []),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_b070_and_b071_report_lost_heads_missing_rows_and_copies(tmp_path, case):
    data, source, said, *words = case
    found = findings(tmp_path, data, source)
    assert summaries(found) == said
    assert all(text in found[0].evidence for text in words)


def test_b070_warns_without_scan_that_tables_were_not_compared(tmp_path):
    found = findings(tmp_path, model(V, D), UNTIED, scan=False)
    assert summaries(found) == [f"B070 warning {OUT}"]
    assert "not compared" in found[0].evidence
    assert not findings(tmp_path, model(V, D, table=RAW, head=RAW), scan=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "head", "kind", "said"),
    [
        (TIED, None, "F32", []),
        (UNTIED, None, "F32", ["B070"]),  # the separately trained head is missing
        (UNTIED, table(V, D, 2), "F32", []),
        (TIED, table(V, D), "F32", ["B071"]),
        (TIED, None, "Q8_0", []),
    ],
)
def test_open_gguf_agrees_with_reader_of_gguf_package(source, head, kind, said, tmp_path):
    """gguf's GGUFWriter writes the file, and its GGUFReader is the oracle."""
    own = pytest.importorskip("gguf")
    quant = own.GGMLQuantizationType[kind]
    tables = {IN: table(V, D)} | ({} if head is None else {OUT: head})
    path = tmp_path / "m.gguf"
    writer = own.GGUFWriter(path, "llama")
    writer.add_token_list([f"t{i}" for i in range(V)])
    for name, values in tables.items():
        writer.add_tensor(name, own.quantize(values, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found, truth = open_gguf(path), own.GGUFReader(path)
    assert found.tokens == len(truth.get_field("tokenizer.ggml.tokens").data) == V
    assert {name: (t.dtype, t.shape, t.nbytes) for name, t in found.tensors.items()} == {
        t.name: (t.tensor_type.name, tuple(t.shape[::-1]), t.n_bytes) for t in truth.tensors
    }
    assert [one.rule for one in findings(tmp_path, path.read_bytes(), source)] == said
