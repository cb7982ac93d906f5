"""Test how the page decodes stored numbers, against torch, and how it refuses damaged or malicious files."""

import json
from base64 import b64encode

import numpy as np
import pytest
import torch
from tests.report.explorer.dropping import drop, refusal

from tiny_checkpoints import llama, llama_config, table, write_checkpoint, write_sparse  # isort: skip - see dropping.py

DECODE = """([dtype, text]) => {
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0)), values = decoderOf(dtype)(bytes.buffer);
  const wide = Float64Array.from(values);
  const bits = [...new Uint32Array(Float32Array.from(wide).buffer)];
  return bits.map((code, i) => Number.isNaN(wide[i]) ? -1 : code).join(" ");
}"""


def decode_in_page(dropper, dtype, raw):
    return np.array(dropper.page.evaluate(DECODE, [dtype, b64encode(raw).decode()]).split(), np.int64)


def float_bits(values):
    wide = values.float().numpy()
    return np.where(np.isnan(wide), -1, wide.view(np.uint32).astype(np.int64))


@pytest.mark.parametrize(
    ("dtype", "kind", "codes"),
    [
        ("F16", torch.float16, torch.int16),
        ("BF16", torch.bfloat16, torch.int16),
        ("F8_E4M3", torch.float8_e4m3fn, torch.int8),
        ("F8_E5M2", torch.float8_e5m2, torch.int8),
        ("I8", torch.int8, torch.int8),
    ],
)
def test_page_decodes_every_bit_pattern_of_small_dtypes_like_torch(dropper, dtype, kind, codes):
    bits = 8 * torch.empty(0, dtype=codes).element_size()
    patterns = torch.arange(2**bits).sub(2 ** (bits - 1)).to(codes)
    assert np.array_equal(decode_in_page(dropper, dtype, patterns.numpy().tobytes()), float_bits(patterns.view(kind)))


def test_page_decodes_float32_and_float64_exactly(dropper):
    bits = torch.from_numpy(np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32).view(np.int32))
    assert np.array_equal(decode_in_page(dropper, "F32", bits.numpy().tobytes()), float_bits(bits.view(torch.float32)))
    wide = torch.randn(500, dtype=torch.float64)
    assert np.array_equal(decode_in_page(dropper, "F64", wide.numpy().tobytes()), float_bits(wide))


def safetensors_bytes(record, data=b"", length=None):
    text = record if isinstance(record, bytes) else json.dumps(record).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
BAD = {
    "empty": b"",
    "seven bytes": b"1234567",
    "zeros": bytes(16),
    "no header behind a length": (100).to_bytes(8, "little"),
    "header of 2 to the 63": (2**63).to_bytes(8, "little") + b"{}",
    "no JSON": safetensors_bytes(b"{'a': 1}", bytes(16)),
    "no UTF-8": safetensors_bytes(b'{"\xff\xfe": 1}'),
    "a list": safetensors_bytes([1, 2]),
    "a list of lists": safetensors_bytes(b"[" * 100_000),
    "entry of a wrong kind": safetensors_bytes({"a": 3}),
    "unknown type": safetensors_bytes({"a": ENTRY | {"dtype": "F33"}}, bytes(16)),
    "type that is a number": safetensors_bytes({"a": ENTRY | {"dtype": 7}}, bytes(16)),
    "type of every object": safetensors_bytes({"a": ENTRY | {"dtype": "constructor"}}, bytes(16)),
    "negative shape": safetensors_bytes({"a": ENTRY | {"shape": [-2, -2]}}, bytes(16)),
    "shape of halves": safetensors_bytes({"a": ENTRY | {"shape": [0.5, 8]}}, bytes(16)),
    "shape that overflows": safetensors_bytes({"a": ENTRY | {"shape": [2**52, 2**52]}}, bytes(16)),
    "shape that is text": safetensors_bytes({"a": ENTRY | {"shape": "22"}}, bytes(16)),
    "offsets beyond": safetensors_bytes({"a": ENTRY | {"data_offsets": [2**52, 2**52 + 16]}}, bytes(16)),
    "offsets turned": safetensors_bytes({"a": ENTRY | {"data_offsets": [16, 0]}}, bytes(16)),
    "one offset": safetensors_bytes({"a": ENTRY | {"data_offsets": [16]}}, bytes(16)),
    "overlap": safetensors_bytes({"a": ENTRY, "b": ENTRY}, bytes(16)),
    "gap": safetensors_bytes({"a": ENTRY, "b": ENTRY | {"data_offsets": [20, 36]}}, bytes(36)),
    "cut": safetensors_bytes({"a": ENTRY}, bytes(15)),
    "longer": safetensors_bytes({"a": ENTRY}, bytes(17)),
    "one name twice": safetensors_bytes(b'{"a": %s, "\\u0061": %s}' % ((json.dumps(ENTRY).encode(),) * 2), bytes(32)),
    "metadata of numbers": safetensors_bytes({"__metadata__": {"a": 1}, "a": ENTRY}, bytes(16)),
    "markup": safetensors_bytes({"<img src=x onerror=alert(1)>": 3}),
}


@pytest.mark.parametrize("name", BAD)
def test_page_refuses_a_damaged_safetensors_file_in_one_sentence(dropper, tmp_path, name):
    (tmp_path / "model.safetensors").write_bytes(BAD[name])
    message = refusal(dropper, tmp_path)
    assert message.startswith("model.safetensors: ")
    assert message.endswith(".")
    assert "page failed" not in message
    assert len(message) < 300
    assert dropper.page.locator("#refused *").count() == 0


