"""Models whose tables are kept in rows under FSDP2 train as one rank does; `kept_ranks.py` has the cases."""

import subprocess
import sys
from pathlib import Path

import pytest

_RANKS = Path(__file__).with_name("kept_ranks.py")
QUICK = ["steps,llama,97,tied", "told_apart,gpt2,97"]
TWO = ["llama,97,untied", "gpt2,7,tied", "gemma2,97,tied", "t5,97,untied", "bert,97,tied", "phi,7,untied"]
TWO += ["llama,97,tied,factored:8", "gpt2,97,tied,tied+softcap=5+bias+pad=3+alpha=0.5"]
TWO += ["gpt2,97,tied,tied+input_scale=2+output_scale=0.5"]
FOUR = ["llama,97,tied", "t5,97,tied", "gpt2,1000,untied", "llama,7,tied", "llama,97,tied,residual:4"]
FOUR += ["llama,97,tied,tied,2", "llama,6,tied"]
LONG = {2: [f"steps,{case}" for case in TWO], 4: [f"steps,{case}" for case in FOUR]}
LONG[2] += ["both_paths,llama,97,1", "logits_are_real,llama,97", "bf16,llama,97", "still,llama,97"]
LONG[4] += ["adamw,llama,97,tied", "adamw,gpt2,97,untied", "both_paths,gpt2,97,2", "nothing_is_whole,llama,1000"]
LONG[4] += ["kept_on_disk,llama,97"]


def ranks(folder, size, cases):
    command = [sys.executable, _RANKS, folder, str(size), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stderr[-3000:]


def test_two_ranks_beside_one(tmp_path):
    ranks(tmp_path, 2, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("size", LONG)
def test_more_of_them_beside_one(tmp_path, size):
    ranks(tmp_path, size, LONG[size])
