"""Check thousands of damaged checkpoints in a separate process that an audit hook watches.

    python hostile_child.py FOLDER FIRST COUNT [KIND | merge | slim]

The program prints one JSON object: the numbers of cases checked and refused, and every forbidden event. The number of
a case determines the case, so `FOLDER N 1` repeats case N.
"""

import copy
import json
import os
import random
import resource
import shutil
import signal
import stat
import struct
import sys
import traceback
import tracemalloc
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from gguf_writer import model, strings
from onnx_writer import initialiser, node
from onnx_writer import model as onnx_model
from tiny_checkpoints import D, V, bpe_tokenizer, llama, table, write_checkpoint

from tiewise.checkpoint.audit import check
from tiewise.checkpoint.family_record import class_defaults
from tiewise.checkpoint.rewrite import merge, slim
from tiewise.core.errors import CheckpointError

ADAPTERS = ("adapter", "copies", "rows")
VERBS = {"merge": ADAPTERS, "slim": ("adapter", "copies")}  # an adapter of rows is slim already
SECONDS = 20  # limit of one case on a busy machine; a healthy check takes milliseconds
HUGE = 2**60
ODD = [None, True, -1, 0, 0.5, HUGE, -HUGE, 2**63, 2**64, 10**400, float("nan"), float("inf"), "", "x" * 100_000]
ODD += ["\0", "../../secret", "/etc/passwd", "\ud800", "a\nb\x1b[31m", [], {}, [[]], [1, [2, [3]]], {"a": {"b": {}}}]
ODD += ["F32", "F4", "__metadata__", "lm_head.weight", "text_config", [V, D], [D, V], [V, -D], [2**40, 2**40], [0, 0]]
CODE = (
    "from transformers import PreTrainedModel\nclass M(PreTrainedModel):\n    _tied_weights_keys = ['a']\n"
    "    def get_output_embeddings(self):\n        return self.a\n    def tie_weights(self):\n        pass\n"
)


class Hang(BaseException):
    """Error that ends a case after its time limit; no `except Exception` may swallow it."""


class Watch:
    """Audit hook that records forbidden events and files opened outside the allowed folders."""

    FORBIDDEN = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "socket.connect", "exec")
    FORBIDDEN += ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod")
    FORBIDDEN += ("pickle.find_class", "marshal.loads", "ctypes.dlopen", "import")

    CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.chmod")

    def __init__(self, *allowed, writes=None):
        self.allowed = [os.path.realpath(folder) for folder in allowed]
        self.writes = None if writes is None else os.path.realpath(writes)  # where a verb writes its result
        self.given = None  # the path that the user names is followed wherever it points
        self.on = False
        self.wrong = []

    def __enter__(self):
        self.wrong.clear()
        signal.alarm(SECONDS)
        self.on = True

    def __exit__(self, *error):
        self.on = False
        signal.alarm(0)

    def __call__(self, event, arguments):
        if self.on and event == "open" and not isinstance(arguments[0], int):
            self.on = False
            self.check_open(os.fsdecode(arguments[0]), arguments[2] or 0)
            self.on = True
        elif self.on and event in self.FORBIDDEN:
            changed = arguments[1 if event == "os.link" else 0 :]
            paths = [os.fsdecode(one) for one in changed if isinstance(one, str | bytes | Path)]
            if event not in self.CHANGES or not paths or not all(map(self.is_in_results, paths)):
                self.wrong.append(f"{event} {str(arguments)[:200]}")

    def is_in_results(self, path):
        real = os.path.realpath(path)
        return self.writes is not None and os.path.commonpath([real, self.writes]) == self.writes

    def check_open(self, path, flags):
        if "\0" in path or self.is_in_results(path):
            return  # a path with NUL cannot be opened, and a verb may read its own result
        real = os.path.realpath(path)
        if path != self.given and not any(os.path.commonpath([real, folder]) == folder for folder in self.allowed):
            self.wrong.append(f"opened {path!r}, which is {real}")
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
            self.wrong.append(f"opened {path!r} for writing")


