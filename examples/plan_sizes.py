"""Find the width from which tying saves less than a tenth, for three vocabularies."""

from tiewise.planning.read_config import Sizes, from_sizes

for vocab in (32_000, 128_000, 256_000):
    for width in range(512, 16_385, 512):
        sizes = Sizes(vocab, width, layers=max(4, width // 128))
        untied = from_sizes(sizes, tied=False).total
        if vocab * width / untied < 0.1:
            print(f"V = {vocab:,}: from width {width:,}, about {untied / 1e9:.1f} billion parameters")
            break