@pytest.mark.slow
def test_page_stays_responsive_while_it_reads_a_100_megabyte_header(dropper, tmp_path):
    many = b'{"a":[' + b"0," * 7_000_000 + b"0]}"
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(many))
    assert "more than 6,000,000 values" in refusal(dropper, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(b"[" * 40_000_000))
    page = dropper.page
    page.set_input_files("#folder", tmp_path)
    page.locator("#theme").click()  # during the read
    page.locator("#theme").click()
    page.locator("#refused").wait_for()
    (tmp_path / "model.safetensors").write_bytes((100_000_001).to_bytes(8, "little") + bytes(100_000_001))
    assert "claims 100,000,001 bytes" in refusal(dropper, tmp_path)


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"pytorch_model.bin": "x"}, "pickled weights alone (pytorch_model.bin)"),
        ({"adapter_config.json": "{}"}, "tiewise check"),
        ({"model.gguf": "GGUF"}, "tiewise check model.gguf"),
        ({"README.md": "x"}, "no file of tensors"),
        ({INDEX: '{"weight_map": {"a": "../b.safetensors"}}'}, "does not lie in the folder"),
        ({INDEX: '{"weight_map": 3}'}, "no weight_map"),
        ({INDEX: '{"weight_map": {"a": "b.safetensors"}}'}, "choose the whole folder"),
    ],
)
def test_page_refuses_a_folder_that_is_no_readable_checkpoint(dropper, tmp_path, files, words):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert words in refusal(dropper, tmp_path)


def test_page_lists_the_tensors_of_intact_files_next_to_a_damaged_one(dropper, tmp_path):
    path = llama(tmp_path / "a", shards=2)
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    (path / "tokenizer.json").write_text("{")
    text = drop(dropper, path, answered=False).locator("#checkpoint").inner_text()
    assert "ends 1 bytes before its tensors do" in text
    assert "tokenizer.json: not readable as JSON" in text
    assert dropper.page.locator("#tensors tbody tr").count() > 0
    odd = '{"architectures": 5, "vocab_size": "x", "text_config": [], "tie_word_embeddings": NaN}'
    for config in ("[1]", "{", odd):
        (path / "config.json").write_text(config)
        drop(dropper, path, answered=False)


def test_cancel_button_stops_comparing_and_reading(dropper, tmp_path):
    tables = {name: ("F32", [2_000_000, 256]) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    write_sparse(tmp_path / "model.safetensors", tables)  # sparse, so it takes no disk space
    (tmp_path / "config.json").write_text(json.dumps(llama_config(False, 2_000_000, 256)))
    page = dropper.page
    page.set_input_files("#folder", tmp_path)
    page.locator("progress[aria-label^=Comparing]").wait_for()
    page.locator("#cancel").click()
    page.get_by_text("They were not compared, as you cancelled it.").wait_for()
    page.locator("progress[aria-label^=Reading]").wait_for()
    page.keyboard.press("Tab")
    page.locator("#cancel").press("Enter")
    page.locator("#refused").wait_for()
    assert page.locator("#refused").inner_text() == "Cancelled."


def test_page_asks_the_reader_to_choose_a_truncated_file_again(dropper, tmp_path):
    path = llama(tmp_path / "a")
    page = drop(dropper, path)
    (path / "model.safetensors").write_bytes(b"gone")
    page.locator("#words").fill("#3, #4")
    page.locator("#words").press("Enter")
    page.locator("#refused").wait_for()
    assert "choose it again" in page.locator("#refused").inner_text()


def test_page_shows_markup_in_names_of_files_tensors_and_tokens_as_text(dropper, tmp_path):
    evil = "<img src=x onerror=alert(1)>"
    tokenizer = {"model": {"type": "BPE", "vocab": {f"{evil}{i}": i for i in range(24)}, "merges": []}}
    path = write_checkpoint(
        tmp_path / evil.replace("/", "_"),
        llama_config(),
        {"lm_head.weight": table(), "model.embed_tokens.weight": table(), f"{evil}.weight": table()},
        tokenizer=tokenizer,
    )
    page = drop(dropper, path)
    assert page.locator("#checkpoint img").count() == 0
    assert evil in page.locator("#checkpoint").inner_text()
    page.get_by_label("Output head").select_option(f"{evil}.weight")
    page.get_by_text("Two tensors that differ").or_(page.get_by_text("equal, byte for byte")).wait_for()
    assert page.locator("#checkpoint img").count() == 0


def test_page_counts_20003_tensors_and_limits_its_lists(dropper, tmp_path):
    """The names include properties of every JavaScript object, and exceed the limits of the lists."""
    names = ["__proto__", "constructor", "0", *(f"model.experts.{i}.weight" for i in range(20_000))]
    entries = {
        name: {"dtype": "F32", "shape": [1, 1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)
    }
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(entries, bytes(4 * len(names))))
    page = drop(dropper, tmp_path, answered=False)
    assert page.locator("#tensors summary").inner_text() == "20,003 tensors"
    assert page.locator("#tensors tbody tr").count() == 200
    assert "and 19,803 more" in page.locator("#tensors").inner_text()
    offered = page.get_by_label("Input embedding").locator("option").evaluate_all("all => all.map(one => one.value)")
    assert len(offered) == 500
    assert {"__proto__", "constructor", "0"} <= set(offered)
    page.get_by_label("Input embedding").select_option("__proto__")
    page.get_by_label("Output head").select_option("constructor")
    page.get_by_text("equal, byte for byte").wait_for()
