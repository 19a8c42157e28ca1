"""Memory and waits of generation: the bound on the cache, blocks of scores, reads by the host."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatron_distill.models.generation import Sampling, ScoreRow, Stops, WriteRow, Written
from tests.distributed.generation.test_generation import copied_prefixes
from tests.distributed.megatron_world import megatron_groups, small_architecture, writer_of
from tests.distributed.pool import Pool
from tests.reference.tracing import Watch

MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24}
# Bytes of keys and values: 6 rows of 48 positions.
BOUND = 6 * 48 * 512


class Stores(Watch):
    """Counts the live bytes of all keys and values, stored, copied or joined, and operations.

    Of what is copied to another type, that of keys and values alone.
    """

    STORE = torch.ops.aten.zeros.default
    # Stores, rows of them, keys joined for a step, and other orders of a store.
    MAKERS = (
        STORE,
        torch.ops.aten.index_select.default,
        torch.ops.aten.new_zeros.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.gather.default,
        torch.ops.aten.roll.default,
    )
    CONVERTED = torch.ops.aten._to_copy.default

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.stores = 0
        self.calls: Counter[str] = Counter()
        self.places: Counter[int] = Counter()  # addresses of live keys and values

    def look(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        self.calls[func._schema.name] += 1
        is_made = func in self.MAKERS
        if func is self.CONVERTED:
            is_made = bool(self.places[args[0].untyped_storage().data_ptr()])
        for value in tree_leaves(result) if is_made else ():
            # Keys with values, or one of both: a rotation has neither slots nor a pair.
            is_pair = isinstance(value, Tensor) and value.ndim == 5 and value.shape[2] <= 2
            is_pair = is_pair and value.shape[2] * value.shape[3] > 1
            if is_pair or func is self.CONVERTED:
                self.live += value.nbytes
                self.peak = max(self.peak, self.live)
                self.stores += value.shape[2] * (func is self.STORE)
                storage = value.untyped_storage()  # which views of it keep alive
                place = storage.data_ptr()
                self.places[place] += 1
                weakref.finalize(storage, self._free, value.nbytes, place)

    def _free(self, size: int, place: int) -> None:
        self.live -= size
        self.places[place] -= 1


def _peaks(
    rank: int, world: int, layout: dict[str, Any], prefix: int, window: int | None, softcap: bool
) -> dict[str, Any]:
    """Return peaks as shares of the bound; `softcap`: of scores, in bf16."""
    with megatron_groups(**layout) as groups:
        from megatron_distill.models.execution import Execution
        from megatron_distill.models.generation.model import CachedGPT
        from megatron_distill.models.gpt import build_gpt

        changes: dict[str, Any] = {"attention_softcap": 2.0} if softcap else {"moe": MOE}
        if window:
            changes |= {"sliding_window": window, "sliding_layers": (0, 2)}
        shape = small_architecture(max_position_embeddings=64, **changes)
        dtype = torch.bfloat16 if softcap else torch.float32
        execution = Execution(dtype, torch.device("cpu"))
        chunks = build_gpt(shape, groups=groups, execution=execution, seed=11)
        bound = BOUND // groups.pipeline.size() // (2 if softcap else 1)
        model = CachedGPT(chunks, shape, groups, torch.device("cpu"), cache_gib=bound / 2**30)
        # Long prompts with short answers, and the reverse, as other ranks' rows may be.
        rows = [WriteRow((7,) * 30, row, 2 + row % 4) for row in range(12)]
        rows += [WriteRow((9,) * 5, row, 8 + row) for row in range(12)]
        found = {}
        shared = (1,) * prefix
        for name in ("write", "write after copies") if prefix else ("write",):
            with Stores() as stores, copied_prefixes(are_copied=name != "write"):
                model.write(rows, sampling=Sampling(temperature=1.0), stops=Stops(), prefix=shared)
            found[name] = stores.peak / bound
            found["batches"] = stores.stores / (2 * shape.num_layers / groups.pipeline.size())
            assert not stores.live
        contexts = [(first, *row.ids[1:]) for first, row in enumerate(rows)]  # that share nothing
        answers = {"score": ((1, 2, 3),), "score copies": ((1, 2), (2, 3))}
        for name, several in answers.items():
            asked = [ScoreRow(ids, several) for ids in contexts]
            for before in ((), shared) if prefix else ((),):
                with Stores() as stores:
                    model.score(asked, prefix=before)
                found[f"{name} after a prefix" if before else name] = stores.peak / bound
                assert not stores.live
        return found


@pytest.mark.parametrize(
    ("world", "layout", "prefix", "window", "softcap"),
    [
        (1, {}, 20, None, False),
        (1, {}, 20, 7, False),
        (1, {}, 20, None, True),
        (2, {"pipeline": 2}, 0, None, False),
        pytest.param(1, {}, 0, None, True, marks=pytest.mark.slow),
        pytest.param(2, {"pipeline": 2}, 20, None, False, marks=pytest.mark.slow),
        pytest.param(2, {"expert": 2}, 0, None, False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_keys_and_values_stay_within_the_bound(
    pool: Pool,
    world: int,
    layout: dict[str, Any],
    prefix: int,
    window: int | None,
    softcap: bool,
) -> None:
    """Counted: stores, copies of rows, and the keys of a layer that a step joins with a prefix.

    With a soft cap also the fp32 copy of these keys.
    """
    for found in pool.run(world, _peaks, layout, prefix, window, softcap):
        assert found["batches"] >= 3, "the rows should not fit one batch"
        assert found["score"] == 0.0, "keys without a continuation are not stored"
        for name in set(found) - {"batches", "score"}:
            assert 0.5 < found[name] <= 1.0, found


def _passes(
    rank: int, world: int, layout: dict[str, Any], rows: list[WriteRow], most: int, window: int
) -> tuple[list[int], list[Written], list[Written]]:
    """Positions of each pass over prompts, and the texts of all rows together and of each alone."""
    with megatron_groups(**layout) as groups:
        from megatron_distill.models.generation.attend import Append
        from megatron_distill.models.generation.stage import Stage

        changes = {"sliding_window": window, "sliding_layers": (0, 2)} if window else {}
        shape = small_architecture(max_position_embeddings=64, **changes)
        model = writer_of(shape, groups)
        found: list[int] = []
        real = Stage.run

        def run(stage: Stage, number: int, ids_N: Tensor, step: Any) -> Tensor | None:
            if not isinstance(step, Append):
                found.append(len(ids_N))
            return real(stage, number, ids_N, step)

        sampling = Sampling(temperature=1.0, top_k=20)
        with patch.object(Stage, "run", run):
            written = model.write(rows, sampling=sampling, stops=Stops(), batch_positions=most)
        alone = [model.write([row], sampling=sampling, stops=Stops())[0] for row in rows]
        return found, written, alone


def _require_equal(written: list[Written], alone: list[Written]) -> None:
    for one, other in zip(written, alone, strict=True):
        assert one.ids == other.ids
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def test_prompts_are_read_in_passes_of_as_many_positions_as_asked(pool: Pool) -> None:
    rows = [WriteRow((7,) * (20 - row), row, 3) for row in range(6)]
    ((whole, *_),) = pool.run(1, _passes, {}, rows, 2**14, 0)
    ((parts, written, alone),) = pool.run(1, _passes, {}, rows, 40, 0)
    assert max(whole) >= 6 * 15
    assert 15 <= max(parts) <= 40
    _require_equal(written, alone)


@pytest.mark.parametrize(
    ("world", "layout", "window"),
    [
        (1, {}, 7),
        (2, {}, 0),
        (2, {"pipeline": 2}, 0),
        pytest.param(1, {}, 0, marks=pytest.mark.slow),
        pytest.param(2, {}, 7, marks=pytest.mark.slow),
        pytest.param(2, {"pipeline": 2}, 7, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_prompt_of_several_samples_is_read_once(
    pool: Pool, world: int, layout: dict[str, Any], window: int
) -> None:
    """Its samples are dealt to one data rank, and to one group of a pipeline."""
    prompts = [tuple(range(3, 20 + number % 3)) for number in range(12)]
    prompts = [(number, *ids) for number, ids in enumerate(prompts)]
    rows = [
        WriteRow(ids, 4 * number + sample, 5)
        for number, ids in enumerate(prompts)
        for sample in range(4)
    ]
    once = sum(map(len, prompts))
    found = pool.run(world, _passes, layout, rows, once, window)
    for passes, written, alone in found:
        share = sum(passes) / once
        assert share <= 0.6 if world > 1 and not layout else share == 1.0
        assert len({one.ids for one in written}) > len(prompts), "samples differ"
        _require_equal(written, alone)


def _copies_after_a_request(rank: int, world: int) -> tuple[int, bool]:
    """Bytes of the copies of weights in a request, and whether they outlive it."""
    with megatron_groups() as groups:
        from megatron_distill.models.generation import linear

        model = writer_of(small_architecture(max_position_embeddings=64), groups)
        copied: list[weakref.ref[Tensor]] = []
        sizes = []

        def of(copies: Any, weight: Tensor) -> Tensor | None:
            found = real(copies, weight)
            if found is not None:
                copied.append(weakref.ref(found))
                sizes.append(weight.nbytes)
            return found

        real = linear.WeightCopies.of
        small = patch.multiple(linear, _LEAST_NUMBERS=1, _ROWS_MET=1)
        limits = patch.object(linear, "limits", lambda: linear.Limits(1, 1, False))
        with small, limits, patch.object(linear.WeightCopies, "of", of):
            rows = [WriteRow((7,) * 5, row, 4) for row in range(4)]
            model.write(rows, sampling=Sampling(), stops=Stops())
        return sum(sizes), any(one() is not None for one in copied)


def test_copies_of_weights_end_with_the_request(pool: Pool) -> None:
    ((size, are_left),) = pool.run(1, _copies_after_a_request)
    assert size > 10_000
    assert not are_left


def _on_uneven_stages(rank: int, world: int, layers: tuple[int, ...] | None) -> list[Any]:
    """Ids and scores where the memory of the stages would hold different numbers of rows."""
    with megatron_groups(pipeline=world) as groups:
        from megatron_distill.models.execution import Execution
        from megatron_distill.models.generation.model import CachedGPT
        from megatron_distill.models.gpt import build_gpt

        shape = small_architecture()
        device = torch.device("cpu")
        execution = Execution(torch.float32, device, layers_per_stage=layers)
        chunks = build_gpt(shape, groups=groups, execution=execution, seed=11)
        model = CachedGPT(chunks, shape, groups, device, cache_gib=BOUND / 4 / 2**30)
        ids = [tuple(range(3, 5 + row)) for row in range(12)]
        texts = model.write(
            [WriteRow(one, row, 3) for row, one in enumerate(ids)],
            sampling=Sampling(),
            stops=Stops(),
        )
        scores = model.score([ScoreRow(one, ((1, 2), (2, 3))) for one in ids])
        return [text.ids for text in texts] + [one.is_greedy for row in scores for one in row]


def test_stages_of_unequal_layers_have_the_same_batches(pool: Pool) -> None:
    (alone,) = pool.run(1, _on_uneven_stages, None)
    assert pool.run(2, _on_uneven_stages, (1, 3)) == [alone] * 2


def _largest_scores(rank: int, world: int, bound: int) -> int:
    with megatron_groups() as groups, pytest.MonkeyPatch.context() as patch:
        from megatron_distill.models.generation import attend

        patch.setattr(attend, "BLOCK_BYTES", bound)
        shape = small_architecture(attention_softcap=2.0, max_position_embeddings=512)
        model = writer_of(shape, groups)
        found = [0]

        class Softmaxes(Watch):
            def look(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
                if "softmax" in func._schema.name and result.shape[-1] > 400:
                    found.append(result.nbytes)

        with Softmaxes():
            model.score([ScoreRow((7,) * 99, ((1,),))], prefix=(1,) * 400)
        return max(found)


def test_blocks_of_scores_count_the_keys_of_the_prefix(pool: Pool) -> None:
    bound = 2**16
    (largest,) = pool.run(1, _largest_scores, bound)
    assert bound // 2 < largest <= bound


def _waits(rank: int, world: int) -> list[int]:
    with megatron_groups() as groups:
        shape = small_architecture(moe=MOE)
        model = writer_of(shape, groups)
        found = []
        for tokens in (2, 9):
            with Stores() as stores:
                model.write([WriteRow((7, 8), 0, tokens)], sampling=Sampling(), stops=Stops())
            waiting = [f"aten::{name}" for name in ("nonzero", "nonzero_numpy", "item")]
            found.append(sum(stores.calls[name] for name in waiting))
        return found


def test_a_step_of_one_rank_with_experts_waits_for_no_count(pool: Pool) -> None:
    ((short, long),) = pool.run(1, _waits)
    assert short == long
