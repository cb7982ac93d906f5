"""A disk that takes no more: one line, exit 2, and `--resume` ends as if nothing had happened."""

import json

import pytest
from cli_tiny import TINY
from launched import ended, launch

pytestmark = pytest.mark.slow
RUN = ["--steps=40", "--set=width=64", "--json"]


@pytest.fixture
def undisturbed(tmp_path, text):
    (_, out, _), *_ = ended(launch(tmp_path, 1, "train", "-t", text, *TINY, *RUN, "--out=whole"))
    return json.loads(out)


# A checkpoint takes 600 kB: too little for the text, then for events, a first checkpoint, a second, an optimizer.
@pytest.mark.parametrize(("count", "size"), [(1, 20), (1, 60), (1, 150), (1, 400), (1, 1200), (1, 1800), (2, 400)])
def test_a_run_on_a_full_disk_goes_on_when_there_is_room(tmp_path, text, disk, undisturbed, count, size):
    out = disk(size) / "run"
    (code, said, err), *others = ended(launch(tmp_path, count, "train", "-t", text, *TINY, *RUN, f"--out={out}"))
    assert (code, said, others) == (2, "", [(2, "", "")] * (count - 1))
    begun = (out / "run.yaml").exists()
    assert begun == (size > 20)
    fix = f"make room there, then tiewise train --out {out} --resume" if begun else "choose another"
    assert fix in err.splitlines()[-1]
    assert "No space left on device" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert out.exists() == begun
    again = ["--resume", "--json"] if begun else ["-t", text, *TINY, *RUN]
    disk(60_000)
    (code, said, err), *others = ended(launch(tmp_path, count, "train", *again, f"--out={out}"))
    assert (code, others) == (0, [(0, "", "")] * (count - 1)), err
    for name in ("heldout_nll", "train_nll"):
        assert json.loads(said)[name] == pytest.approx(undisturbed[name], abs=1e-6)
