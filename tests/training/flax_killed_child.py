"""A comparison by the flax backend that ends by SIGKILL at a chosen moment; run by test_flax_killed.py."""

from pathlib import Path

from killed_child import on_call

from tiewise.flax import flax_training
from tiewise.training import compare, run
from tiewise.training.display import Display
from tiewise.training.kinds import flax


def half_a_line(real, path, line):
    with path.open("a") as file:
        file.write('{"step": 1')


def half_of_the_arrays(real, path, data):
    path.with_name(f".{path.name}.1.partial").write_bytes(b"half")


# Two runs of 40 steps, a checkpoint every 8: five saves each. A call beyond 5 is the second run's.
MOMENTS = {
    "at a step of the second run": lambda: on_call(flax_training, "_step", 60),
    "checkpoint with half its arrays": lambda: on_call(flax, "write_whole", 2, half_of_the_arrays),
    "checkpoint without its state": lambda: on_call(flax, "write_json", 3),
    "checkpoint not in its place": lambda: on_call(flax, "replace_path", 4),
    "half a line of metrics": lambda: on_call(flax, "add_line", 13, half_a_line),
    "while the final loss is measured": lambda: on_call(run, "_result", 1),
}


def dies(out, moment):
    """Run the comparison in `out` until `moment`."""
    MOMENTS[moment]()
    finish(out)


def dies_at_step(out, number):
    """Run it until its `number`-th step."""
    on_call(flax_training, "_step", number)
    finish(out)


def finish(out):
    """Run or finish it."""
    return compare.finish(Path(out), Display(lambda line: None))
