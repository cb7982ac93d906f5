"""Models whose tables ranks share train as one rank does; the cases are in three files beside this one.

`tensor_parallel_ranks.py`: transformers' tensor parallelism. `kept_ranks.py`: rows kept under FSDP2.
`both_axes_ranks.py`: four ranks, both.
"""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

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
KEPT = {2: ["llama,97,untied", "gpt2,7,tied", "gemma2,97,tied", "t5,97,untied", "bert,97,tied", "phi,7,untied"]}
KEPT[2] += ["llama,97,tied,factored:8", "gpt2,97,tied,tied+softcap=5+bias+pad=3+alpha=0.5"]
KEPT[2] += ["gpt2,97,tied,tied+input_scale=2+output_scale=0.5"]
KEPT[4] = ["llama,97,tied", "t5,97,tied", "gpt2,1000,untied", "llama,7,tied", "llama,97,tied,residual:4"]
KEPT[4] += ["llama,97,tied,tied,2", "llama,6,tied"]
KEPT = {size: [f"steps,{case}" for case in cases] for size, cases in KEPT.items()}
KEPT[2] += ["both_paths,llama,97,1", "logits_are_real,llama,97", "bf16,llama,97", "still,llama,97"]
KEPT[4] += ["adamw,llama,97,tied", "adamw,gpt2,97,untied", "both_paths,gpt2,97,2", "nothing_is_whole,llama,1000"]
KEPT[4] += ["kept_on_disk,llama,97"]
BOTH = ["llama,97,tied", "llama,97,untied", "llama,1000,tied", "gpt2,97,tied", "gpt2,1000,untied"]
BOTH += ["gemma2,97,tied", "llama,7,tied", "bert,97,tied", "t5,97,tied"]
BOTH += ["llama,97,tied,factored:8", "llama,97,tied,residual:4", "llama,97,tied,tied,3"]
BOTH += ["gpt2,97,tied,tied+softcap=5+bias+pad=3+alpha=0.5", "gpt2,97,tied,tied+input_scale=2+output_scale=0.5"]
BOTH = [f"steps,{case}" for case in BOTH]
BOTH += ["adamw,llama,97,tied", "adamw,gpt2,1000,untied", "both_paths,llama,97,2", "both_paths,gpt2,97,3"]
BOTH += ["refusals,llama,97", "stock,llama,97", "stock,llama,1000", "nothing_is_whole,llama,1000"]


def ranks(*arguments, script="tensor_parallel"):
    command = [sys.executable, Path(__file__).with_name(f"{script}_ranks.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stderr[-3000:]


def test_twenty_steps_of_two_ranks_are_those_of_one(tmp_path):
    ranks(tmp_path, 2, "twenty_steps,llama,97,tied", "nothing_is_whole,llama,1000")


@pytest.mark.slow
def test_two_ranks_train_every_family_table_and_vocabulary(tmp_path):
    ranks(tmp_path, 2, *STEPS, "twenty_steps,llama,50257,tied", *OTHERS, *ALONE, *BEFORE)


@pytest.mark.slow
def test_four_ranks_do_too(tmp_path):
    few = ["twenty_steps,llama,7,tied", "both_paths,llama,7", "nothing_is_whole,gemma2,1000"]
    few += [*ALONE[2:4], BEFORE[1], "two_groups,gpt2,97", "heads_that_do_not_divide,llama,97"]
    ranks(tmp_path, 4, *STEPS, *few)


def test_two_ranks_keep_rows(tmp_path):
    ranks(tmp_path, 2, "steps,llama,97,tied", "told_apart,gpt2,97", script="kept")


@pytest.mark.slow
@pytest.mark.parametrize("size", KEPT)
def test_more_of_them_do(tmp_path, size):
    ranks(tmp_path, size, *KEPT[size], script="kept")


@pytest.mark.slow
def test_four_ranks_train_what_both_have_cut(tmp_path):
    ranks(tmp_path, *BOTH, script="both_axes")
