"""A live teacher with a layout of its own on the student's ranks.

Its replicas run the units of a step, and the outputs move to the ranks that hold the same positions
of the student.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from megatron_distill.data.collation import UnitRows
from megatron_distill.losses import FeaturePair
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.execution import Execution
from megatron_distill.models.gpt import HiddenStateGPT, run_model, vocab_shard
from megatron_distill.models.layers import tap_layers
from megatron_distill.models.pipeline_stages import ranks_of_layers
from megatron_distill.models.sharded_weights import needs_every_replica
from megatron_distill.models.stage_table import configured_layers
from megatron_distill.models.taps import VisibleKeys
from megatron_distill.ops import VocabShard
from megatron_distill.runtime.batch import Batch
from megatron_distill.runtime.groups import Groups
from megatron_distill.signals import OnDemand, Signal, WithFeatures
from megatron_distill.train.model_source import ModelSource
from megatron_distill.train.step import run_schedule
from megatron_distill.train.teachers.attention_heads import (
    FeatureKind,
    feature_kinds,
    joined_parts,
    sizes_per_position,
)
from megatron_distill.train.teachers.host_states import HostFeatures, HostStates
from megatron_distill.train.teachers.layout_ways import StageTensor, Ways, message_group
from megatron_distill.train.teachers.live import ModelHead, ModelOutput
from megatron_distill.train.teachers.sent_topk import (
    SentTopK,
    TopKColumns,
    serving_capture,
    top_k_columns,
)
from megatron_distill.train.teachers.transfer import Movement, move_head, transfer
from megatron_distill.train.teachers.units import Units, moved_rows

__all__ = ["OwnLayout"]

# The signal of a micro-batch on this rank; None on a stage that needs none.
_Given = Signal | WithFeatures | None


@dataclass(frozen=True)
class OwnLayout:
    """A frozen model in another layout than the student's, on the same ranks; a `Teacher`.

    With one stage of the student the units of a wave of micro-batches run when the first of their
    signals is taken. The outputs of one wave exist at a time. With several stages, or where the
    signals are kept in a list, all units run before the student's schedule. Its last stage then
    holds the hidden states of a whole step, on the device or in `host_states`. Each rank has the
    positions that it would have in a shared layout, so that the loss is the same.

    With `top_k` its last stage chooses ids of each token, and they move in place of hidden states.
    They become a signal as of a store's records.

    Attributes:
        head_weight: rows of the student's vocabulary shard; on the student's last stage only. None
            with `top_k`.
        groups: the student's.
        own_groups: the teacher's.
        outputs: that move: the last hidden state or the columns of its top-k, and features. Of
            queries and keys each part of the heads moves by itself.
        offload_hidden: `host_states` exist on the student's last stage, and `host_features` on each
            that needs some; all ranks run waves.
        captured: features of the layers on this rank, of the units that run.
        buffers: received outputs of a step, where the student has several stages.
        number: among the teachers with their own layout, whose units a batch has in this order.
        has_own_tokens: whether it has a tokenizer of its own, in whose tokens the units are then.
        top_k: None: hidden states move.
        top_k_of_hidden: chooses the ids, on the teacher's last stage.
    """

    model: HiddenStateGPT
    architecture: Architecture
    head_weight: Tensor | None
    groups: Groups
    own_groups: Groups
    ways: Ways
    sequence_length: int
    outputs: tuple[StageTensor, ...]
    offload_hidden: bool = False
    host_states: HostStates | None = None
    host_features: HostFeatures | None = None
    captured: dict[tuple[FeatureKind, int, int], Tensor] = field(default_factory=dict)
    buffers: dict[tuple[StageTensor, int], Tensor] = field(default_factory=dict)
    number: int = 0
    has_own_tokens: bool = False
    top_k: SentTopK | None = None
    top_k_of_hidden: TopKColumns | None = None

    @classmethod
    def of_source(
        cls,
        source: ModelSource,
        execution: Execution,
        *,
        seed: int,
        sequence_length: int,
        shard: VocabShard,
        groups: Groups,
        own_groups: Groups,
        timeout_seconds: float,
        offload_hidden: bool = False,
        number: int = 0,
        has_own_tokens: bool = False,
        top_k: SentTopK | None = None,
    ) -> OwnLayout:
        """Build the frozen model in its layout; its head moves to the columns of `shard` once.

        With `top_k` the head stays. Raises CheckpointError on all ranks.

        Collective: world, creation of a group, and without `top_k` the messages of `move_head`.
        """
        with own_groups.in_use():
            (model,) = source.build(execution, groups=own_groups, seed=seed, interleaved=False)
        model.freeze()
        shape = source.architecture
        ways = Ways(own_groups, groups, message_group(execution.device, timeout_seconds))
        weight = model.head_weight().detach() if own_groups.is_last_stage else None
        head, top_k_of_hidden = None, None
        if top_k is None:
            own = vocab_shard(shape, own_groups, tokens=shard.size)
            head = move_head(
                weight,
                own=own,
                wanted=shard if groups.is_last_stage else None,
                rows=(own.stop - own.start, shard.stop - shard.start),
                width=shape.hidden_size,
                grids=(ways.teacher, ways.student),
                execution=execution,
                group=ways.group,
            )
        elif weight is not None:
            owner = ModelHead(weight, shape, own_groups)
            top_k_of_hidden = serving_capture(top_k.settings, owner, own_groups, top_k.chunk_tokens)
        return cls(
            model=model,
            architecture=shape,
            head_weight=head,
            groups=groups,
            own_groups=own_groups,
            ways=ways,
            sequence_length=sequence_length,
            outputs=_last_outputs(ways, top_k, is_whole=has_own_tokens),
            offload_hidden=offload_hidden,
            host_states=HostStates.of_stage(groups, execution.device) if offload_hidden else None,
            host_features=HostFeatures(execution.device) if offload_hidden else None,
            number=number,
            has_own_tokens=has_own_tokens,
            top_k=top_k,
            top_k_of_hidden=top_k_of_hidden,
        )

    def with_features(self, pairs: Sequence[FeaturePair], of_student: Sequence[int]) -> OwnLayout:
        """Return a teacher that also sends features; `of_student`: pipeline rank per layer.

        The signals are `WithFeatures` then.
        """
        layers = configured_layers(self.model.config)
        of_teacher = ranks_of_layers(layers, self.ways.teacher.pipeline)
        wanted = sorted(
            {
                (pair.teacher, of_student[pair.student - 1], kind)
                for pair in pairs
                for kind in feature_kinds(of_attention=pair.is_of_attention)
            }
        )
        features = tuple(
            StageTensor(layer, of_teacher[layer - 1], rank, kind, part)
            for layer, rank, kind in wanted
            for part in range(1 if kind == "output" else self.ways.parts)
        )
        tap_layers(
            [self.model],
            {layer: partial(self._put_out, layer) for layer, _, kind in wanted if kind == "output"},
            {layer: partial(self._attended, layer) for layer, _, kind in wanted if kind == "query"},
        )
        return replace(self, outputs=(*self.outputs, *features))

    def unit_rows(self, micro_batches: int) -> UnitRows:
        """Return the units that the loader makes for this rank, before the waves that run them."""
        units, replica = self.ways.units(micro_batches), self.ways.places[0][0]
        own = units.evened if self._is_joint else units.of_teacher
        table: list[tuple[int, ...]] = [()] * micro_batches
        for wave in self._waves(units):
            table[wave.start] = own(wave, replica)
        context = self.own_groups.context
        return UnitRows(
            tuple(table),
            context.rank(),
            context.size(),
            self.has_own_tokens,
            has_trained_rows=self.top_k is not None,
        )

    def moved_bytes(self, micro_batches: int, micro_batch_size: int) -> int:
        """Return the bytes that all ranks together send in a step."""
        units = self.ways.units(micro_batches)
        found = 0
        for output in self.outputs:
            shape, dtype = self._of_position(output)
            rows = sum(
                moved_rows(self.ways.messages(output, unit, self.sequence_length))
                for unit in units.of_wave(range(micro_batches))
            )
            found += rows * math.prod(shape) * dtype.itemsize
        return found * micro_batch_size

    def _of_position(self, output: StageTensor) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape of an output at one position, and its dtype."""
        if output.column is not None:
            return output.column.shape, output.column.dtype
        sizes = sizes_per_position(self.architecture, self.ways.teacher.tensor)
        return sizes[output.kind], self.model.config.params_dtype

    def signals(self, batches: Sequence[Batch]) -> OnDemand[_Given] | Sequence[_Given]:
        """Return one signal per micro-batch: on the student's last stage, features elsewhere too.

        Every rank of the world must take the signals in the same order.

        Collective: the forward half of `run_schedule` in the teacher's groups. Then between ranks
        of the world one message for each `Message`. It has 2 bytes (in bf16) per value and position
        that the rank of the student does not hold itself; of a top-k those of `top_k_columns`.
        """
        return self.signals_of(batches, range(len(batches)))

    def signals_of(
        self, batches: Sequence[Batch], wanted: Collection[int]
    ) -> OnDemand[_Given] | Sequence[_Given]:
        """Return the signals of some micro-batches of the step, None for the remaining ones.

        The units of the micro-batches `wanted` alone run, and their outputs alone move. All ranks
        of the world want the same.

        Collective: as `signals`.
        """
        units = self.ways.units(len(batches))
        if self.runs_in_step:
            waves = _Waves(self, batches, list(self._waves(units)), wanted)
            return OnDemand(len(batches), waves.signal)
        return [signal for wave in self._waves(units) for signal in self.run(wave, batches, wanted)]

    @property
    def head_copy(self) -> int:
        """Numbers of the student's shard of the head, where it is not the model's own memory."""
        head = self.head_weight
        if head is None:
            return 0
        is_own = self.own_groups.is_last_stage and (
            head.data_ptr() == self.model.head_weight().data_ptr()
        )
        return 0 if is_own else head.numel()

    @property
    def runs_in_step(self) -> bool:
        """Whether the model runs when a signal is taken."""
        return self.groups.pipeline.size() == 1

    def _waves(self, units: Units) -> Iterator[range]:
        """Yield the micro-batches whose units run together."""
        size = units.wave if self.runs_in_step or self.offload_hidden else units.micro_batches
        for start in range(0, units.micro_batches, size):
            yield range(start, min(start + size, units.micro_batches))

    @torch.no_grad()
    def run(self, wave: range, batches: Sequence[Batch], wanted: Collection[int]) -> list[_Given]:
        """Run the wanted units of some micro-batches; return the signals of these micro-batches."""
        units = self.ways.units(len(batches))
        running = [number for number in wave if number in wanted]
        sent = self._run_wanted(wave, batches[wave.start], units, running) if running else {}
        found: dict[tuple[StageTensor, int], Tensor] = {}
        movements = []
        for unit in units.of_wave(wave):
            micro_batch = unit // units.student_replicas
            if micro_batch not in running:
                continue
            rows = batches[micro_batch].tokens_bs.shape[0]
            for output in self.outputs:
                own = sent.get((output, unit))
                own_messages = self.ways.messages(output, unit, self.sequence_length)
                received = None
                if self.ways.needs(output, unit):
                    if own is not None and self.ways.is_in_place(own, own_messages):
                        found[output, micro_batch] = own
                    else:
                        received = self._buffer(output, micro_batch, rows)
                        found[output, micro_batch] = received
                movements.append(Movement(own_messages, own, received))
        if movements:
            transfer(movements, group=self.ways.group)
        return [
            self._signal(number, batches[number], found) if number in running else None
            for number in wave
        ]

    @property
    def _replica(self) -> int:
        return self.ways.places[0][0]

    @property
    def _is_joint(self) -> bool:
        return needs_every_replica(self.model, self.own_groups)

    def _run_wanted(
        self, wave: range, batch: Batch, units: Units, running: Collection[int]
    ) -> dict[tuple[StageTensor, int], Tensor]:
        """Run the units of the micro-batches `running` of a wave, whose first batch is given."""
        own, made = units.of_teacher(wave, self._replica), batch.units[self.number]
        if self._is_joint:
            return self._run_units(made, own)  # as many passes on each replica
        pairs = [
            (unit, one)
            for unit, one in zip(own, made, strict=True)
            if unit // units.student_replicas in running
        ]
        return self._run_units([one for _, one in pairs], [unit for unit, _ in pairs])

    def _run_units(
        self, batches: Sequence[Batch], units: Sequence[int]
    ) -> dict[tuple[StageTensor, int], Tensor]:
        """Run micro-batches; return the outputs of this stage for the first ones, `units`."""
        assert len(batches) >= len(units), "the loader makes them"
        if not batches:
            return {}
        self.captured.clear()
        with self.own_groups.in_use():
            last = run_schedule(
                self._forward,
                [self.model],
                list(enumerate(batches)),
                groups=self.own_groups,
                micro_batch_size=batches[0].tokens_bs.shape[0],
                sequence_length=self.sequence_length,
                forward_only=True,
                collect_outputs=True,
            )
        found = {}
        for index, unit in enumerate(units):
            for place, output in enumerate(self.outputs):  # those of the last stage are first
                if self.ways.holds(output, unit):
                    layer = output.layer
                    if layer is None:
                        state = last[index][place]
                    else:
                        state = self.captured[output.kind, layer, index]
                    found[output, unit] = state.contiguous()
        self.captured.clear()
        return found

    def _forward(
        self, iterator: Iterator[tuple[int, Batch]], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[..., Sequence[Tensor]]]:
        number, batch = next(iterator)
        context_size = self.own_groups.context.size()
        output = run_model(model, batch, context_size=context_size, micro_batch=number)
        return output, partial(self._last, batch)

    def _last(self, batch: Batch, hidden_sbh: Tensor, *, non_loss_data: bool) -> Sequence[Tensor]:
        """Return the outputs of the last stage for a unit."""
        assert non_loss_data
        choose = self.top_k_of_hidden
        return (hidden_sbh,) if choose is None else choose(hidden_sbh, batch)

    def _put_out(self, layer: int, hidden_sbH: Tensor, *, micro_batch: int) -> Tensor:
        self.captured["output", layer, micro_batch] = hidden_sbH
        return hidden_sbH

    def _attended(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        visible: VisibleKeys,  # noqa: ARG002 - the student's queries see the same keys
        *,
        micro_batch: int,
    ) -> tuple[Tensor, Tensor]:
        self.captured["query", layer, micro_batch] = query
        self.captured["key", layer, micro_batch] = key
        return query, key

    def _buffer(self, output: StageTensor, micro_batch: int, rows: int) -> Tensor:
        """Return memory for a received output `[s, b, ...]`; a step's is allocated once."""
        layout = self.groups.layout
        shards = {
            "output": layout.context * (layout.tensor if layout.sequence else 1),
            "query": layout.context,
            "key": 1,
        }
        parts = shards[output.kind]
        if output.column is not None:
            parts = 1 if output.is_whole else layout.context
        size, dtype = self._of_position(output)
        make = partial(
            torch.empty,
            (self.sequence_length // parts, rows, *size),
            dtype=dtype,
            device=next(self.model.parameters()).device,
        )
        if self.runs_in_step or self.offload_hidden:
            return make()
        if (output, micro_batch) not in self.buffers:
            self.buffers[output, micro_batch] = make()
        return self.buffers[output, micro_batch]

    def _signal(
        self, number: int, batch: Batch, found: Mapping[tuple[StageTensor, int], Tensor]
    ) -> _Given:
        last = [output for output in self.outputs if output.layer is None]
        signal: Signal | None = None
        if (last[0], number) in found:
            tensors = [found[output, number] for output in last]
            signal = self._of_last(number, batch, tensors)
        if len(self.outputs) == len(last):
            return signal
        features = joined_parts(
            ((output.kind, output.layer), state)
            for (output, micro_batch), state in found.items()
            if micro_batch == number and output.layer is not None
        )
        if self.host_features is None:
            return WithFeatures(signal, features)
        for feature, tensor in features.items():
            self.host_features.put(feature, number, tensor)
        return WithFeatures(signal, self.host_features.of(number, list(features)))

    def _of_last(self, number: int, batch: Batch, tensors: Sequence[Tensor]) -> Signal:
        """Return the signal of a micro-batch's hidden states or top-k on this rank."""
        if self.top_k is not None:
            return self.top_k.signal_of(tensors, batch)
        (hidden_sbh,) = tensors
        side = batch.teacher if self.has_own_tokens else batch
        assert side is not None, "samples have the teacher's tokens"
        take = partial(_itself, hidden_sbh)
        if self.host_states is not None:
            self.host_states.put(number, hidden_sbh)
            take = partial(self.host_states.take, number)
        return ModelOutput(side.tokens_bs.numel(), take, self, whole_context=self.has_own_tokens)


class _Waves:
    """The signals of one wave at a time."""

    def __init__(
        self,
        teacher: OwnLayout,
        batches: Sequence[Batch],
        waves: Sequence[range],
        wanted: Collection[int],
    ) -> None:
        self._teacher, self._batches, self._waves = teacher, batches, waves
        self._wanted = wanted
        self._held: tuple[range, list[_Given]] | None = None

    def signal(self, micro_batch: int) -> _Given:
        """Return a signal; the units of its wave run unless they have run last."""
        if self._held is None or micro_batch not in self._held[0]:
            self._held = None  # its memory is free for the next one
            (wave,) = (wave for wave in self._waves if micro_batch in wave)
            self._held = wave, self._teacher.run(wave, self._batches, self._wanted)
        wave, signals = self._held
        return signals[micro_batch - wave.start]


def _itself(hidden_sbh: Tensor) -> Tensor:
    return hidden_sbh


def _last_outputs(ways: Ways, top_k: SentTopK | None, *, is_whole: bool) -> tuple[StageTensor, ...]:
    """Return what moves from the teacher's last stage; `is_whole`: see `StageTensor`."""
    stages = ways.teacher.pipeline - 1, ways.student.pipeline - 1
    if top_k is None:
        return (StageTensor(None, *stages),)
    return tuple(
        StageTensor(None, *stages, column=column, is_whole=is_whole)
        for column in top_k_columns(top_k.settings)
    )
