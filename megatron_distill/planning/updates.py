"""Time and memory of a step behind its backward pass: gradients, weights, and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from megatron_distill.planning.losses.layer_passes import projector_seconds
from megatron_distill.planning.operations import element_seconds, streamed_seconds
from megatron_distill.planning.parameters import adam_numbers, bucket_ranks

if TYPE_CHECKING:
    from megatron_distill.planning.device import DeviceProfile
    from megatron_distill.planning.parameters import RankNumbers
    from megatron_distill.planning.run import Choice, PlannedRun

__all__ = ["Updates", "step_updates", "update_bytes"]

# Parameters of a gradient bucket, in Megatron-Core.
_BUCKET: Final = 40_000_000
_BUCKET_PER_RANK: Final = 1_000_000
# Calls of torch in an update: clipping, norms and the outer weights; and the tensors of a layer.
_CALLS, _CALLS_OF_LAYER = 200, 250
_FP32: Final = 4


@dataclass(frozen=True)
class Updates:
    """Seconds behind the backward pass: messages that nothing hides, and the optimizer.

    edge: the message of weights that the first and the last stage have in common.
    """

    reduction: float
    gather: float
    optimizer: float
    edge: float


def step_updates(
    run: PlannedRun,
    choice: Choice,
    device: DeviceProfile,
    numbers: RankNumbers,
    passes: tuple[float, float],
) -> Updates:
    """Return the time of gradients and weights between replicas, and of the optimizer.

    passes: seconds of a micro-batch's forward and backward pass, which hide messages.
    """
    forward, backward = passes
    layout, replicas = choice.layout, choice.data * choice.layout.context
    link = device.link(layout.tensor * replicas)
    parameters = numbers.total
    bucket = run.bucket_size or max(_BUCKET, _BUCKET_PER_RANK * replicas)
    last = min(1.0, bucket / max(1, parameters))
    gathered = 0.0
    if run.is_distributed:
        reduced = link.scattered(4.0 * parameters, ranks=replicas)
        gathered = link.gathered(float(run.width) * parameters, ranks=replicas)
    else:
        reduced = link.summed(4.0 * parameters, ranks=replicas)
    if run.overlaps_gradients:
        reduced = max(reduced * last, reduced - backward * (1 - last))
    if run.overlaps_parameters:
        gathered = max(gathered * last, gathered - forward * (1 - last))
    if device.update_ns:  # gradients are divided by the tokens
        reduced += streamed_seconds(device, 8.0 * parameters)
    state = parameters / (replicas if run.is_distributed else 1)
    # Gradient, fp32 weight, both moments; the latter three written too, and the run's weight.
    touched = 4 + 3 * 8 + (run.width if run.precision != "fp32" else 0)
    if device.update_ns:
        optimizer = state * device.update_ns * 1e-9
    else:
        optimizer = element_seconds(device, state * (touched + 4) + 4.0 * parameters)
    optimizer += _call_seconds(choice, device)
    edge = 0.0
    if layout.pipeline > 1 and run.student.tied_embeddings:
        rows = run.student.padded_vocab_size(layout.tensor) // layout.tensor
        edge = 2 * device.link(choice.ranks).message(4.0 * rows * run.student.hidden_size)
    summed, updated = projector_seconds(run, choice, device)
    reduced, optimizer = reduced + summed, optimizer + updated
    messages = device.factor("communication", run.precision)
    update = device.factor("optimizer", run.precision)
    gathered *= messages if run.overlaps_parameters else update
    return Updates(reduced * messages, gathered, optimizer * update, edge)


def _call_seconds(choice: Choice, device: DeviceProfile) -> float:
    """Return the time of an update's calls of torch on a CPU, of the stage with most layers."""
    if device.kind != "cpu":
        return 0.0
    stages = map(choice.chunk_layers, range(choice.layout.pipeline))
    layers = max(sum(map(len, chunks)) for chunks in stages)
    return (_CALLS + layers * _CALLS_OF_LAYER) * device.kernel_us * 1e-6


def update_bytes(
    run: PlannedRun, choice: Choice, device: DeviceProfile, numbers: RankNumbers
) -> float:
    """Return the most bytes that a rank of a CPU takes for a moment behind its backward pass.

    gloo scatters the sums of gradients from a copy of each buffer. Copies that are made while the
    backward pass runs wait for its end together. Then torch's Adam makes tensors of each weight's
    size. On a GPU NCCL sums in the buffer, and one kernel updates a weight.
    """
    if device.kind == "gpu":
        return 0.0
    layout = choice.layout
    made = adam_numbers(
        run.student, numbers, layout, ranks=choice.ranks, is_distributed=run.is_distributed
    )
    copied = 0
    if run.is_distributed:
        copies = [
            bucket.held(count)
            for bucket, count in bucket_ranks(numbers, layout, ranks=choice.ranks)
        ]
        copied = sum(copies) if run.overlaps_gradients else max(copies)
    return float(_FP32 * max(made, copied))
