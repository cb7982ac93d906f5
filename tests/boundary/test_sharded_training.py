"""Models with tables sharded over ranks, compared with one rank in training by the cases of `table_ranks`."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

FAMILIES = [",".join(case) for case in itertools.product(("llama", "gemma2"), ("97", "1000"), ("tied", "untied"))]
STEPS = [f"steps,stock,{case}" for case in FAMILIES]
OTHERS = ["both_paths,stock,llama,97", "logits_are_real,stock,gemma2,97", "log_probabilities,gemma2,97"]
OTHERS += ["refusals,stock,llama,97", "columns,llama,97", "adamw_and_class_weights,llama,97"]
OTHERS += ["steps,stock,phi,97,untied", "steps,stock,llama,50257,tied", "saved_with_a_boundary,llama,97"]
ALONE = ["gpt2,97,tied", "gpt2,1000,untied", "bert,97,tied", "t5,97,tied", "bart,97,tied"]
ALONE = [f"ends_alone,{case}" for case in ALONE]
BEFORE = ["meshes,gpt2,97", "installed_before,llama,97,factored:8,residual:8,projected:8"]
BEFORE += ["installed_before,gpt2,97,factored:8+bias+output_scale=0.5,tied+softcap=5+input_scale=2+pad=3+alpha=0.5"]
KEPT = {2: ["llama,97,untied", "gpt2,7,tied", "gemma2,97,tied", "t5,97,untied", "bert,97,tied", "phi,7,untied"]}
KEPT[2] += ["llama,97,tied,factored:8", "gpt2,97,tied,tied+softcap=5+bias+pad=3+alpha=0.5"]
KEPT[2] += ["gpt2,97,tied,tied+input_scale=2+output_scale=0.5"]
KEPT[4] = ["llama,97,tied", "t5,97,tied", "gpt2,1000,untied", "llama,7,tied", "llama,97,tied,residual:4"]
KEPT[4] += ["llama,97,tied,tied,2", "llama,6,tied"]
KEPT = {size: [f"steps,kept,{case}" for case in cases] for size, cases in KEPT.items()}
KEPT[2] += ["both_paths,kept,llama,97,1", "logits_are_real,kept,llama,97", "bf16,llama,97", "still,llama,97"]
KEPT[4] += ["adamw,kept,llama,97,tied", "adamw,kept,gpt2,97,untied", "both_paths,kept,gpt2,97,2"]
KEPT[4] += ["nothing_is_whole,kept,llama,1000", "kept_on_disk,llama,97"]
BOTH = ["llama,97,tied", "llama,97,untied", "llama,1000,tied", "gpt2,97,tied", "gpt2,1000,untied"]
BOTH += ["gemma2,97,tied", "llama,7,tied", "bert,97,tied", "t5,97,tied"]
BOTH += ["llama,97,tied,factored:8", "llama,97,tied,residual:4", "llama,97,tied,tied,3"]
BOTH += ["gpt2,97,tied,tied+softcap=5+bias+pad=3+alpha=0.5", "gpt2,97,tied,tied+input_scale=2+output_scale=0.5"]
BOTH = [f"steps,both,{case}" for case in BOTH]
BOTH += ["adamw,both,llama,97,tied", "adamw,both,gpt2,1000,untied", "both_paths,both,llama,97,2"]
BOTH += ["both_paths,both,gpt2,97,3", "refusals,both,llama,97", "stock,llama,97", "stock,llama,1000"]
BOTH += ["nothing_is_whole,both,llama,1000"]


def run_ranks(folder, size, *cases):
    command = [sys.executable, Path(__file__).with_name("table_ranks.py"), folder, str(size), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stderr[-3000:]


def test_two_ranks_train_as_one_without_a_full_table(tmp_path):
    stock = ["steps,stock,llama,97,tied", "nothing_is_whole,stock,llama,1000"]
    run_ranks(tmp_path, 2, *stock, "refusals,kept,gpt2,97", "told_apart,gpt2,97")


@pytest.mark.slow
def test_two_ranks_train_every_family_table_and_vocabulary_as_one_does(tmp_path):
    run_ranks(tmp_path, 2, *STEPS, *OTHERS, *ALONE, *BEFORE)


@pytest.mark.slow
def test_four_ranks_train_as_one_does(tmp_path):
    few = ["steps,stock,llama,7,tied", "both_paths,stock,llama,7", "nothing_is_whole,stock,gemma2,1000"]
    few += [*ALONE[2:4], BEFORE[1], "two_groups,gpt2,97", "heads_that_do_not_divide,llama,97"]
    run_ranks(tmp_path, 4, *STEPS, *few)


@pytest.mark.slow
@pytest.mark.parametrize("size", KEPT)
def test_ranks_that_keep_table_rows_under_fsdp_train_as_one_does(tmp_path, size):
    run_ranks(tmp_path, size, *KEPT[size])


@pytest.mark.slow
def test_four_ranks_train_models_cut_by_tensor_parallelism_and_fsdp(tmp_path):
    run_ranks(tmp_path, 4, *BOTH)
