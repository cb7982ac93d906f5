"""A realistic comparison made up from a seed: three arms, three seeds, every field filled."""

import math
import random

from tiewise.training.results import ArmDirectPath, BinNll, Comparison, CurvePoint, RunResult, complete

ARMS = ("tied", "untied", "factored:64")
FINAL = {"tied": 5.285, "untied": 5.292, "factored:64": 5.418}
BINS = ("0", "1–9", "10–99", "100–999", "1000–9999", "≥10000")
BIN_TOKENS = (0, 310, 4_870, 13_020, 19_400, 9_900)
BIN_NLL = (None, 10.9, 8.6, 6.7, 4.9, 3.1)
VOCAB, WIDTH = 4096, 128
TOKENS = [" the", " of", " a", " to", " in", " be", "self", "return"]
TOKENS += [".", " object", "\n", "(", ")", " list", " not", " is"]


def sample_comparison(arms=ARMS, seeds=(0, 1, 2), *, demo=True, steps=800):
    tuning = [
        {"arm": arm, "init": init, "learning_rate": rate, "nll": FINAL[arm] + 0.3 + bad, "chosen": bad == 0}
        for arm in arms
        for init, rate, bad in ((0.02, 3e-3, 0.08), (0.05, 3e-3, 0.0), (0.05, 1e-3, 0.21))
    ]
    comparison = Comparison(
        version="0.1.0",
        command=f"tiewise compare --arms {','.join(arms)} --seeds {len(seeds)} --text builtin --out runs/demo",
        demo=demo,
        arms=list(arms),
        seeds=list(seeds),
        reference=arms[0],
        setting={
            "model": "llama",
            "width": WIDTH,
            "layers": 2,
            "vocab": VOCAB,
            "steps": steps,
            "batch": 8,
            "length": 64,
        }
        | {"match": "width", "tune": True},
        data={
            "sources": ["builtin"],
            "sha256": "9c1185a5c5e9fc54612808977ee8f548b2258d31ca7a8d4e8a6f2a6d6d1f0f4b",
            "characters": 2_106_195,
            "tokens": {"train": 521_416, "tune": 23_700, "heldout": 47_402},
            "tokenizer": "bpe:4096",
            "python": "3.11.2",
        },
        env={"python": "3.11.2", "torch": "2.13.0", "transformers": "5.23.0", "device": "cpu", "threads": 2},
        runs=[_run(arm, seed, steps) for arm in arms for seed in seeds],
        tuning=tuning,
        direct_path=[_direct_path(arm) for arm in arms],
        bigrams=[
            {"left": " of", "right": " the", "forward": 0.231, "backward": 0.00021, "count": 4120},
            {"left": " to", "right": " be", "forward": 0.062, "backward": 0.0011, "count": 901},
            {"left": "return", "right": " a", "forward": 0.118, "backward": 0.0004, "count": 377},
        ],
    )
    return complete(comparison)


def _parameters(arm):
    table = VOCAB * WIDTH
    tables = {
        "tied": {"shared table": table},
        "untied": {"input table": table, "output table": table},
        "factored:64": {"shared table": VOCAB * 64, "maps": 2 * 64 * WIDTH},
    }[arm]
    return {**tables, "body": 461_184}


def _run(arm, seed, steps):
    noise = random.Random(f"{arm} {seed}")
    shared = random.Random(seed).gauss(0, 0.02)  # data order moves all arms alike
    heldout = FINAL[arm] + shared + noise.gauss(0, 0.004)
    parameters = _parameters(arm)
    total = sum(parameters.values())
    tilt = {"tied": 0.0, "untied": 0.04, "factored:64": 0.10}[arm]  # rare tokens suffer more
    return RunResult(
        arm=arm,
        seed=seed,
        steps=steps,
        train_nll=heldout - 0.19 - (0.02 if arm == "untied" else 0.0),
        heldout_nll=heldout,
        perplexity=math.exp(heldout),
        bits_per_byte=heldout / math.log(2) / 3.55,
        frequency=[
            BinNll(label, tokens, None if nll is None else nll + tilt * (3 - i) / 2 + noise.gauss(0, 0.01))
            for i, (label, tokens, nll) in enumerate(zip(BINS, BIN_TOKENS, BIN_NLL, strict=True))
        ],
        parameters=parameters,
        total_parameters=total,
        bytes=4 * total,
        tokens_per_second=21_500 + noise.gauss(0, 300),
        training_bytes=16 * total,
        seconds=19 + noise.random(),
        init_std=0.05,
        learning_rate=3e-3,
        predicted_initial_nll=math.log(VOCAB) + 0.02,
        initial_nll=math.log(VOCAB) + 0.03,
        curve=_curve(arm, heldout, steps, noise),
    )


def _curve(arm, final, steps, noise):
    points = []
    for step in range(0, steps + 1, max(steps // 40, 1)):
        progress = step / steps
        loss = final + (math.log(VOCAB) - final) * math.exp(-6 * progress) + 0.15 * (1 - progress)
        share = {"tied": 0.62, "untied": 0.58, "factored:64": 0.66}[arm] + 0.3 * math.exp(-8 * progress)
        norm = 0.4 + math.exp(-3 * progress) + 0.02 * noise.random()
        measured = step > 0
        points.append(
            CurvePoint(
                step=step,
                tokens=step * 8 * 64,
                train_nll=loss - 0.15 + noise.gauss(0, 0.03) if measured else None,
                heldout_nll=loss + noise.gauss(0, 0.006) if step % (steps // 10) == 0 else None,
                path_a=norm * (1 - share) if measured else None,
                path_b=norm * share if measured else None,
                cosine=0.05 + 0.1 * progress + noise.gauss(0, 0.01) if measured and arm != "untied" else None,
            )
        )
    return points


def _direct_path(arm):
    noise = random.Random(arm)
    n = len(TOKENS)
    logits = [[noise.gauss(-1, 0.8) for _ in range(n)] for _ in range(n)]
    if arm == "tied":  # one table and no map: W·Wᵀ is symmetric, with a long diagonal
        logits = [[logits[min(i, j)][max(i, j)] + 6 * (i == j) for j in range(n)] for i in range(n)]
    return ArmDirectPath(arm, list(TOKENS), logits)
