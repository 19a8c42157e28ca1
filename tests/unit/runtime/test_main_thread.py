"""The main thread of this process, as another thread sees it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from megatron_distill.runtime import main_thread
from megatron_distill.runtime.main_thread import MainThread, awake_until

LOOKS, SECONDS = 6, 0.05


def seen(found: Future[tuple[list[int], str]]) -> None:
    """Look at the main thread again and again."""
    time.sleep(SECONDS)  # it comes to its wait
    main = MainThread()
    looks = []
    for _ in range(LOOKS):
        looks.append(main.idle_looks())
        time.sleep(SECONDS)
    found.set_result((looks, main.stack()[-1].name))


def test_looks_at_a_single_wait_are_counted_and_its_place_is_known() -> None:
    found: Future[tuple[list[int], str]] = Future()
    thread = threading.Thread(target=seen, args=[found])
    thread.start()
    thread.join()  # the wait
    looks, place = found.result()
    assert looks == list(range(LOOKS))
    assert place == "_wait_for_tstate_lock"


def test_a_wait_for_a_checkpoint_and_a_computation_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_thread, "_PAUSE_SECONDS", SECONDS / 10)
    with ThreadPoolExecutor(1) as threads:
        written = threads.submit(time.sleep, 2 * LOOKS * SECONDS)
        found: Future[tuple[list[int], str]] = Future()
        threading.Thread(target=seen, args=[found]).start()
        awake_until(written)
    assert found.result()[0] == [0] * LOOKS

    again: Future[tuple[list[int], str]] = Future()
    threading.Thread(target=seen, args=[again]).start()
    while not again.done():
        sum(range(1000))
    assert again.result()[0] == [0] * LOOKS
