"""A stored teacher over ranks: the same signals in every layout, errors on all ranks at once."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_distill.data.collation import micro_batch, pack_samples
from megatron_distill.data.samples import Sample
from megatron_distill.errors import StoreError
from megatron_distill.runtime.batch import Batch
from megatron_distill.signals import Recorded, TopK
from megatron_distill.store import StoreSet, top_k_signal
from tests.distributed.megatron_world import megatron_groups
from tests.distributed.pool import Pool
from tests.support.store_samples import settings, tokens_of, write_store

SAMPLES, MICRO, STEPS = 12, 2, 3
LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "cp2": (2, {"context": 2}),
    "dp2": (2, {}),
    "tp2-pp2": (4, {"tensor": 2, "pipeline": 2}),
    "tp2-cp2": (4, {"tensor": 2, "context": 2}),
}
Sent = list[tuple[list[int], torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]


def batches_of(step: int, groups: Any) -> tuple[Batch, ...]:
    """Two micro-batches of this rank's rows: steps of 4 samples, split over the replicas."""
    numbers = range(4 * step, 4 * step + 4)
    own = numbers[groups.data.rank() :: groups.data.size()]
    wanted = settings()
    found = []
    for first in range(0, len(own), MICRO):
        samples = [
            Sample(**tokens_of(number, wanted), sample_id=number)
            for number in own[first : first + MICRO]
        ]
        batch = micro_batch(pack_samples(samples), slice(0, MICRO), isolate_documents=True)
        found.append(batch.context_shard(groups.context.rank(), groups.context.size()))
    return tuple(found)


def _teacher(groups: Any, folder: Path) -> Any:
    from megatron_distill.losses import Term
    from megatron_distill.train.teachers.stored import StoredTeacher

    reads = groups.is_last_stage and groups.tensor.rank() == 0
    return StoredTeacher(
        StoreSet.open([str(folder)]) if reads else None,
        settings(),
        terms=[Term("forward_kl"), Term("forward_kl", temperature=2.0, support="renormalized")],
        vocab_size=settings().vocab_size,
        groups=groups,
        device=torch.device("cpu"),
    )


def _steps(teacher: Any, groups: Any, announce: bool) -> list[Any]:
    """The micro-batches of all steps, which the teacher may know beforehand."""
    steps = [batches_of(step, groups) for step in range(STEPS)]
    for batches in steps if announce else ():
        teacher.expect(batches)
    return steps


def _sent_signals(
    rank: int, world: int, layout: dict[str, Any], folder: Path, announce: bool
) -> Sent:
    """The signals of this rank in three steps, with their positions."""
    sent: Sent = []
    with megatron_groups(**layout) as groups:
        teacher = _teacher(groups, folder)
        steps = _steps(teacher, groups, announce)
        for batches in steps:
            for batch, signal in zip(batches, teacher.signals(batches), strict=True):
                assert (signal is not None) == groups.is_last_stage
                if signal is None:
                    continue
                assert isinstance(signal, Recorded)
                first, second = signal.by_term
                assert isinstance(first, TopK)
                assert isinstance(second, TopK)
                assert second is first  # of a renormalised term
                cells = batch.sample_ids_b[:, None] * 16 + batch.sequence_index_s
                assert signal.entropy is not None
                values = first.ids, first.log_probs, first.log_tail, signal.entropy
                sent.append((cells.reshape(-1).tolist(), *values))
        teacher.close()
    return sent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "s"
    write_store(folder, settings(), samples=SAMPLES)
    return folder


ASKED = [("one", False), ("tp2-cp2", False)]


