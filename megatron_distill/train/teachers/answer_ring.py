"""The slots of a rank of the student for a teacher's answers, and the thread that receives them."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Final

import torch

from megatron_distill.errors import counted
from megatron_distill.runtime.batch import Batch
from megatron_distill.runtime.bridge import Bridge
from megatron_distill.runtime.lone_failure import LoneFailure
from megatron_distill.runtime.termination import request_termination
from megatron_distill.train.teachers.answer_ways import (
    AnswerWay,
    Columns,
    SlotPlace,
    Slots,
    connect_routes,
    own_stream,
)
from megatron_distill.train.teachers.answers import (
    HEADER_TAG,
    AnswerError,
    AnswerHeader,
    AnswerPlan,
    AnswerRows,
    RoundRequest,
    token_hash,
)

__all__ = ["AnswerRing"]

# Share of the limit of collectives. Ranks that wait for this one in them began earlier, and know
# no route.
_WAIT: Final = 0.8


@dataclass(frozen=True)
class _Arrival:
    """The headers and bytes of an answer by source, and when its rows are there on the device."""

    headers: dict[int, AnswerHeader]
    sizes: dict[int, int]
    ready: torch.cuda.Event | None


@dataclass(frozen=True)
class _ExpectedAnswer:
    """A unit's place in a round, and its answer once that is there."""

    command: RoundRequest
    micro_batch: int
    unit: int
    arrived: Future[_Arrival]


