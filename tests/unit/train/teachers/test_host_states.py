"""Hidden states in host memory: each is returned as it was put last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import Tensor

from megatron_distill.train.teachers.host_states import HostStates


@pytest.fixture
def states() -> Iterator[HostStates]:
    """States on a device whose copies are done at once: CUDA's calls have no effect."""
    empty, empty_like, stream = torch.empty, torch.empty_like, MagicMock()

    def unpinned(*shape: Any, pin_memory: bool, **named: Any) -> Tensor:
        assert pin_memory
        return empty(*shape, **named)

    with (
        patch.multiple(
            torch.cuda,
            Stream=lambda _: stream,
            Event=MagicMock(),
            current_stream=MagicMock(),
            stream=lambda _: nullcontext(),
        ),
        patch.object(torch, "empty", unpinned),
        patch.object(torch, "empty_like", lambda one, **_: empty_like(one)),
        patch.object(Tensor, "record_stream", lambda *_: None),
    ):
        yield HostStates(torch.device("cuda"))


# The micro-batches of consecutive steps that a teacher among several runs.
@pytest.mark.parametrize(
    "steps",
    [
        [(0, 1, 2), (0, 1, 2)],
        [(1, 2, 3), (1, 2, 3)],
        [(0, 1), (0,), (1,)],
        [(2,), (1,), (2,)],
        [(3,), (5,), (4,), (5,)],
    ],
)
def test_a_state_is_that_of_its_step(states: HostStates, steps: list[tuple[int, ...]]) -> None:
    for step, numbers in enumerate(steps):
        for number in numbers:
            states.put(number, torch.full((2,), 10.0 * step + number))
        for _ in range(2):  # a balanced step runs its schedule twice
            for number in numbers:
                assert states.take(number).tolist() == [10.0 * step + number] * 2


def test_the_next_state_of_the_step_is_on_its_way(states: HostStates) -> None:
    returned: list[int] = []
    begin = HostStates._begin_return

    def noted(self: HostStates, number: int) -> Any:
        returned.append(number)
        return begin(self, number)

    with patch.object(HostStates, "_begin_return", noted):
        for numbers in ((0, 1, 2), (0, 2)):
            for number in numbers:
                states.put(number, torch.zeros(2))
            states.take(0)
            assert returned == ([0, 1] if 1 in numbers else [0])
            returned.clear()