def seeds(scratch):
    """Return {kind: {file: bytes}} of healthy checkpoints."""
    tokenizer = {"tokenizer": bpe_tokenizer(added=[(V - 1, "<end>", True)])}
    files = {"generation_config.json": {"eos_token_id": [1, 2]}, "tokenizer_config.json": {"added_tokens_decoder": {}}}
    nested = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "vocab_size": V, "hidden_size": D}}
    nested["text_config"]["tie_word_embeddings"] = False
    auto = {"auto_map": {"AutoConfig": "m.C", "AutoModelForCausalLM": "m.M"}}
    packed = {"lm_head.qweight": np.ones((D // 8, V), np.int32), "lm_head.scales": np.ones((1, V), np.float16)}
    section = {"quantization_config": {"quant_method": "gptq", "lm_head": True, "dynamic": {"-:x": {}}}}
    lora = {"lm_head.lora_A": np.ones((2, D)), "lm_head.lora_B": np.ones((V, 2)), "model.embed_tokens": table()}
    lora = {f"base_model.model.{name}.weight": values for name, values in lora.items()}
    adapter = {"peft_type": "LORA", "target_modules": ["lm_head"], "modules_to_save": ["embed_tokens"]}
    ends, body = ("model.embed_tokens", "lm_head"), "model.layers.0.mlp.down_proj"
    copies = {f"base_model.model.{end}.weight": table() + np.eye(V, D, dtype=np.float32) for end in ends}
    for part, shape in (("lora_A", (2, 2 * D)), ("lora_B", (D, 2))):
        copies[f"base_model.model.{body}.{part}.weight"] = np.ones(shape, np.float32)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "alpha_pattern": {"q_proj": 1}, "use_dora": False}
    settings |= {"modules_to_save": ["embed_tokens", "lm_head"], "base_model_name_or_path": "/etc"}
    settings["init_lora_weights"] = True
    rows = {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": table(2)}
    tokens = settings | {"modules_to_save": None, "trainable_token_indices": {"embed_tokens": [1, 3]}}
    ids = np.array([0, 1, 2, 5, 9])
    maps = {"d2t": ids - np.arange(5), "t2d": np.isin(np.arange(V), ids), "lm_head.weight": table(5)}
    made = {
        "draft": llama(scratch / "draft", False, config={"draft_vocab_size": 5}, tensors=maps, **tokenizer),
        "copies": write_checkpoint(scratch / "copies", None, copies, files={"adapter_config.json": settings}),
        "rows": write_checkpoint(scratch / "rows", None, rows, files={"adapter_config.json": tokens}, **tokenizer),
        "tied": llama(scratch / "tied", files=files, **tokenizer),
        "untied": llama(scratch / "untied", False, **tokenizer),
        "equal": llama(scratch / "equal", head=table()),
        "sharded": llama(scratch / "sharded", False, shards=2),
        "nested": llama(scratch / "nested", head=table(seed=4), config=nested),
        "code": llama(scratch / "code", config=auto),
        "quantised": llama(scratch / "quantised", tensors=packed, config=section),
        "adapter": write_checkpoint(scratch / "adapter", None, lora, files={"adapter_config.json": adapter}),
    }
    (made["code"] / "m.py").write_text(CODE)
    for name in ADAPTERS:
        (made[name] / "model.safetensors").rename(made[name] / "adapter_model.safetensors")
    gathered = {name: {file.name: file.read_bytes() for file in folder.iterdir()} for name, folder in made.items()}
    at = initialiser("e", dims=(V, D), kind=1, at={"location": "m.data", "length": str(4 * V * D)})
    nodes = [node("Gather", ["e", "input_ids"], ["h"]), node("MatMul", ["h", "t"], ["logits"])]
    exported = onnx_model(nodes, [at, initialiser("t", table().T)])
    gathered["onnx"] = {"m.onnx": exported, "m.data": table().tobytes()}
    split = [("split.count", struct.pack("<IH", 2, 1)), ("tokenizer.ggml.merges", strings(["a b"] * 3))]
    gathered["gguf"] = gathered["untied"] | {"m.gguf": model(V, 32, head=bytes(V * 32 * 4), keys=split)}
    return gathered


@contextmanager
def memory_below(most):
    """Assert that the block allocates at most `most` bytes at any time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def mutate_bytes(rng, data):
    data = bytearray(data)
    how = rng.randrange(6)
    at = rng.randrange(min(len(data), 400) + 1)
    if how == 0:
        return bytes(data[: rng.randrange(len(data) + 1)])
    if how == 1:
        data[:8] = struct.pack("<Q", rng.choice([0, 1, HUGE, 2**64 - 1, len(data), rng.randrange(2000)]))
    elif how == 2:
        data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 20)))
    elif how == 3:
        del data[at : at + rng.randrange(1, 40)]
    else:
        for _ in range(rng.randrange(1, 8)):
            if data:
                data[rng.randrange(min(len(data), 600))] = rng.randrange(256)
    return bytes(data)


def parts_of(record):
    """Yield (container, key) of every part of a JSON value, below the value itself."""
    items = record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
    for key, value in items:
        yield record, key
        yield from parts_of(value)


def mutate_record(rng, record):
    """Replace random parts of a JSON value by odd values or copies of other parts, or delete them."""
    whole = {"": copy.deepcopy(record)}
    for _ in range(rng.randrange(1, 4)):
        known = list(parts_of(whole))
        holder, key = rng.choice(known if rng.random() < 0.1 else known[1:] or known)
        other, at = rng.choice(known)
        odd = copy.deepcopy(rng.choice(ODD) if rng.random() < 0.8 else other[at])
        if holder is whole:
            whole[""] = odd
        elif rng.random() < 0.15:
            del holder[key]
        elif isinstance(holder, dict) and rng.random() < 0.3:
            holder[str(odd)[:300]] = holder.pop(key)
        else:
            holder[key] = odd
    return whole[""]


def as_json(rng, record):
    text = json.dumps(record).encode()
    if rng.random() < 0.05:
        text = b'{"a":' * 100_000 + text + b"}" * 100_000
    elif rng.random() < 0.1 and text[:1] == b"{" and len(text) > 4:
        text = text[:-1] + b"," + text[1:]  # writes every key twice
    return text


def mutate_file(rng, name, data):
    if rng.random() < 0.35:
        return mutate_bytes(rng, data)
    if name.endswith(".json"):
        return as_json(rng, mutate_record(rng, json.loads(data)))
    if name.endswith(".safetensors"):
        length = int.from_bytes(data[:8], "little")
        text = as_json(rng, mutate_record(rng, json.loads(data[8 : 8 + length])))
        return struct.pack("<Q", len(text)) + text + data[8 + length :]
    return mutate_bytes(rng, data)


def mutate_folder(rng, folder, files):
    """Delete a file, turn it into a link, pipe, folder or unreadable file, or add another file."""
    name = rng.choice(sorted(files))
    path = folder / name
    extra = [b"model-00009-of-00009.safetensors", b"pytorch_model.bin", b"a\nb.safetensors", b"\xff.safetensors"]
    changes = {
        "gone": lambda: None,
        "a link out": lambda: path.symlink_to("../secret"),
        "a link round": lambda: path.symlink_to(name),
        "a pipe": lambda: os.mkfifo(path),
        "a folder": path.mkdir,
        "empty": path.touch,
        "unreadable": lambda: path.write_bytes(files[name]) and path.chmod(0),
        "one more": lambda: (folder / os.fsdecode(rng.choice(extra))).write_bytes(rng.choice(list(files.values()))),
    }
    how = rng.choice(list(changes))
    if how != "one more":
        path.unlink()
    changes[how]()
    return f"{name}: {how}"


def write_files(folder, files):
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)


def write_case(rng, folder, kinds, verb):
    """Write one damaged checkpoint; return the changes and the arguments of check or of the verb."""
    kind = rng.choice(sorted(kinds))
    files = dict(kinds[kind])
    done = [kind]
    if rng.random() < 0.85:
        weights = [4 if name.endswith((".gguf", ".onnx", ".safetensors")) or "config" in name else 2 for name in files]
        for name in dict.fromkeys(rng.choices(list(files), weights, k=rng.choice([1, 1, 1, 2]))):
            files[name] = mutate_file(rng, name, files[name])
            done.append(name)
    write_files(folder, files)
    if rng.random() < 0.15:
        done.append(mutate_folder(rng, folder, files))
    scan, deep = rng.choice([(True, False), (True, True), (False, False)])
    arguments = {"path": folder, "scan": scan, "deep": deep}
    if kind == "gguf":
        arguments["path"] = folder / "m.gguf"
        arguments["original"] = rng.choice([None, folder])
    elif kind == "onnx":
        arguments["path"] = folder / rng.choice(["", "m.onnx"])
    elif kind == "draft":
        arguments["target"] = rng.choice([None, folder.parent / "base"])
    elif kind in ADAPTERS:
        base = folder.parent / "base"
        arguments["base"] = base if verb else rng.choice([None, base])
        if arguments["base"] is not None:
            arguments["verb"] = verb or rng.choice(["check", "slim", "merge"])
    elif rng.random() < 0.15:
        arguments["path"] = folder / rng.choice(sorted(files))
    return done, arguments


def remove_case(folder):
    for path in folder.glob("*"):
        if not path.is_symlink() and not stat.S_ISFIFO(path.stat().st_mode):
            path.chmod(0o700)
    shutil.rmtree(folder)


def run(home, first, count, *only):
    (home / "out").mkdir(parents=True, exist_ok=True)
    kinds = seeds(home.parent / "seeds")
    verb = next(iter(only), None) if VERBS.keys() & set(only) else None
    chosen = {name: kinds[name] for name in VERBS.get(verb, only or kinds)}
    shutil.copytree(home.parent / "seeds" / "tied", home / "base", dirs_exist_ok=True)
    for name, files in kinds.items():  # imports and caches fill before the hook watches
        write_files(home / "warm", files)
        option = "base" if name in ADAPTERS else "target" if name == "draft" else None
        given = {} if option is None else {option: home / "base"}
        path = home / "warm" / "m.gguf" if name == "gguf" else home / "warm"
        for each in ("check", "slim", "merge") if name in ("copies", "rows") else ("check",):
            with suppress(CheckpointError):  # an adapter of rows is slim already
                json.dumps(record_of({"verb": each, "path": path, "scan": True, "deep": True} | given, each == "check"))
            shutil.rmtree(home / "out" / "new", ignore_errors=True)
        shutil.rmtree(home / "warm")
    class_defaults()  # no healthy kind reads this packaged file; a config with a damaged width does
    (home / "secret").write_bytes(kinds["tied"]["config.json"])  # mutate_folder links to it
    watch = Watch(home / "case", home / "base", writes=home / "out" if verb else None)
    sys.addaudithook(watch)
    signal.signal(signal.SIGALRM, raise_hang)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
    counts = {"checked": 0, "refused": 0, "failed": []}
    for number in range(first, first + count):
        rng = random.Random(number)
        done, arguments = write_case(rng, home / "case", chosen, verb)
        dry = verb is None or rng.random() < 0.85
        problem = check_case(watch, arguments, counts, dry)
        made, wanted = os.listdir(home / "out"), [] if dry or counts["last"] == "refused" else ["new"]
        if made != wanted:
            problem = f"{problem}; left {made}, not {wanted}"
        shutil.rmtree(home / "out" / "new", ignore_errors=True)
        if problem is not None:
            counts["failed"].append(f"case {number} ({'; '.join(done)}; {arguments}): {problem}")
        remove_case(home / "case")
    counts["grown"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return counts


def raise_hang(signum, frame):
    raise Hang


def record_of(arguments, dry=True):
    """Return the record of a check or of a verb, whose base is healthy."""
    verb, given = arguments.get("verb", "check"), {k: v for k, v in arguments.items() if k != "verb"}
    if verb == "check":
        return check(**given).record()
    source, base, to = given["path"], given["base"], given["base"].parent / "out" / "new"
    made = slim(source, to, base=base, dry_run=dry) if verb == "slim" else merge(base, to, adapter=source, dry_run=dry)
    return made.record() | {"findings": []}


def check_case(watch, arguments, counts, dry=True):
    """Check one case; return the problem, or None."""
    watch.given = os.fspath(arguments["path"])
    counts["last"] = "refused"
    try:
        with watch:
            record = record_of(arguments, dry)
        json.dumps(record, allow_nan=False)
    except CheckpointError as error:
        counts["refused"] += 1
        if not str(error).isprintable() or not error.remedy:
            return f"no plain error: {error!r}"
    except Hang:
        return f"hangs for {SECONDS} s"
    except Exception:
        return traceback.format_exc(limit=-4)
    else:
        counts["checked"] += 1
        counts["last"] = "checked"
        for finding in record["findings"]:
            if not (finding["evidence"] + finding["where"]).isprintable():
                return f"unprintable text in {finding}"
    return "; ".join(watch.wrong) or None


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])))
