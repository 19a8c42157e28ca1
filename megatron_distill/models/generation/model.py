"""A model that writes and scores text, in any layout.

Data ranks and context ranks have different rows. The weights of context ranks are the same, and one
new position per row has no sequence to divide. Pipeline stages have as many groups of rows in
flight as stages. Where experts are spread over data ranks, all of them take every step together.

Left out: CUDA graphs. The number of keys grows with each step. A graph of this loop would need one
capture per number of rows, with lengths on the device.

Shapes: b rows, N positions of all rows, H hidden size, V real columns of the head on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.errors import CheckpointError, ConfigError
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.generation.attend import Append, Step, reading, step_for
from megatron_distill.models.generation.batches import (
    PREFILL_POSITIONS,
    RankBatches,
    RowSize,
    capacity_of,
    plan_batches,
)
from megatron_distill.models.generation.cache import (
    Cache,
    KeyBytes,
    KeyShape,
    Prefix,
    copies_prefix,
    integers,
)
from megatron_distill.models.generation.draw import Drawn, draw, draw_keys, row_key
from megatron_distill.models.generation.families import PrefixFamily, deal, families_of
from megatron_distill.models.generation.flight import Beginning, Flight, RowText
from megatron_distill.models.generation.memory import CACHE_GIB, draw_bytes
from megatron_distill.models.generation.pace import PACES, Questions
from megatron_distill.models.generation.request import (
    AnswerScore,
    OnTokens,
    Sampling,
    ScoreRow,
    Stops,
    WriteRow,
    Written,
    check_answers,
    check_rows,
)
from megatron_distill.models.generation.scoring import (
    Found,
    Looks,
    Scoring,
    score_batch,
    shared_scores,
)
from megatron_distill.models.generation.stage import Stage
from megatron_distill.models.generation.text import Decode
from megatron_distill.models.gpt import HiddenStateGPT
from megatron_distill.runtime.collectives import agree, highest
from megatron_distill.runtime.groups import Groups

__all__ = ["CachedGPT"]

_NO_NUMBERS = (
    "the model's next-token logits are not numbers; its weights are damaged or its training "
    "diverged: choose an earlier checkpoint"
)
_GIB = 2**30


@dataclass(frozen=True)
class CachedGPT:
    """Writes and scores rows with this rank's model chunks, with keys and values in a cache.

    All ranks call it together with the same arguments, and get the same results in the order of the
    rows. `prefix` is the beginning of every row, not repeated in it; it is computed once.
    The weights are read where they are: after an update the next request uses the new ones. With an
    optimizer that gathers parameters late, gather them first.

    Attributes:
        vocab_size: ids of the tokenizer, as in `vocab_shard`; no further id is drawn.
        cache_gib: memory of the cache on each rank, in GiB; it bounds the rows of a batch.
        decode: ids to text, for `Written.text` and stop strings; None: neither.
    """

    chunks: Sequence[HiddenStateGPT]
    architecture: Architecture
    groups: Groups
    device: torch.device
    vocab_size: int | None = None
    cache_gib: float = CACHE_GIB
    decode: Decode | None = None

    @property
    def positions(self) -> int:
        """The most positions of a row."""
        return self.architecture.max_position_embeddings

    @reading
    def write(
        self,
        rows: Sequence[WriteRow],
        *,
        sampling: Sampling,
        stops: Stops,
        prefix: Sequence[int] = (),
        on_tokens: OnTokens | None = None,
        stop_requested: Callable[[], bool] | None = None,
        batch_positions: int = PREFILL_POSITIONS,
    ) -> list[Written]:
        """Continue each row; `on_tokens` is called on the ranks that compute the row.

        `batch_positions`: as in `score`.
        `stop_requested`, once true on a rank, stays so. It is asked every 16 steps, and then all
        ranks end their rows as they are.

        Raises ConfigError for a row that is empty or longer than the model's positions, and
        CheckpointError for logits that are not numbers.

        Collective: per step those of `Stage.run` and `draw`, and over the pipeline group one
        broadcast of 16 bytes per row. Every 16 steps with `stop_requested`, one all-reduce of 16
        bytes in the world; at the end, data x context group, the written rows.
        """
        self._check([(row.ids, 0) for row in rows], prefix)
        if stops.strings and self.decode is None:
            raise ConfigError(f"stop strings {stops.strings} need a tokenizer; leave them out")
        limits = [min(row.limit, self.positions - len(prefix) - len(row.ids)) for row in rows]
        run = _GenerationRun(self, sampling, on_tokens, stop_requested)
        written = [index for index, limit in enumerate(limits) if limit > 0]
        texts = {
            index: RowText.of(index, rows[index], limits[index], stops, self.decode, prefix)
            for index in written
        }
        kinds: dict[tuple[int, ...], int] = {}
        sizes = [
            RowSize(
                len(ids := rows[index].ids),
                limits[index] + run.pace.spare,
                # In step all ranks read as many positions, known by the lengths alone.
                kind=None if run.in_step else kinds.setdefault(ids, len(kinds)),
            )
            for index in written
        ]
        run.take(prefix, sizes, run.planned(sizes, prefix, positions=batch_positions))
        for number in range(run.plan.most):
            if run.questions.is_stopped:
                break
            if number < len(run.plan.mine):
                batch = run.plan.mine[number]
                run.write(number, [[texts[written[row]] for row in group] for group in batch], rows)
            while run.questions.ask():
                pass  # other ranks are in their batches
        found = self._gathered(run.finished, run.is_broken)
        empty = Written((), (), "length", None if self.decode is None else "")
        return [found.get(index, empty) for index in range(len(rows))]

    @reading
    def score(
        self,
        rows: Sequence[ScoreRow],
        *,
        prefix: Sequence[int] = (),
        batch_positions: int = PREFILL_POSITIONS,
        between: Callable[[float], None] | None = None,
    ) -> list[tuple[AnswerScore, ...]]:
        """Return the scores of each row's answers; raises as `write`.

        Without a prefix, beginnings that many rows share are found, and computed once; see
        `families_of`. `batch_positions`: most new positions of one pass, unless a row has more.
        `between` is called now and then, on all ranks together, with the share of the batches that
        are done; it may communicate and raise.

        Collective: those of one forward pass per batch and per prefix. Tensor group 12 bytes per
        position of an answer and 8 per id. At the end the scores over the pipeline and the data x
        context group. With `between` one all-reduce of 8 bytes in the world.
        """
        tokens = self.architecture.vocab_size if self.vocab_size is None else self.vocab_size
        check_answers(rows, tokens=tokens)
        longest = [max(len(answer) for answer in row.answers) - 1 for row in rows]
        self._check([(row.context, more) for row, more in zip(rows, longest, strict=True)], prefix)
        run = _GenerationRun(self, Sampling(), None, writes=False)
        families = run.families(rows, prefix)
        parts = [
            Scoring(
                family.rows,
                [rows[row].context[0 if prefix else len(family.prefix) :] for row in family.rows],
                [rows[row].answers for row in family.rows],
            )
            for family in families
        ]
        plans = [
            run.planned(
                part.sizes,
                family.prefix,
                copies=part.most_copies,
                positions=batch_positions,
                is_own=not run.in_step,
            )
            for family, part in zip(families, parts, strict=True)
        ]
        looks = Looks.of(between, sum(len(plan.mine) for plan in plans), self.groups, self.device)
        found: list[Found] = []
        for family, part, plan in zip(families, parts, plans, strict=True):
            run.take(family.prefix, part.sizes, plan)
            for number in range(len(plan.mine)):
                looks.before_batch()
                found += score_batch(part, run.stage, plan, number, run.empty_cache)
        looks.finish()
        run.stage.finish()
        scores, is_broken = shared_scores(
            found, [row.answers for row in rows], self.groups, self.device
        )
        shared: list[dict[int, tuple[AnswerScore, ...]] | None]
        shared = [None] * self.groups.data_context.size()
        dist.all_gather_object(shared, scores, group=self.groups.data_context)
        agree(CheckpointError(_NO_NUMBERS) if is_broken else None)
        merged = {
            index: score for part in shared if part is not None for index, score in part.items()
        }
        return [merged[index] for index in range(len(rows))]

    def _check(self, rows: Iterable[tuple[Sequence[int], int]], prefix: Sequence[int]) -> None:
        ids = self.architecture.vocab_size
        check_rows(rows, prefix=len(prefix), positions=self.positions, ids=ids)

    def _gathered(self, finished: list[RowText], is_broken: bool) -> dict[int, Written]:
        own = {row.index: row.written() for row in finished if row.index is not None}
        shared: list[dict[int, Written] | None] = [own]
        if self.groups.data_context.size() > 1:
            shared *= self.groups.data_context.size()
            dist.all_gather_object(shared, own, group=self.groups.data_context)
        agree(CheckpointError(_NO_NUMBERS) if is_broken else None)
        return {index: text for part in shared if part is not None for index, text in part.items()}


class _GenerationRun:
    """One request on this rank."""

    def __init__(
        self,
        model: CachedGPT,
        sampling: Sampling,
        on_tokens: OnTokens | None,
        stop_requested: Callable[[], bool] | None = None,
        *,
        writes: bool = True,
    ) -> None:
        self.model, self.sampling, self.on_tokens = model, sampling, on_tokens
        self.groups, self.device = model.groups, model.device
        self.stage = Stage.of(
            model.chunks,
            model.architecture,
            groups=model.groups,
            device=model.device,
            vocab_size=model.vocab_size,
        )
        self.pace = PACES[model.device.type]
        self.questions = Questions(stop_requested, self.groups, self.device, self.pace.delay)
        # Ranks with different experts and different rows.
        self.in_step = model.architecture.moe is not None and model.groups.layout.expert > 1
        stages: list[list[KeyShape]] = [self.stage.key_shapes]
        if self.groups.pipeline.size() > 1:  # stages may have different numbers of layers
            stages *= self.groups.pipeline.size()
            dist.all_gather_object(stages, self.stage.key_shapes, group=self.groups.pipeline)
        is_capped = model.architecture.attention_softcap is not None
        # Groups of rows draw one after the other.
        drawn = -(-draw_bytes(self.stage.shard.width, sampling) // self.groups.pipeline.size())
        copies = writes and copies_prefix(self.device)
        self.key_bytes = KeyBytes(stages, self.stage.dtype, is_capped, drawn, copies)
        self.prefix: Prefix | None = None
        self.finished: list[RowText] = []
        self.is_broken = False

    def planned(
        self,
        sizes: Sequence[RowSize],
        prefix: Sequence[int],
        *,
        copies: int = 1,
        positions: int = PREFILL_POSITIONS,
        is_own: bool = False,
    ) -> RankBatches:
        """Plan the batches of rows, the same on all stages; `is_own`: they are of this rank alone.

        copies: of a row's cache that exist at the same time.
        """
        ranks = self.groups.data_context
        return plan_batches(
            sizes,
            rank=0 if is_own else ranks.rank(),
            ranks=1 if is_own else ranks.size(),
            groups=self.groups.pipeline.size(),
            in_step=self.in_step,
            row_bytes=partial(self.key_bytes.most, prefix=len(prefix), copies=copies),
            cache_bytes=self.model.cache_gib * _GIB - self.key_bytes.shared(len(prefix)),
            positions=positions,
        )

    def families(self, rows: Sequence[ScoreRow], prefix: Sequence[int]) -> list[PrefixFamily]:
        """Return the families of rows that this rank scores; in step all ranks share each."""
        ranks = self.groups.data_context
        if prefix:
            found = [PrefixFamily(tuple(prefix), tuple(range(len(rows))))] if rows else []
        else:
            copies = ranks.size() if self.in_step else 1
            found = families_of([row.context for row in rows], copies=copies)
        if self.in_step:
            return found
        cuts = {row: 0 if prefix else len(one.prefix) for one in found for row in one.rows}
        lengths = [
            len(row.context) - cuts[number] + sum(len(answer) - 1 for answer in row.answers)
            for number, row in enumerate(rows)
        ]
        return deal(found, lengths, ranks.size())[ranks.rank()]

    def take(self, prefix: Sequence[int], sizes: Sequence[RowSize], plan: RankBatches) -> None:
        """Take the plan of rows, and compute their prefix."""
        self.sizes, self.plan, self.prefix = sizes, plan, None
        largest = capacity_of(sizes) if sizes else 0
        self.stage.reserve(len(prefix) + largest + 1)
        if prefix and plan.everyone and any(plan.everyone):
            cache = self.empty_cache(1, len(prefix))
            step = step_for(cache, [len(prefix)])
            ids_N = integers(prefix, self.device)
            for number in range(len(self.stage.chunks)):
                self.stage.run(number, ids_N, step)
            step.finish()
            self.prefix = Prefix.of(cache)

    def empty_cache(self, rows: int, capacity: int) -> Cache:
        """Allocate the cache of some rows, after the prefix."""
        return Cache.empty(
            self.stage.key_shapes,
            rows,
            capacity,
            dtype=self.stage.dtype,
            device=self.device,
            prefix=self.prefix,
            copies_prefix=self.key_bytes.copies_prefix,
        )

    def write(
        self, batch: int, groups: Sequence[list[RowText]], requests: Sequence[WriteRow]
    ) -> None:
        """Write the rows of a batch; nothing of its caches outlives the call."""
        # No name for the first steps here: their masks and their groups would live to the end.
        self.go_on(
            self.first(
                [self.begin(batch, place, texts, requests) for place, texts in enumerate(groups)]
            )
        )

    def begin(
        self, batch: int, group: int, texts: list[RowText], requests: Sequence[WriteRow]
    ) -> Beginning:
        """Prepare the first step of a group of rows."""
        ids = [requests[text.index].ids for text in texts if text.index is not None]
        keys = [
            row_key(self.sampling.seed, requests[text.index].sample)
            for text in texts
            if text.index is not None
        ]
        padding, unique = 0, ids if self.in_step else list(dict.fromkeys(ids))
        if not texts:  # a row that only keeps the ranks in step
            texts = [RowText(None, 0, Stops(), ended="length")]
            unique, keys = [(0,)], [0]
        if self.in_step:
            longest = self.plan.largest(
                batch, group, lambda rows: max(1, sum(self.sizes[row].given for row in rows))
            )
            padding = longest - sum(map(len, unique))
        added = max((text.limit for text in texts), default=0) + self.pace.spare
        if self.in_step:  # the rows of other ranks may be longer
            added = max(size.added for size in self.sizes)
        cache = self.empty_cache(len(unique), max(map(len, unique)) + added)
        flat = [token for row in unique for token in row] + [0] * padding
        flight = Flight(
            texts,
            cache,
            integers(keys, self.device),
            torch.zeros(len(texts), dtype=torch.int64, device=self.device),
        )
        counts = [len(row) for row in unique]
        ends, copies = integers(counts, self.device).cumsum(0) - 1, None
        if len(unique) < len(texts):  # samples of a prompt, which is read once
            places = {row: place for place, row in enumerate(unique)}
            copies = [places[row] for row in ids]
            ends = ends[integers(copies, self.device)]
        step = step_for(cache, counts, padding)
        return Beginning(flight, integers(flat, self.device), step, ends, copies)

    def first(self, beginnings: Sequence[Beginning]) -> list[Flight]:
        """Run the given positions of all groups, and draw the first ids."""
        for number in range(len(self.stage.chunks)):
            for start in beginnings:
                hidden_NH = self.stage.run(number, start.ids_N, start.step)
                if hidden_NH is not None:
                    positions_b = start.step.positions_N[start.ends_b]
                    self._draw(start.flight, hidden_NH[start.ends_b], positions_b)
        for start in beginnings:
            start.finish()
        return [start.flight for start in beginnings]

    def go_on(self, flights: Sequence[Flight]) -> None:
        """Step all groups until their rows have ended."""
        step: dict[int, Step] = {}
        count = 0
        while not all(flight.is_over for flight in flights):
            self.questions.before_step(count)
            for number in range(len(self.stage.chunks)):
                for place, flight in enumerate(flights):
                    if number == 0 and not flight.is_over:
                        self._take(flight, count)
                        step[place] = Append(flight.cache, flight.padding)
                    if flight.is_over:
                        continue
                    hidden_NH = self.stage.run(number, flight.ids_b, step[place])
                    if hidden_NH is not None:
                        self._draw(flight, hidden_NH, step[place].positions_N)
            for place, flight in enumerate(flights):
                if not flight.is_over:
                    step[place].finish()
            count += 1
        self.questions.finish()
        self.stage.finish()

    def _draw(self, flight: Flight, hidden_bH: Tensor, positions_b: Tensor) -> None:
        """Draw the next ids on the last stage, and send them to the others."""
        if len(hidden_bH) > len(flight.rows):  # padding
            rows = slice(0, len(flight.rows))
            hidden_bH, positions_b = hidden_bH[rows], positions_b[rows]
        keys_b = flight.row_keys_b
        if self.sampling.temperature > 0:
            keys_b = draw_keys(keys_b, positions_b + 1)
        drawn = draw(
            self.stage.logits(hidden_bH),
            shard=self.stage.shard,
            group=self.groups.tensor,
            sampling=self.sampling,
            keys_b=keys_b,
        )
        flight.history.append(drawn)
        if self.groups.pipeline.size() > 1:
            both = torch.stack([drawn.ids_b.to(torch.float64), drawn.log_probs_b])
            self.stage.broadcast(both)

    def _take(self, flight: Flight, step: int) -> None:
        """Take the ids that were drawn last; where they are read, end rows and drop them."""
        if not self.groups.is_last_stage:
            both = torch.empty(2, len(flight.rows), dtype=torch.float64, device=self.device)
            self.stage.broadcast(both)
            flight.history.append(Drawn(both[0].to(torch.int64), both[1]))
        flight.ids_b = flight.history[-1].ids_b
        # Nothing is left to do for rows that have all their ids: the host waits for these.
        begins, is_look = self.pace.begins(step), self.pace.reads(step)
        if not (begins and is_look) and not self.in_step and flight.is_full:
            begins = is_look = True
        if begins:
            flight.begin_look()
        if is_look:
            if flight.finish_look(self.on_tokens):
                self.is_broken = True
                flight.end_all()
            if self.questions.is_stopped:
                flight.end_all()
            live = flight.live
            if self.in_step:
                (live,) = highest(live, device=self.device, group=self.groups.data_context)
            flight.is_over = live == 0
            if flight.is_over:
                self.finished += flight.rows
                return
            flight.drop_ended(self.finished)
        if self.in_step:
            rows = len(flight.rows)
            if is_look:
                (most,) = highest(rows, device=self.device, group=self.groups.data_context)
                flight.padding = most - rows
            flight.ids_b = torch.nn.functional.pad(flight.ids_b[:rows], (0, flight.padding))
