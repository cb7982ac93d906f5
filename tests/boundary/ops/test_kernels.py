"""Compiled kernels: building them into a cache, loading them from it, and working without them."""

import os
import shutil
import stat
from pathlib import Path

import pytest
import torch

from tiewise.boundary.ops import compiled_kernels as compiled
from tiewise.cli.main import main
from tiewise.core.errors import RunError, UnsupportedError

AVX512 = frozenset(("avx512f", "avx512bw", "avx512dq", "avx512vl"))


@pytest.fixture
def cached_library(kernel_library, tmp_path, monkeypatch):
    """Copy the library into a new cache and return its path."""
    library = next((kernel_library / "tiewise" / "kernels").glob(f"{compiled._key()}-*.so"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (compiled.cache_folder() / "kernels").mkdir(0o700, parents=True)
    compiled._load.cache_clear()
    yield Path(shutil.copy2(library, compiled.cache_folder() / "kernels"))
    compiled._load.cache_clear()


def uses_portable_path(why):
    """Check that kernels are unavailable and that one line gives this reason."""
    assert compiled.kernels() is None
    assert why in compiled.kernels_state()
    assert "\n" not in compiled.kernels_state()
    assert compiled.kernels_state(full=False) in ("none", "off: TIEWISE_KERNELS=off")
    return True


def test_valid_library_from_the_cache_is_used(cached_library):
    assert compiled.kernels().instruction_sets() & 1
    assert compiled.kernels_state().startswith(f"used: {cached_library} (avx512")
    assert compiled.kernels_state(full=False) == compiled.kernels_state().replace(
        str(cached_library), cached_library.stem
    )
    assert compiled.kernels("avx512_bf16") is None or torch.cpu._is_avx512_bf16_supported()


def test_environment_variable_switches_kernels_off_and_refuses_other_values(cached_library, monkeypatch):
    monkeypatch.setenv("TIEWISE_KERNELS", "off")
    assert uses_portable_path("TIEWISE_KERNELS=off")
    monkeypatch.setenv("TIEWISE_KERNELS", "of")
    with pytest.raises(RunError, match="TIEWISE_KERNELS=of; set it to auto, off or avx512"):
        compiled.kernels()


def test_damaged_library_is_refused(cached_library):
    data = cached_library.read_bytes()
    for wrong in (data[:-1], data[: len(data) // 2], b"", data[:5000] + b"x" + data[5001:]):
        cached_library.write_bytes(wrong)
        compiled._load.cache_clear()
        assert uses_portable_path("is damaged")


def test_newest_library_is_tried_first(cached_library, monkeypatch):
    names = {}
    for age, number in ((30, 1), (10, 2), (20, 3)):
        path = cached_library.with_name(f"{compiled._key()}-{number}.so")
        path.touch()
        os.utime(path, (10**9 - age, 10**9 - age))
        names[age] = path.name
    cached_library.unlink()
    tried = []
    monkeypatch.setattr(compiled, "_refusal_reason", lambda path: tried.append(path.name) or "is refused")
    assert uses_portable_path("is refused")
    assert tried == [names[age] for age in (10, 20, 30)]


@pytest.mark.parametrize("writable", ["", "..", "../.."])
def test_library_that_others_can_write_is_refused(cached_library, tmp_path, writable):
    place = cached_library if not writable else (cached_library.parent / writable).resolve()
    place.chmod(place.stat().st_mode | stat.S_IWOTH)
    assert uses_portable_path(f"{place} can be written by other users")
    if place != cached_library:
        with pytest.raises(RunError, match=f"{place} can be written by other users"):
            compiled.build()


def test_library_of_another_user_is_refused(cached_library, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    if cached_library.stat().st_uid:
        assert uses_portable_path("belongs to another user")
    else:  # root owns the file and is trusted
        assert compiled.kernels() is not None


def test_library_for_another_processor_or_torch_is_refused(cached_library, monkeypatch):
    assert compiled.processor() >= AVX512
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "processor", lambda: AVX512 | {"amx_tile"})
        assert uses_portable_path("not built for this machine")
    compiled._load.cache_clear()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert uses_portable_path("not built for this machine, torch 2.99.0")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda patch: patch.setattr(compiled, "processor", lambda: frozenset(("avx2",))), "no AVX-512"),
        (lambda patch: patch.setattr(torch, "__version__", "2.9.1"), "need torch 2.10, not 2.9.1"),
        (lambda patch: patch.setattr("platform.system", lambda: "Darwin"), "not for Darwin"),
    ],
)
def test_build_refuses_an_unsupported_machine(cached_library, monkeypatch, change, why):
    change(monkeypatch)
    assert uses_portable_path(why)
    with pytest.raises(UnsupportedError, match=why):
        compiled.build()


def test_kernels_are_unavailable_without_a_home_or_a_writable_cache(cached_library, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert uses_portable_path("not built")
    with pytest.raises(RunError, match="XDG_CACHE_HOME"):
        compiled.build()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "~")  # a value for which Path.home() raises
    compiled._load.cache_clear()
    assert uses_portable_path("home directory")


def test_build_reports_a_missing_or_failing_compiler_in_one_line(cached_library, monkeypatch, tmp_path):
    for name, says in (("no-such-compiler", "was found; install g"), ("false", "does not run: exit 1")):
        monkeypatch.setenv("CXX", name)
        with pytest.raises(RunError, match=says):
            compiled.build()
    monkeypatch.delenv("CXX")
    (tmp_path / "wrong.cpp").write_text("int main() { return x; }")
    monkeypatch.setattr(compiled, "SOURCE", tmp_path / "wrong.cpp")
    with pytest.raises(RunError, match=r"did not compile: .*error: .x. was not declared"):
        compiled.build()
    (tmp_path / "wrong.cpp").write_text("")
    with pytest.raises(RunError, match=r"do not load: .*no attribute 'instruction_sets'"):
        compiled.build()
    assert [path.name for path in cached_library.parent.iterdir()] == [cached_library.name]


def test_kernels_command_prints_the_state_in_one_line(cached_library, capsys, type_command):
    for words, code, says in (
        (["kernels"], 0, f"kernels: used: {cached_library}"),
        (["kernels", "bild"], 2, "no action 'bild'; did you mean build? choose build; see "),
    ):
        type_command("tiewise", *words)
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == code
        said = capsys.readouterr()
        assert says in said.out + said.err
        assert (said.out + said.err).count("\n") == 1
