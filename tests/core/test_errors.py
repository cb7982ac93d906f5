"""Ctrl-C is found behind errors that other code made of it, and only behind those."""

import os
import signal
import sys

import pytest
import typer

from tiewise.cli.options import interruptible
from tiewise.core.errors import Interrupted, suggest_choices
from tiewise.core.interrupts import _State, is_caused_by_ctrl_c, listen_for_ctrl_c, was_ctrl_c_pressed
from tiewise.training.trainer import Interrupt


@pytest.fixture
def listening():
    handler, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
    listen_for_ctrl_c()
    yield
    signal.signal(signal.SIGINT, handler)
    sys.unraisablehook = hook
    _State.is_pressed = False


def raised(work):
    with pytest.raises((Exception, KeyboardInterrupt)) as caught:
        work()
    return caught.value


def by_cause():
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        raise ImportError("no such module") from error


def by_context():
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise ImportError("no such module")  # noqa: B904


def of_its_own():
    try:
        raise ValueError("cause")
    except ValueError as error:
        raise ImportError("no such module") from error


def test_is_caused_by_ctrl_c_follows_cause_and_context_of_error():
    assert all(
        map(is_caused_by_ctrl_c, (KeyboardInterrupt(), Interrupted("run"), raised(by_cause), raised(by_context)))
    )
    assert not is_caused_by_ctrl_c(raised(of_its_own))


def press():
    os.kill(os.getpid(), signal.SIGINT)


def test_swallowed_ctrl_c_is_remembered(listening):
    with pytest.raises(KeyboardInterrupt):
        press()
    assert is_caused_by_ctrl_c(raised(of_its_own))
    with Interrupt() as interrupt:
        assert interrupt.pressed


def test_interrupt_starts_unpressed_and_records_ctrl_c(listening):
    with Interrupt() as interrupt:
        assert not interrupt.pressed
        press()
        assert interrupt.pressed
    assert not was_ctrl_c_pressed()


def test_listen_for_ctrl_c_keeps_ignored_sigint_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        listen_for_ctrl_c()
        press()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not was_ctrl_c_pressed()


def test_ctrl_c_within_finalizer_is_recorded_and_not_printed(listening, capsys):
    class Last:
        def __init__(self, work):
            self.work = work

        def __del__(self):
            self.work()

    Last(press)
    assert was_ctrl_c_pressed()
    assert capsys.readouterr().err == ""
    Last(of_its_own)
    assert "no such module" in capsys.readouterr().err


def test_interruptible_reports_interruption_and_passes_other_errors_on(capsys):
    for work, code in ((by_cause, 130), (lambda: sys.exit(143), 143)):
        with pytest.raises(typer.Exit) as ended, interruptible("; nothing was written"):
            work()
        assert ended.value.exit_code == code
        assert capsys.readouterr().err == "tiewise: interrupted; nothing was written\n"
    with pytest.raises(ImportError), interruptible("; nothing was written"):
        of_its_own()
    assert capsys.readouterr().err == ""


def test_suggest_choices_puts_nearest_name_first():
    known = ["untied", "tied", "factored"]
    assert suggest_choices("teid", known) == "did you mean tied? choose one of untied, tied, factored"
    assert suggest_choices("TIED", known).startswith("did you mean tied?")
    assert suggest_choices("xyz", known) == "choose one of untied, tied, factored"
    assert suggest_choices("flex", ["torch", "flax"], "known:") == "did you mean flax? known: torch, flax"
    assert suggest_choices("x", ["torch", "flax"]) == "choose torch or flax"
