"""Results of the first MLP and bigrams as an inspection would have them, made by hand."""

from tiewise.analysis.bigram_counts import Irreversibility, TextPair
from tiewise.analysis.bigram_maps import HeatMap, Likeness
from tiewise.analysis.bigram_paths import PathFit, PathLoss, Split
from tiewise.analysis.estimates import Estimate
from tiewise.analysis.path_matrix import SampledAsymmetry
from tiewise.analysis.path_tokens import Transition, WordPair
from tiewise.inspection.sections.bigrams import BigramsFound, FrequentSplit
from tiewise.internals.first_mlp import FirstMlp, PathView

TEXTS = (" the", '<b>"', " New", " York")
TARGET = HeatMap(
    (1, 2, 3, 4), TEXTS, ((0.5, None, 1.0, -1.0), (2.0, 0.1, None, 0.3), (-1.0, 0.2, None, 3.0), (0.4, 1.0, -2.0, 0.0))
)
SAID = HeatMap(
    (1, 2, 3, 4), TEXTS, ((9.0, 0.1, 1.0, -1.0), (2.0, 8.1, 0.2, 0.3), (-1.0, 0.2, 7.0, 3.0), (0.4, 1.0, 3.0, 9.0))
)
LIKE = Likeness(0.5, 0.02, None, None, 9, 2)


def pair(there=1.25, back=1.25):
    """Return "New" and "<York>", both ways."""
    return WordPair("New", "<York>", Transition(3, 4, there, 0.02, -3.9, 4), Transition(4, 3, back, 1e-20, -46.1, 3999))


def sampled(value):
    """Return an asymmetry with a narrow interval."""
    return SampledAsymmetry(Estimate(value, value - 0.01, value + 0.02, 4000), Estimate(value, value, value, 4000))


def mlp(text=True, asked=True):
    """Return one model's two paths."""
    loss = PathLoss(9.5, 9.4, 9.6, 4096, False)
    views = [
        PathView(sampled(value), (pair(back=value),) if asked else (), *((SAID, LIKE, loss) if text else ()))
        for value in (0.16, 1.02)
    ]
    return FirstMlp(
        family="llama",
        composition="x + mlp(post_attention_layernorm(x))",
        parameters=132224,
        table_parameters=524288,
        model_parameters=920192,
        tied=True,
        rows=4096,
        samples=4000,
        without=views[0],
        within=views[1],
        change=sampled(0.86),
        target=TARGET if text else None,
        text=text_pairs() if text and asked else (),
        notes=(),
    )


def text_pairs():
    """Return the requested pair in the text."""
    return (TextPair("New", "<York>", (3, 4), 377, 0, 0.02, 0.0, 0.0004),)


def bigrams(own=8.18):
    """Return a text and one model's path on it."""
    fit = PathFit(128, True, 3.24, 1e-5, 1, 0.0)
    split = Split(2.824, 0.214, 0.202, -1e-6, 0.02, fit, fit, PathFit(128, False, 2.844, 8e-4, 1, 0.0))
    whole = Irreversibility(0.583, 0.364, 0.348, 0.38, 0.13, 0.0003, 10, 623322)
    return BigramsFound(
        tokens=623322,
        vocabulary=4096,
        seen=3911,
        different=133544,
        width=128,
        tied=True,
        unigram=6.57,
        entropy=3.813,
        irreversibility=whole,
        own=PathLoss(12.78, 12.67, 12.9, 4096, False),
        frequent=FrequentSplit(255, 0.6, whole, split, own, 512),
        asked=text_pairs(),
        one_way=(TextPair(".", "\n", (14, 199), 12110, 22, 0.5, 0.0004, 0.013),),
        target=TARGET,
        heat=SAID,
        likeness=LIKE,
        notes=(),
    )
