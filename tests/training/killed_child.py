"""A comparison in a process of its own that ends by SIGKILL at a chosen moment; run by test_killed.py.

Each moment patches one function of the Trainer or of ours, so that the kill falls where a file is half there.
"""

import os
import shutil
import signal
import sys
from importlib import import_module
from pathlib import Path

from transformers import Trainer, TrainerState, trainer

from tiewise.training import compare, run
from tiewise.training.compare import Display
from tiewise.training.trainer import RunRecord

FLAX = "tiewise.training.kinds.flax"


def die(*arguments, **named):
    os.kill(os.getpid(), signal.SIGKILL)


def on_call(owner, name, number, first=None):
    """Die at call `number` of a function, after `first(real, …)` where given, before it otherwise."""
    owner = import_module(owner) if isinstance(owner, str) else owner
    real, calls = getattr(owner, name), []

    def replaced(*arguments, **named):
        calls.append(name)
        if len(calls) == number:
            if first is not None:
                first(real, *arguments, **named)
            die()
        return real(*arguments, **named)

    setattr(owner, name, replaced)


def half_a_state(real, state, path):
    real(state, path)
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[: len(whole) // 2])


def half_a_line(real, path, line):
    with path.open("a") as file:
        file.write('{"step": 1')


def half_of_the_arrays(real, path, data):
    path.with_name(f".{path.name}.1.partial").write_bytes(b"half")


def half_a_rotation(real, output_dir, **named):
    (Path(output_dir) / "checkpoint-8" / "optimizer.pt").unlink()


def half_a_model(real, made, final):
    shutil.rmtree(final, ignore_errors=True)


def after(real, *arguments, **named):
    real(*arguments, **named)


# Two runs of 40 steps, a checkpoint every 8: five saves each. A call beyond 5 is the second run's.
TORCH = {
    "before the first checkpoint": lambda: on_call(RunRecord, "on_step_end", 5),
    "at a step": lambda: on_call(RunRecord, "on_step_end", 29),
    "at a step of the second run": lambda: on_call(RunRecord, "on_step_end", 60),
    "checkpoint without optimizer": lambda: on_call(Trainer, "_save_optimizer_and_scheduler", 2),
    "checkpoint without random state": lambda: on_call(Trainer, "_save_rng_state", 1),
    "checkpoint without its state": lambda: on_call(TrainerState, "save_to_json", 3),
    "checkpoint with half its state": lambda: on_call(TrainerState, "save_to_json", 7, half_a_state),
    "old checkpoint half removed": lambda: on_call(trainer, "rotate_checkpoints", 3, half_a_rotation),
    "half a line of metrics": lambda: on_call("tiewise.training.trainer", "add_line", 13, half_a_line),
    "while the final loss is measured": lambda: on_call(run, "_result", 1),
    "before the final model is in place": lambda: on_call(run, "replace_path", 2, half_a_model),
    "before the result is written": lambda: on_call(run, "write_json", 1),
    "before checkpoints are removed": lambda: on_call(run, "write_json", 1, after),
    "before the comparison is written": lambda: on_call(compare, "write_json", 1),
}
BY_FLAX = {
    "at a step of the second run": lambda: on_call("tiewise.flax.flax_training", "_step", 60),
    "checkpoint with half its arrays": lambda: on_call(FLAX, "write_whole", 2, half_of_the_arrays),
    "checkpoint without its state": lambda: on_call(FLAX, "write_json", 3),
    "checkpoint not in its place": lambda: on_call(FLAX, "replace_path", 4),
    "half a line of metrics": lambda: on_call(FLAX, "add_line", 13, half_a_line),
    "while the final loss is measured": lambda: on_call(run, "_result", 1),
}
MOMENTS = {"torch": TORCH, "flax": BY_FLAX}


def finish(out):
    """Run or finish the comparison in `out`."""
    return compare.finish(Path(out), Display(lambda line: None))


def dies(out, backend, moment):
    """Run it until `moment`."""
    MOMENTS[backend][moment]()
    finish(out)


def dies_at_touch(out, backend, number):
    """Run it until it touches the disk below `out` for the `number`-th time: opening, renaming, making, removing."""
    touches = []

    def hook(event, arguments):
        if event in TOUCHES and str(arguments[0]).startswith(out):
            touches.append(event)
            if len(touches) == number:
                die()

    sys.addaudithook(hook)
    finish(out)


TOUCHES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")


def dies_at_step(out, backend, number):
    """Run it until its `number`-th step."""
    owner, name = (RunRecord, "on_step_end") if backend == "torch" else ("tiewise.flax.flax_training", "_step")
    on_call(owner, name, number)
    finish(out)


def killed(context, target, *arguments):
    """Run `target` in a process of its own; return its exit code."""
    child = context.Process(target=target, args=arguments)
    child.start()
    child.join(600)  # its first steps by JAX are compiled
    assert not child.is_alive()
    return child.exitcode
