"""Trim and transplant damaged tokenizers in a separate process, which a crash of the library would end.

    python hostile_tokenizers.py FOLDER FIRST COUNT

The program prints one JSON object: for each verb the numbers of refusals and results, and every failed case. The number
of a case determines the case, so `FOLDER N 1` repeats case N.
"""

import json
import random
import shutil
import signal
import sys
import traceback
from itertools import product
from pathlib import Path

from tests.checkpoint.hostile_child import Hang, mutate_file, mutate_record, raise_hang, remove_case, write_files
from tokenizers import Tokenizer
from trimmed_words import KINDS, prose, write_llama

from tiewise.checkpoint.rewrite import transplant, trim
from tiewise.checkpoint.stored import read_header
from tiewise.core.errors import CheckpointError

SECONDS = 20
ODD = [["", "a"], ["a", ""], ["no", "such"], "a b c", "ab", ["a"], [1, 2], ["<0x41>", "a"], ["a", "a"]]


def seeds(scratch, text):
    """Return {kind: {file: bytes}} of healthy folders."""
    generation = {"eos_token_id": [0, 1], "suppress_tokens": [5, 6], "forced_decoder_ids": [[1, 7]], "bos_token_id": 2}
    found = {}
    for name, train in KINDS.items():
        tokenizer = train(text, 400)
        words = {"added_tokens_decoder": {"0": {}}, "eos_token": tokenizer.id_to_token(0)}
        files = {"generation_config.json": generation, "tokenizer_config.json": words}
        made = write_llama(scratch / name, tokenizer, files=files)
        if name == "gpt2":
            tokenizer.model.save(str(made))  # vocab.json, merges.txt
        found[name] = {file.name: file.read_bytes() for file in made.iterdir()}
    return found


def mutate(rng, name, data):
    """Damage a file; in a tokenizer.json mostly single parts, because the library refuses most other damage."""
    if name != "tokenizer.json" or rng.random() < 0.3:
        return mutate_file(rng, name, data)
    record = json.loads(data)
    model = record["model"]
    how = rng.randrange(6)
    if how == 0 and "merges" in model:
        model["merges"].insert(rng.randrange(len(model["merges"])), rng.choice([*ODD, rng.choice(model["merges"])]))
    elif how == 1:
        rng.shuffle(model["merges"] if "merges" in model else record["added_tokens"])
    elif how == 2 and isinstance(model["vocab"], dict):
        token = rng.choice(sorted(model["vocab"]))
        number = model["vocab"].pop(token)
        model["vocab"] |= rng.choice([{}, {token + "x": number}, {token: 2**32 - 1}, {token: 0}, {token: -1}])
    elif how == 3 and isinstance(model["vocab"], list):
        entry = rng.choice(model["vocab"])
        rng.choice([model["vocab"].remove, model["vocab"].append])(entry)
    elif how == 4:
        part = rng.choice(["added_tokens", "post_processor", "padding", "normalizer", "pre_tokenizer", "decoder"])
        record[part] = mutate_record(rng, record.get(part) or [{}])
    else:
        model[rng.choice(["unk_token", "unk_id", "dropout", "byte_fallback", "type", "ignore_merges"])] = rng.choice(
            [None, True, 0, 1, 0.5, -1, 10**9, "", "a", "WordLevel", "BPE", "WordPiece", []]
        )
    return json.dumps(record).encode()


def rewrite_case(rng, home, kinds, verb):
    """Rewrite with one damaged folder; return (kind of folder, whether a result was written, problem)."""
    case, made, kind = home / "case", home / "made", rng.choice(sorted(kinds))
    files = dict(kinds[kind])
    names = [name for name in files if name != "model.safetensors"]
    damaged = {rng.choice(["tokenizer.json", rng.choice(names)]) for _ in range(rng.choice([1, 1, 2]))}
    for name in sorted(damaged):
        files[name] = mutate(rng, name, files[name])
    write_files(case, files)
    dry = rng.random() < 0.5
    try:
        if verb == "trim":
            options = rng.choice([{"text": home / "text.txt"}, {"size": 380}, {"keep": home / "keep.txt"}])
            trim(case, made, **options, dry_run=dry)
        else:
            healthy = home / "seeds" / rng.choice(sorted(kinds))
            source, tokenizer = rng.choice([(case, healthy), (healthy, case)])
            transplant(source, made, tokenizer=tokenizer, dry_run=dry)
    except CheckpointError as error:
        plain = str(error).isprintable() and error.remedy
        return kind, False, None if plain and not made.exists() else f"no plain error: {error!r}"
    except Hang:
        return kind, False, f"hangs for {SECONDS} s"
    except Exception:
        return kind, False, traceback.format_exc(limit=-4)
    if made.exists() is dry:
        return kind, True, f"a result is there: {made.exists()}"
    if not dry and verb == "trim":
        Tokenizer.from_file(str(made / "tokenizer.json")).encode("a b")
    elif not dry and "config.json" not in damaged:
        table = read_header(made / "model.safetensors").tensors["model.embed_tokens.weight"]
        assert table.rows == json.loads((made / "config.json").read_text())["vocab_size"]
    shutil.rmtree(made, ignore_errors=True)
    return kind, True, None


def run(home, first, count):
    home.mkdir(exist_ok=True)
    text = prose(8_000)
    (home / "text.txt").write_text(text[:2_000], encoding="utf-8")
    (home / "keep.txt").write_text("4\n5\n")
    kinds = seeds(home / "seeds", text)
    signal.signal(signal.SIGALRM, raise_hang)
    counts = {"trim": [0, 0], "transplant": [0, 0], "failed": []}
    before = None
    for number, verb in product(range(first, first + count), ("trim", "transplant")):
        signal.alarm(SECONDS)
        kind, made, wrong = rewrite_case(random.Random(number), home, kinds, verb)
        signal.alarm(0)
        counts[verb][made] += 1
        remove_case(home / "case")
        left = sorted(path.name for path in home.iterdir())
        before = before or left
        if wrong is not None or left != before:
            counts["failed"].append(f"case {number} ({verb}, {kind}): {wrong or left}")
    return counts


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
