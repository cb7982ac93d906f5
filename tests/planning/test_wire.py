"""Test the planned bytes of every layout against the dispatcher's count and the TCP counters of the kernel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENDS = ["data parallel", "fsdp", "fsdp, tables kept sharded", "vocabulary parallel"]
LLAMA = [f"{kind}, {name}" for kind in ("tied", "untied", "tied, installed") for name in ("data parallel", "fsdp")]
LLAMA += [f"{kind}, installed, fsdp, tables kept sharded" for kind in ("tied", "untied")]
LLAMA += ["tied, stock tensor parallel", "tied, installed, vocabulary parallel"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_send_the_planned_bytes(ranks):
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.wire", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    table_rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in done.stdout.splitlines()[4:]]
    for vocab in ("5,003", "97")[: ranks // 2]:
        names = [name.rpartition(", ")[0] for v, name, *_ in table_rows if v == vocab]
        both = ["fsdp × vocabulary parallel"] if ranks == 4 else []
        llama = [*LLAMA, *(f"tied, installed, {name}" for name in both)]
        assert {*ENDS, *both, *(f"Llama, {name}" for name in llama)} == set(names)
    for vocab, name, *numbers in table_rows:
        planned, counted, gloo, tcp = (int(number.replace(",", "")) for number in numbers)
        assert counted == pytest.approx(planned, rel=0.005), (vocab, name)
        if vocab == "5,003":  # with the small vocabulary, headers exceed 5 % of the bytes
            assert tcp == pytest.approx(gloo, rel=0.05), (vocab, name)