@pytest.mark.parametrize(("layout", "announce"), [*((one, True) for one in LAYOUTS), *ASKED])
def test_every_rank_gets_the_store_s_signals_of_its_positions(
    pool: Pool, folder: Path, layout: str, announce: bool
) -> None:
    world, arguments = LAYOUTS[layout]
    by_rank = pool.run(world, _sent_signals, arguments, folder, announce)
    with StoreSet.open([str(folder)]).stores[0] as reader:
        records = reader.read(range(SAMPLES))
    whole = top_k_signal(records)
    entropy = np.concatenate([record.scalars.entropy_S for record in records if record.scalars])
    seen: dict[int, int] = {}
    for signals in by_rank:
        for cells, ids, log_probs, log_tail, own_entropy in signals:
            torch.testing.assert_close(ids, whole.ids[cells], rtol=0, atol=0)
            torch.testing.assert_close(log_probs, whole.log_probs[cells], rtol=0, atol=0)
            torch.testing.assert_close(log_tail, whole.log_tail[cells], rtol=0, atol=0)
            np.testing.assert_array_equal(own_entropy, entropy[cells])
            for cell in cells:
                seen[cell] = seen.get(cell, 0) + 1
    tensor = arguments.get("tensor", 1)
    assert seen == dict.fromkeys(range(SAMPLES * 16), tensor)


def _signals_on_a_device(rank: int, world: int, folder: Path) -> list[list[int]]:
    """After the call and after each signal taken: the micro-batches whose ids are on the device."""
    from megatron_distill.train.teachers import stored

    held: list[weakref.ref[torch.Tensor]] = []

    def moved(signal: Recorded, _: torch.device) -> Recorded:
        found = on_device(signal, torch.device("meta"))
        held.append(weakref.ref(found.by_term[0].ids))
        return found

    def alive() -> list[int]:
        return [number for number, one in enumerate(held) if one() is not None]

    with megatron_groups() as groups, pytest.MonkeyPatch.context() as patch:
        on_device = stored.on_device
        patch.setattr(stored, "on_device", moved)  # a device without a GPU
        teacher = _teacher(groups, folder)
        signals = teacher.signals(batches_of(0, groups))
        seen = [alive()]
        for number in range(len(signals)):
            assert signals[number].by_term[0].ids.is_meta
            assert signals[number] is signals[number]  # as a further objective takes it
            seen.append(alive())
        teacher.close()
    return seen


def test_the_device_has_the_signal_of_one_micro_batch(pool: Pool, folder: Path) -> None:
    (seen,) = pool.run(1, _signals_on_a_device, folder)
    assert seen == [[], [0], [1]]


def _failure(rank: int, world: int, layout: dict[str, Any], folder: Path, announce: bool) -> str:
    with megatron_groups(**layout) as groups:
        teacher = _teacher(groups, folder)
        steps = _steps(teacher, groups, announce)
        try:
            for batches in steps:
                teacher.signals(batches)
        except StoreError as error:
            return str(error)
        finally:
            teacher.close()
    return "no failure"


@pytest.mark.parametrize(
    ("layout", "announce"),
    [("tp2-pp2", False), ("tp2-pp2", True), ("dp2", True), ("tp2-cp2", True)],
)
def test_a_record_that_one_rank_cannot_read_stops_all_with_its_name(
    pool: Pool, tmp_path: Path, layout: str, announce: bool
) -> None:
    write_store(tmp_path / "s", settings(), samples=SAMPLES)
    path = tmp_path / "s" / "shards" / "logits-000001.array_record"
    content = bytearray(path.read_bytes())
    content[len(content) // 100] ^= 4
    path.write_bytes(content)
    world, arguments = LAYOUTS[layout]
    messages = pool.run(world, _failure, arguments, tmp_path / "s", announce)
    assert len(set(messages)) == 1, messages
    assert "logits-000001.array_record" in messages[0]
    assert "sample 5" in messages[0]


def test_another_samples_record_stops_all(pool: Pool, tmp_path: Path) -> None:
    """The store of another corpus: its tokens are not those of the batch."""
    write_store(tmp_path / "s", settings(vocab_size=131_072), samples=SAMPLES)
    messages = pool.run(2, _failure, {"tensor": 2}, tmp_path / "s", True)
    assert len(set(messages)) == 1, messages
    assert "0.array_record: sample 0: the tokens in the store and in this run differ" in messages[0]
