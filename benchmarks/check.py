"""Time of `tiewise check` on headers of a 70B-sized folder, and rate of its scan.

The rate of the equality scan is compared with that of plain reading.

python -m benchmarks.check
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import alternate, format_spread, median_ratio
from tiewise.checkpoint.stored import read_header
from tiewise.checkpoint.table_scans import same_bytes

V, D, F, LAYERS, SHARDS, KV = 128_256, 8192, 28_672, 80, 30, 1024
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
}
LAYER = {
    "input_layernorm": (D,),
    "post_attention_layernorm": (D,),
    "self_attn.q_proj": (D, D),
    "self_attn.k_proj": (KV, D),
    "self_attn.v_proj": (KV, D),
    "self_attn.o_proj": (D, D),
    "mlp.gate_proj": (F, D),
    "mlp.up_proj": (F, D),
    "mlp.down_proj": (D, F),
}


def write_sparse_70b(folder: Path) -> int:
    """Write a Llama-70B-shaped checkpoint of sparse files; return its logical bytes.

    Each tensor is the number 1 followed by a hole of zeros.
    """
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)}
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in LAYER.items()}
    names = list(shapes)
    total, weight_map = 0, {}
    for number in range(SHARDS):
        file_name = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        header, offset = {}, 0
        for name in names[number::SHARDS]:
            size = 2
            for length in shapes[name]:
                size *= length
            header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [offset, offset + size]}
            offset += size
            weight_map[name] = file_name
        text = json.dumps(header).encode()
        with (folder / file_name).open("wb") as shard_file:
            shard_file.write(len(text).to_bytes(8, "little") + text)
            shard_file.truncate(8 + len(text) + offset)
            for entry in header.values():  # a 1 at the start, because all-zero tables are a finding
                shard_file.seek(8 + len(text) + entry["data_offsets"][0])
                shard_file.write(b"\x80\x3f")
        total += offset
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return total


def run_tiewise(*arguments: str) -> None:
    """Run the command line once in a new process."""
    process = subprocess.run([sys.executable, "-m", "tiewise", *arguments], capture_output=True, text=True)
    assert process.returncode in (0, 1), process.stderr


def write_two_tables(path: Path, gigabytes: float) -> None:
    """Write two equal tables of random bytes, which stay in the page cache."""
    rows = int(gigabytes * 1e9 / (2 * D))
    header = {
        name: {"dtype": "BF16", "shape": [rows, D], "data_offsets": [i * rows * D * 2, (i + 1) * rows * D * 2]}
        for i, name in enumerate("ab")
    }
    text = json.dumps(header).encode()
    block = os.urandom(2 * D)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(2):
            for start in range(0, rows, 512):
                file.write(block * min(512, rows - start))


def read_through(path: Path, buffer: bytearray) -> None:
    """Read a file in a plain loop."""
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def main() -> None:
    """Time both commands and both reads, and print the tables."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "70b"
        folder.mkdir()
        total = write_sparse_70b(folder)
        candidates = {
            "tiewise check --headers": lambda: run_tiewise("check", str(folder), "--headers"),
            "python -c pass": lambda: subprocess.run([sys.executable, "-c", "pass"], check=True),
        }
        times = alternate(candidates, rounds=9)
        print(f"{len(LAYER) * LAYERS + 3} tensors in {SHARDS} files, {total / 1e9:.0f} GB (sparse)\n")
        print("| command | ms, median (range) |\n|---|---|")
        for name, values in times.items():
            print(f"| `{name}` | {format_spread(values)} |")
        path = Path(root) / "tables.safetensors"
        write_two_tables(path, 1.0)
        a, b = read_header(path).tensors.values()
        size = path.stat().st_size
        buffer = bytearray(2**20)
        rates = alternate(
            {"plain read": lambda: read_through(path, buffer), "equality scan": lambda: same_bytes(a, b)}, rounds=7
        )
        print(f"\nTwo tables of {a.nbytes / 1e9:.1f} GB in the page cache, every byte read\n")
        print("| | ms, median (range) | GB/s |\n|---|---|---|")
        for name, values in rates.items():
            print(f"| {name} | {format_spread(values)} | {size / 1e9 / sorted(values)[len(values) // 2]:.1f} |")
        share = 100 * median_ratio(rates, "plain read", "equality scan")
        print(f"\n- the scan runs at {share:.0f} % of the rate of plain reading")


if __name__ == "__main__":
    main()
