"""Test that Ctrl-C is recognised behind errors that other code raised because of it, and suggested names."""

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


def error_of(work):
    with pytest.raises((Exception, KeyboardInterrupt)) as caught:
        work()
    return caught.value


def raise_from_ctrl_c():
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        raise ImportError("no such module") from error


def raise_while_handling_ctrl_c():
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise ImportError("no such module")  # noqa: B904


def raise_unrelated_error():
    try:
        raise ValueError("cause")
    except ValueError as error:
        raise ImportError("no such module") from error


def test_is_caused_by_ctrl_c_follows_cause_and_context_of_error():
    assert all(
        map(
            is_caused_by_ctrl_c,
            (
                KeyboardInterrupt(),
                Interrupted("run"),
                error_of(raise_from_ctrl_c),
                error_of(raise_while_handling_ctrl_c),
            ),
        )
    )
    assert not is_caused_by_ctrl_c(error_of(raise_unrelated_error))


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def test_swallowed_ctrl_c_is_remembered(listening):
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()
    assert is_caused_by_ctrl_c(error_of(raise_unrelated_error))
    with Interrupt() as interrupt:
        assert interrupt.pressed


def test_interrupt_starts_unpressed_and_records_ctrl_c(listening):
    with Interrupt() as interrupt:
        assert not interrupt.pressed
        press_ctrl_c()
        assert interrupt.pressed
    assert not was_ctrl_c_pressed()


def test_listen_for_ctrl_c_keeps_ignored_sigint_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        listen_for_ctrl_c()
        press_ctrl_c()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not was_ctrl_c_pressed()


def test_ctrl_c_within_finalizer_is_recorded_and_not_printed(listening, capsys):
    class CallsAtDeletion:
        def __init__(self, work):
            self.work = work

        def __del__(self):
            self.work()

    CallsAtDeletion(press_ctrl_c)
    assert was_ctrl_c_pressed()
    assert capsys.readouterr().err == ""
    CallsAtDeletion(raise_unrelated_error)
    assert "no such module" in capsys.readouterr().err


def test_interruptible_reports_interruption_and_passes_other_errors_on(capsys):
    for work, code in ((raise_from_ctrl_c, 130), (lambda: sys.exit(143), 143)):
        with pytest.raises(typer.Exit) as ended, interruptible("; nothing was written"):
            work()
        assert ended.value.exit_code == code
        assert capsys.readouterr().err == "tiewise: interrupted; nothing was written\n"
    with pytest.raises(ImportError), interruptible("; nothing was written"):
        raise_unrelated_error()
    assert capsys.readouterr().err == ""


def test_suggest_choices_puts_nearest_name_first():
    known = ["untied", "tied", "factored"]
    assert suggest_choices("teid", known) == "did you mean tied? choose one of untied, tied, factored"
    assert suggest_choices("TIED", known).startswith("did you mean tied?")
    assert suggest_choices("xyz", known) == "choose one of untied, tied, factored"
    assert suggest_choices("flex", ["torch", "flax"], "known:") == "did you mean flax? known: torch, flax"
    assert suggest_choices("x", ["torch", "flax"]) == "choose torch or flax"
