"""Tensor-parallel models train as one rank does; `tensor_parallel_ranks.py` has the cases."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

_RANKS = Path(__file__).with_name("tensor_parallel_ranks.py")
STEPS = [
    ",".join(("twenty_steps", *case))
    for case in itertools.product(("llama", "gemma2"), ("97", "1000"), ("tied", "untied"))
]
OTHERS = ["both_paths,llama,97", "logits_are_real,gemma2,97", "log_probabilities,gemma2,97", "refusals,llama,97"]
OTHERS += ["adamw_and_class_weights,llama,97", "twenty_steps,phi,97,untied", "saved_with_a_boundary,llama,97"]
ALONE = [",".join(("ends_alone", *case)) for case in (("gpt2", "97", "tied"), ("gpt2", "1000", "untied"))]
ALONE += [",".join(("ends_alone", kind, "97", "tied")) for kind in ("bert", "t5", "bart")]
BEFORE = ["meshes,gpt2,97", "installed_before,llama,97,factored:8,residual:8,projected:8"]
BEFORE += ["installed_before,gpt2,97,factored:8+bias+output_scale=0.5,tied+softcap=5+input_scale=2+pad=3+alpha=0.5"]


def ranks(tmp_path, size, cases):
    command = [sys.executable, str(_RANKS), str(tmp_path), str(size), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr


def test_twenty_steps_of_two_ranks_are_those_of_one(tmp_path):
    ranks(tmp_path, 2, ["twenty_steps,llama,97,tied", "nothing_is_whole,llama,1000"])


@pytest.mark.slow
def test_two_ranks_train_every_family_table_and_vocabulary(tmp_path):
    ranks(tmp_path, 2, [*STEPS, "twenty_steps,llama,50257,tied", *OTHERS, *ALONE, *BEFORE])


@pytest.mark.slow
def test_four_ranks_do_too(tmp_path):
    few = ["twenty_steps,llama,7,tied", "both_paths,llama,7", "nothing_is_whole,gemma2,1000"]
    ranks(
        tmp_path, 4, [*STEPS, *few, *ALONE[2:4], BEFORE[1], "two_groups,gpt2,97", "heads_that_do_not_divide,llama,97"]
    )