class AnswerRing:
    """Slots for the answers of a few rounds on one rank; a thread receives into them in order.

    The memory is allocated once: `AnswerPlan.slot_bytes`. A block of slots is free again when its
    round is closed, and only then a further round is opened.
    """

    def __init__(
        self,
        plan: AnswerPlan,
        way: AnswerWay,
        bridge: Bridge,
        *,
        replica: int,
        device: torch.device,
        alone: LoneFailure,
        slots: Slots,
    ) -> None:
        self._plan = plan
        self._way = way
        self._bridge = bridge
        self._replica = replica
        self._device = device
        self._alone = alone
        self.slots = slots
        self._round_sources = plan.sources(bridge.rank)
        self._places: dict[tuple[int, int], _ExpectedAnswer] = {}
        self._compared: set[tuple[int, int]] = set()
        self._work: SimpleQueue[tuple[_ExpectedAnswer, torch.cuda.Event | None] | None] = (
            SimpleQueue()
        )
        self._thread = Thread(target=self._receive_all, name="answers", daemon=True)
        self._thread.start()

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots."""
        return self._plan.slot_bytes(self._bridge.rank)

    def connect(self) -> None:
        """See `connect_routes`; before the first round."""
        connect_routes(self._plan, self._way, self._bridge)

    def open(self, command: RoundRequest) -> None:
        """Expect the answers of a round, whose block is free."""
        free: torch.cuda.Event | None = None
        # Work that reads the block's last round comes first.
        if self._device.type == "cuda" and not self._way.writes_slots:
            free = torch.cuda.Event()
            free.record()
        self._way.offer(command, self._round_sources)
        for number in range(self._plan.units.micro_batches):
            unit = self._plan.units.of_student(number, self._replica)
            place = _ExpectedAnswer(command, number, unit, Future())
            self._places[command.turn, number] = place
            self._work.put((place, free))

    def close(self, command: RoundRequest) -> None:
        """Wait until a round has arrived, and let its block be used again."""
        for number in range(self._plan.units.micro_batches):
            self._compared.discard((command.turn, number))
            self._arrived(self._places.pop((command.turn, number)))

    def received_bytes(self, command: RoundRequest) -> dict[int, int]:
        """Return the bytes of a round's rows by source, once they are there; before its `close`."""
        found = dict.fromkeys(self._round_sources, 0)
        for number in range(self._plan.units.micro_batches):
            for source, size in self._arrived(self._places[command.turn, number]).sizes.items():
                found[source] += size
        return found

    def take(self, command: RoundRequest, micro_batch: int, batch: Batch) -> Columns:
        """Return the tensors of a unit's answer by number, in its slot, once they are there.

        The current stream waits for the rows.

        Raises AnswerError: it is late, missing, of other tokens, or not finite.
        """
        place = self._places[command.turn, micro_batch]
        if (command.turn, micro_batch) not in self._compared:  # taps take an answer several times
            self._compare(place, batch)
            self._compared.add((command.turn, micro_batch))
        ready = place.arrived.result().ready
        if ready is not None:
            ready.wait()
        return self.slots[command.block][micro_batch]

    def _compare(self, place: _ExpectedAnswer, batch: Batch) -> None:
        """Wait for the headers of an answer, and compare them with the unit."""
        self._alone.progress.unit = place.unit
        command, headers = place.command, self._arrived(place).headers
        expected = token_hash(batch)
        for source, header in headers.items():
            where = f"unit {place.unit} of {command.place} from {self._route(source)}"
            if (header.turn, header.unit) != (command.turn, place.unit):
                raise AnswerError(
                    f"{where} is an answer for unit {header.unit} of turn {header.turn}: the two "
                    "sides count differently"
                )
            if header.has_failed:
                raise AnswerError(f"{where} is missing: {self._bridge.failure(source)}")
            if header.is_left_out:
                raise AnswerError(
                    f"{where} is missing: the teacher has no sample of it, but this rank has one "
                    f"of {batch.on_host.sample_ids_b.tolist()}. Both read different data, so give "
                    "all machines the same files"
                )
            if header.tokens != expected:
                raise AnswerError(
                    f"{where} has other tokens than this rank: hash {header.tokens:014x}, here "
                    f"{expected:014x}; both read different data, so give all machines the same "
                    "files"
                )
            if header.non_finite:
                raise AnswerError(
                    f"{where} has {counted(header.non_finite, 'value')} that "
                    f"{'is' if header.non_finite == 1 else 'are'} not finite: look at the "
                    "teacher's weights and precision, and at samples "
                    f"{batch.on_host.sample_ids_b.tolist()}"
                )

    def stop(self) -> None:
        """End the thread once every expected answer is there."""
        self._work.put(None)
        self._thread.join()

    def _arrived(self, place: _ExpectedAnswer) -> _Arrival:
        whole = self._bridge.timeout_seconds
        limit = _WAIT * whole
        try:
            with self._alone.progress.awaiting():
                return place.arrived.result(timeout=limit)
        except FutureTimeout:
            routes = ", ".join(self._route(source) for source in self._sources(place))
            raise AnswerError(
                f"no answer for unit {place.unit} of {place.command.place} within "
                f"{limit:g} s, {_WAIT:.0%} of runtime.timeout_seconds = {whole:g}; route {routes}"
            ) from None

    def _sources(self, place: _ExpectedAnswer) -> dict[int, list[AnswerRows]]:
        return self._plan.received(place.unit, self._bridge.rank)

    def _route(self, source: int) -> str:
        name = self._bridge.roles.name
        return f"{name(source)} to {name(self._bridge.rank)}"

    def _receive_all(self) -> None:
        try:
            with self._alone, own_stream(self._device):
                while (asked := self._work.get()) is not None:
                    place, free = asked
                    place.arrived.set_result(self._receive(place, free))
                if self._device.type == "cuda":  # no sender may write once the memory is free
                    torch.cuda.current_stream().synchronize()
        finally:  # in a process that goes on, `take` fails too
            for place in list(self._places.values()):
                if not place.arrived.done():
                    place.arrived.set_exception(ConnectionError("the answers have ended"))

    def _receive(self, place: _ExpectedAnswer, free: torch.cuda.Event | None) -> _Arrival:
        sources = self._sources(place)
        sent = {source: AnswerHeader.empty() for source in sources}
        receiving = [
            self._bridge.receive(header, source, tag=HEADER_TAG) for source, header in sent.items()
        ]
        for one in receiving:
            one.wait()
        if free is not None:
            free.synchronize()
        slot = self.slots[place.command.block][place.micro_batch]
        headers = {source: AnswerHeader.of(header) for source, header in sent.items()}
        at = SlotPlace(self._bridge.rank, place.command.block, place.micro_batch)
        sizes = {}
        for source, parts in sources.items():
            if headers[source].has_rows:
                self._way.receive(slot, parts, source, at)
                rows = (slot[part.column][part.message.received] for part in parts)
                sizes[source] = sum(row.nbytes for row in rows)
        if any(header.asks_to_stop for header in headers.values()):
            request_termination()
        ready: torch.cuda.Event | None = None
        if self._device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        return _Arrival(headers, sizes, ready)
