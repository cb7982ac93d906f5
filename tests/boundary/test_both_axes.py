"""Models that FSDP2 and tensor parallelism have cut train as one rank does; `both_axes_ranks.py` has the cases."""

import subprocess
import sys
from pathlib import Path

import pytest

_RANKS = Path(__file__).with_name("both_axes_ranks.py")
STEPS = ["llama,97,tied", "llama,97,untied", "llama,1000,tied", "gpt2,97,tied", "gpt2,1000,untied"]
STEPS += ["gemma2,97,tied", "llama,7,tied", "bert,97,tied", "t5,97,tied"]
STEPS += ["llama,97,tied,factored:8", "llama,97,tied,residual:4", "llama,97,tied,tied,3"]
STEPS += ["gpt2,97,tied,tied+softcap=5+bias+pad=3+alpha=0.5", "gpt2,97,tied,tied+input_scale=2+output_scale=0.5"]
OTHERS = ["adamw,llama,97,tied", "adamw,gpt2,1000,untied", "both_paths,llama,97,2", "both_paths,gpt2,97,3"]
OTHERS += ["refusals,llama,97", "stock,llama,97", "stock,llama,1000", "nothing_is_whole,llama,1000"]


@pytest.mark.slow
def test_four_ranks_train_what_both_have_cut(tmp_path):
    cases = [*(f"steps,{case}" for case in STEPS), *OTHERS]
    done = subprocess.run([sys.executable, _RANKS, tmp_path, *cases], capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stderr[-3000:]
