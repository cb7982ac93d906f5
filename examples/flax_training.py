"""Train tied, untied and factored decoders in Flax NNX with Optax.

    python examples/flax_training.py [steps]

The text is Python's own documentation, so nothing is downloaded. PyTorch can read the files in runs/flax/.
"""

import argparse
import math
import sys
from pathlib import Path

from flax import nnx

from tiewise.boundary.flax.find_tables import find_tables
from tiewise.boundary.flax.models import FlaxDecoder, count_parameters
from tiewise.boundary.flax.parameter_files import write
from tiewise.boundary.flax.training import Fitting, OptaxRecipe, TrainingPoint, token_losses
from tiewise.training.data.corpus import prepare

OUT = Path("runs/flax")
VOCAB, WIDTH = 2048, 64


def show(point: TrainingPoint, steps: int) -> None:
    """Print the state of training at one step."""
    paths = point.paths
    cosine = "" if math.isnan(paths.cosine) else f"  cosine {paths.cosine:+.3f}"
    print(
        f"\r  step {point.step}/{steps}  nll {point.train_nll:.3f}  lookup {paths.a:.3f}  head {paths.b:.3f}{cosine}",
        end="",
        file=sys.stderr,
        flush=True,
    )


def main() -> None:
    """Train every arm and print its validation loss and speed."""
    parser = argparse.ArgumentParser(description="Train tied, untied and factored decoders in Flax NNX with Optax.")
    parser.add_argument("steps", type=int, nargs="?", default=200)
    recipe = OptaxRecipe(steps=parser.parse_args().steps, length=64)
    print("preparing the text", file=sys.stderr)
    text = prepare(["builtin"], f"bpe:{VOCAB}", OUT / "data", length=recipe.length)
    for arm in ("tied", "untied", "factored:16"):
        print(arm, file=sys.stderr)
        model = FlaxDecoder(arm, VOCAB, WIDTH, layers=2, heads=2, rngs=nnx.Rngs(recipe.seed))
        fitting = Fitting(model, text.split("train"), recipe)
        for point in fitting.steps():
            if point is not None:
                show(point, recipe.steps)
        print(file=sys.stderr)
        losses, _ = token_losses(model, text.split("heldout"), recipe.length, blocks=128)
        write(OUT / f"{arm.replace(':', '-')}.safetensors", model.named())
        nll = float(losses.mean())
        print(
            f"{arm:12} {count_parameters(model):9,} parameters  {find_tables(nnx.state(model, nnx.Param), VOCAB)}\n"
            f"{'':12} validation nll {nll:.4f}, perplexity {math.exp(nll):.1f}, "
            f"{fitting.timed * recipe.batch * recipe.length / fitting.seconds:,.0f} tokens/s"
        )


if __name__ == "__main__":
    main()
