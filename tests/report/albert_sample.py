"""A comparison of ALBERTs made up from a seed: four sharings, two widths, three seeds, masked tokens and pairs."""

import math
import random
from dataclasses import replace

from tests.report.comparison_sample import sample_comparison

from tiewise.training.results import Share, complete

SHARINGS = ("none", "attention", "ffn", "all")
ARMS = tuple(f"factored:{width}+share={share}" for width in (64, 128) for share in SHARINGS)
NLL = dict(zip(SHARINGS, (4.10, 4.12, 4.31, 4.36), strict=True))
UNIGRAM = 6.21
PAIRS, TOKENS = 640, 9_800


def albert_comparison(arms=ARMS, seeds=(1, 2, 3), *, objective="sop", nll=NLL):
    """`nll` gives the validation nll by sharing."""
    template = sample_comparison(demo=False)
    runs = [_run(arm, seed, objective, nll, template.runs[0]) for arm in arms for seed in seeds]
    setting = {"model": "albert", "width": 128, "layers": 4, "steps": 800, "objective": objective, "optimizer": "adamw"}
    return complete(
        replace(
            template,
            arms=list(arms),
            seeds=list(seeds),
            reference=arms[0],
            runs=runs,
            setting=setting,
            tuning=[],
            direct_path=[],
            bigrams=[],
        )
    )


def _run(arm, seed, objective, nll, template):
    noise = random.Random(f"{arm} {seed} {objective}")
    boundary, _, share = arm.partition("+share=")
    width = int(boundary.partition(":")[2])
    heldout = nll[share] + (0.05 if width == 64 else 0) + random.Random(seed).gauss(0, 0.01) + noise.gauss(0, 0.004)
    attention, ffn = (
        66_000 * (1 if share in ("all", "attention") else 4),
        132_000 * (1 if share in ("all", "ffn") else 4),
    )
    parameters = {
        "shared table": 4096 * width,
        "output bias": 4096,
        "attention": attention,
        "ffn": ffn,
        "positions, projection, heads": 40_000,
    }
    total = sum(parameters.values())
    right = {"sop": (0.72, 0.66), "nsp": (0.52, 0.88), "none": (0.51, 0.53)}[objective]
    shares = {"masked": _share(0.27 + (4.3 - heldout) / 10, TOKENS, heldout, noise)}
    shares |= {name: _share(p, PAIRS, 0.6, noise) for name, p in zip(("sop", "nsp"), right, strict=True)}
    return replace(
        template,
        arm=arm,
        seed=seed,
        heldout_nll=heldout,
        train_nll=heldout - 0.2,
        perplexity=math.exp(heldout),
        bits_per_byte=math.nan,
        parameters=parameters,
        total_parameters=total,
        trainable_parameters=total,
        bytes=4 * total,
        shares=shares,
        unigram_nll=UNIGRAM,
    )


def _share(p, count, nll, noise):
    return Share.of(sum(noise.random() < p for _ in range(count)), count, nll)
