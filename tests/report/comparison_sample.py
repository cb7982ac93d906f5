"""Synthetic comparisons drawn from a seed: decoders with every field filled, and ALBERTs."""

import math
import random
from dataclasses import replace

from tiewise.training.finding import complete
from tiewise.training.results import ArmDirectPath, BinNll, Comparison, CurvePoint, RunResult, Share

ARMS = ("tied", "untied", "factored:64")
FINAL = {"tied": 5.285, "untied": 5.292, "factored:64": 5.418}
BINS = ("0", "1–9", "10–99", "100–999", "1000–9999", "≥10000")
BIN_TOKENS = (0, 310, 4_870, 13_020, 19_400, 9_900)
BIN_NLL = (None, 10.9, 8.6, 6.7, 4.9, 3.1)
VOCAB, WIDTH = 4096, 128
TOKENS = [" the", " of", " a", " to", " in", " be", "self", "return"]
TOKENS += [".", " object", "\n", "(", ")", " list", " not", " is"]
SHARINGS = ("none", "attention", "ffn", "all")
ALBERT_ARMS = tuple(f"factored:{width}+share={share}" for width in (64, 128) for share in SHARINGS)
NLL = dict(zip(SHARINGS, (4.10, 4.12, 4.31, 4.36), strict=True))
UNIGRAM = 6.21
PAIRS, MASKED_TOKENS = 640, 9_800


def sample_comparison(arms=ARMS, seeds=(0, 1, 2), *, demo=True, steps=800):
    tuning = [
        {"arm": arm, "learning_rate": rate, "nll": FINAL[arm] + 0.3 + bad, "chosen": bad == 0}
        for arm in arms
        for rate, bad in ((6e-3, 0.08), (3e-3, 0.0), (1e-3, 0.21))
    ]
    comparison = Comparison(
        version="0.1.0",
        command=f"tiewise compare --arms {','.join(arms)} --seeds {len(seeds)} --text builtin --out runs/demo",
        demo=demo,
        arms=list(arms),
        seeds=list(seeds),
        reference=arms[0],
        setting={"model": "llama", "width": WIDTH, "layers": 2, "vocab": VOCAB, "steps": steps, "match": "width"},
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
    shared = random.Random(seed).gauss(0, 0.02)  # all arms of a seed share the data order
    heldout = FINAL[arm] + shared + noise.gauss(0, 0.004)
    parameters = _parameters(arm)
    total = sum(parameters.values())
    tilt = {"tied": 0.0, "untied": 0.04, "factored:64": 0.10}[arm]  # rare tokens have a higher loss
    frequency = [
        BinNll(label, tokens, None if nll is None else nll + tilt * (3 - i) / 2 + noise.gauss(0, 0.01))
        for i, (label, tokens, nll) in enumerate(zip(BINS, BIN_TOKENS, BIN_NLL, strict=True))
    ]
    train = heldout - 0.19 - (0.02 if arm == "untied" else 0.0)
    losses = {"heldout_nll": heldout, "train_nll": train, "perplexity": math.exp(heldout), "frequency": frequency}
    losses |= {"bits_per_byte": heldout / math.log(2) / 3.55}
    losses |= {"predicted_initial_nll": math.log(VOCAB) + 0.02, "initial_nll": math.log(VOCAB) + 0.03}
    sizes = {"parameters": parameters, "total_parameters": total, "bytes": 4 * total, "training_bytes": 16 * total}
    trained = {"steps": steps, "init_std": 0.05, "learning_rate": 3e-3}
    trained |= {"tokens_per_second": 21_500 + noise.gauss(0, 300), "seconds": 19 + noise.random()}
    return RunResult(arm, seed, **losses, **sizes, **trained, curve=_curve(arm, heldout, steps, noise))


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
                tune_nll=loss + noise.gauss(0, 0.006) if step % (steps // 10) == 0 else None,
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
    if arm == "tied":  # one table without a map: W·Wᵀ is symmetric with a large diagonal
        logits = [[logits[min(i, j)][max(i, j)] + 6 * (i == j) for j in range(n)] for i in range(n)]
    return ArmDirectPath(arm, list(TOKENS), logits)


# --- masked tokens and pairs


def albert_comparison(arms=ALBERT_ARMS, seeds=(1, 2, 3), *, objective="sop", nll=NLL):
    """Return a synthetic comparison of ALBERTs, with the validation nll of each sharing in `nll`."""
    template = sample_comparison(demo=False)
    runs = [_albert_run(arm, seed, objective, nll, template.runs[0]) for arm in arms for seed in seeds]
    setting = {"model": "albert", "width": 128, "layers": 4, "steps": 800, "objective": objective, "optimizer": "adamw"}
    own = {"arms": list(arms), "seeds": list(seeds), "reference": arms[0], "runs": runs, "setting": setting}
    return complete(replace(template, **own, tuning=[], direct_path=[], bigrams=[]))


def _albert_run(arm, seed, objective, nll, template):
    noise = random.Random(f"{arm} {seed} {objective}")
    boundary, _, share = arm.partition("+share=")
    width = int(boundary.partition(":")[2])
    heldout = nll[share] + (0.05 if width == 64 else 0) + random.Random(seed).gauss(0, 0.01) + noise.gauss(0, 0.004)
    attention, ffn = (1 if share in ("all", kind) else 4 for kind in ("attention", "ffn"))
    parameters = {"shared table": 4096 * width, "output bias": 4096, "attention": 66_000 * attention}
    parameters |= {"ffn": 132_000 * ffn, "positions, projection, heads": 40_000}
    total = sum(parameters.values())
    right = {"sop": (0.72, 0.66), "nsp": (0.52, 0.88), "none": (0.51, 0.53)}[objective]
    shares = {"masked": _share(0.27 + (4.3 - heldout) / 10, MASKED_TOKENS, heldout, noise)}
    shares |= {name: _share(p, PAIRS, 0.6, noise) for name, p in zip(("sop", "nsp"), right, strict=True)}
    losses = {"heldout_nll": heldout, "train_nll": heldout - 0.2, "perplexity": math.exp(heldout)}
    sizes = {"parameters": parameters, "total_parameters": total, "trainable_parameters": total, "bytes": 4 * total}
    own = {"bits_per_byte": math.nan, "shares": shares, "unigram_nll": UNIGRAM}
    return replace(template, arm=arm, seed=seed, **losses, **sizes, **own)


def _share(p, count, nll, noise):
    return Share.of(sum(noise.random() < p for _ in range(count)), count, nll)
