"""From which width on does tying save less than a tenth? Counted for three vocabularies, without weights."""

import tiewise
from tiewise.planning.read_config import Sizes

for vocab in (32_000, 128_000, 256_000):
    for width in range(512, 16_385, 512):
        sizes = Sizes(vocab, width, layers=max(4, width // 128))
        tied, untied = (choice["parameters"]["total"] for choice in tiewise.plan(sizes).choices)
        if (untied - tied) / untied < 0.1:
            print(f"V = {vocab:,}: from width {width:,}, {untied / 1e9:.1f} billion parameters")
            break
