"""Tests that each kind of run is one file, which is imported only when used."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tiewise.core import ranks
from tiewise.core.errors import RunError, UnsupportedError
from tiewise.planning.first_loss import sound_std
from tiewise.training import kinds
from tiewise.training.compare import finish
from tiewise.training.settings import Settings, find_kind

THROWAWAY = """
from dataclasses import dataclass

from tiewise.training.kinds.decoder import Decoders


@dataclass(frozen=True)
class Options:
    throwaway_factor: float = 1.0


class ThrowawayKind(Decoders):
    where = "in a throwaway run"
    options = Options
    lacks = {"tune": (False, "leave it out")}

    def table_std(self, job):
        return job.settings.kind_options.throwaway_factor * super().table_std(job)


KIND = ThrowawayKind()
"""


def test_kind_added_as_one_file_trains_and_compares(tiny_settings, tmp_path, lines, monkeypatch):
    (tmp_path / "kinds").mkdir()
    (tmp_path / "kinds" / "throwaway.py").write_text(THROWAWAY)
    monkeypatch.setattr(kinds, "__path__", [*kinds.__path__, str(tmp_path / "kinds")])
    settings = {
        name: value for name, value in vars(tiny_settings(steps=2)).items() if name not in ("kind_options", "kind")
    }
    chosen = Settings.of({**settings, "kind": "throwaway", "throwaway_factor": 2.0})
    found = finish(lines.begin(chosen, tmp_path / "out"), lines.display)
    assert [run.init_std for run in found.runs] == [2 * sound_std(16)] * 2
    assert found.setting["throwaway_factor"] == 2.0
    assert found.difference("untied", "heldout_nll").n == 1
    with pytest.raises(RunError, match="tune = True in a throwaway run; leave it out"):
        Settings.of({"kind": "throwaway", "tune": True}).checked()


def test_settings_refuse_unknown_kind_and_list_all_kinds():
    files = Path(kinds.__file__).parent.glob("[a-z]*.py")
    names = ", ".join(sorted(path.stem for path in files))
    assert {"decoder", "flax"} <= {path.stem for path in Path(kinds.__file__).parent.glob("*.py")}
    with pytest.raises(RunError, match=f"kind = 'no kind has this name'; choose one of {names}"):
        Settings.of({"kind": "no kind has this name"})


@pytest.mark.parametrize(("kind", "says"), [("recurrent", "a state is carried in order"), ("flax", "start one")])
def test_single_process_kinds_refuse_several_processes(monkeypatch, kind, says):
    group = ranks._Group()
    group.size = 2
    monkeypatch.setattr(ranks, "_group", group)
    with pytest.raises(UnsupportedError, match=says):
        find_kind(kind).check_processes(Settings())


def test_decoder_comparison_imports_no_other_kind():
    code = """
        import sys
        import tiewise.lab.runs
        from tiewise.training.run import kind_of
        from tiewise.training.settings import DECODER, Settings, kinds
        kind_of(Settings().checked())
        others = {*kinds(), "jax", "streams", "optimizers"} - {DECODER, "heal"}  # lab has `heal`
        ours = [name for name in sys.modules if name.startswith(("tiewise.training", "jax"))]
        print([name for name in ours if name.rpartition(".")[2] in others])
    """
    said = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"
