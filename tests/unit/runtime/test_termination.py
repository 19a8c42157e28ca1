"""Effects of a termination signal on work in progress that heeds it or does not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest
from torch.multiprocessing import _prctl_pr_set_pdeathsig

from megatron_distill.runtime.termination import (
    Interruption,
    TerminationRequest,
    was_interrupted,
)


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    stops = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in stops}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupt(number: signal.Signals = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_interrupts_and_the_second_is_ignored(number: signal.Signals) -> None:
    def work() -> None:
        with interruption:
            try:
                interrupt(number)
            finally:
                interrupt(number)

    interruption = Interruption()
    with pytest.raises(KeyboardInterrupt):
        work()
    assert interruption.status == 128 + number


def test_an_error_after_a_swallowed_interruption_is_the_interruption() -> None:
    """As where torch hands it to the other ranks, and these have left by then."""

    def work() -> None:
        with interruption:
            with suppress(KeyboardInterrupt):
                interrupt()
            raise RuntimeError("connection closed by peer")

    interruption = Interruption()
    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert interruption.status == 130


def test_without_a_signal_an_error_is_itself_and_the_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RuntimeError, match="broken"), Interruption():
        raise RuntimeError("broken")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_request_is_remembered_and_the_work_goes_on() -> None:
    with TerminationRequest() as termination:
        assert not termination.received
        interrupt(signal.SIGTERM)
        assert termination.received
    assert termination.signal_number == signal.SIGTERM


@pytest.mark.parametrize("nohup", [False, True])
def test_a_closed_terminal_is_a_request_unless_nohup_ignores_it(nohup: bool) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    with TerminationRequest() as termination:
        interrupt(signal.SIGHUP)
    assert termination.received != nohup


def test_a_request_is_noted_once_and_a_second_ctrl_c_ends_a_process_alone(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    noted = "\nstopping after this step; Ctrl-C again ends it at once\n"
    with TerminationRequest(note="stopping after this step") as termination:
        interrupt()
        assert (termination.received, capfd.readouterr().err) == (True, noted)
        interrupt(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("rank", "noted"), [("0", "\nstopping\n"), ("1", "")])
def test_a_rank_of_torchrun_takes_a_second_ctrl_c_for_the_same(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rank: str, noted: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    with TerminationRequest(note="stopping") as termination:
        interrupt()
        interrupt()
        assert termination.received
    assert capfd.readouterr().err == noted


def test_a_rank_of_torchrun_that_has_done_its_work_cannot_be_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the signal of a peer has let all ranks save, and this one's own comes after that."""
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    try:
        with TerminationRequest() as termination:
            termination.expect_from_torchrun()
        interrupt(signal.SIGTERM)
        assert seen == []
        signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
        with suppress(RuntimeError), TerminationRequest() as termination:
            termination.expect_from_torchrun()
            raise RuntimeError("broken")
        interrupt(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        _prctl_pr_set_pdeathsig(0)


def test_an_interruption_is_known_from_its_signal_on() -> None:
    before = was_interrupted()
    with suppress(KeyboardInterrupt), Interruption():
        interrupt()
    assert (before, was_interrupted()) == (False, True)
    with TerminationRequest() as request:
        interrupt()
        assert request.received
        assert not was_interrupted()  # a request to finish the step interrupts nothing
