"""The planner's bytes of the losses of `benchmarks/losses.py`, of `memory.py` and of `gpu.py`.

A plan has the loss of a training step: from hidden states, with a buffer for the head's gradient.
To its bytes come the gradients that a loss returns instead: of the head, or of given logits.
"""

from __future__ import annotations

from typing import Final, Literal

from megatron_distill.models.architecture import Architecture
from megatron_distill.planning.device import DeviceProfile, Precision
from megatron_distill.planning.end_operations import loss_chunks
from megatron_distill.planning.losses.token_losses import RowBlocks, id_bytes
from megatron_distill.planning.memory import chunk_bytes
from megatron_distill.planning.run import Choice, LossTerm, PlannedRun
from megatron_distill.runtime.layout import Layout

__all__ = ["HeadGradient", "planned_from_hidden", "planned_from_logits"]

HeadGradient = Literal["into a buffer", "returned"]
_FP32: Final = 4
# Statistics and factors of a token, by the kind of the device; of slopes with their average.
_TOKEN: Final = {"cpu": 92, "gpu": 171}
_TOKEN_SLOPES: Final = 44
# Masses by bin, by which tensor ranks find the tail of adaptive KL: `ops.adaptive_kl`.
_SHARES: Final = 2048


def planned_from_hidden(
    divergence: str,
    *,
    tokens: int,
    vocabulary: int,
    hidden: int,
    precision: Precision,
    device: DeviceProfile,
    gradient: HeadGradient,
) -> float:
    """Return the peak of a loss from hidden states, forward and backward, on one rank.

    divergence: beside cross-entropy or alone. device: as the rank has it.
    """
    shape = _shape(hidden, vocabulary)
    run = PlannedRun(
        student=shape,
        teacher=shape,
        sequence_length=tokens,
        global_batch_size=1,
        precision=precision,
        terms=(LossTerm(divergence=divergence),),
        row_blocks=False,
    )
    choice = Choice(
        layout=Layout(),
        ranks=1,
        micro_batch_size=1,
        layers=(1,),
        place="shared",
        teacher_layout=Layout(),
        teacher_layers=(1,),
    )
    chunk = chunk_bytes(run, choice, device)
    if gradient == "into a buffer":
        return chunk
    head, is_summed = vocabulary * hidden, loss_chunks(run, choice, device) > 1
    summed = head * (_FP32 if is_summed else run.width)
    # In backward the sum of several chunks is rounded to the weight's precision.
    rounded = head * run.width if is_summed and run.width < _FP32 else 0
    return max(chunk + summed, tokens * hidden * run.width + summed + rounded)


def planned_from_logits(
    divergence: str,
    *,
    tokens: int,
    columns: int,
    precision: Precision,
    device: DeviceProfile,
    split: int = 1,
    ids: LossTerm | None = None,
    overwrites: bool = False,
) -> float:
    """Return the peak of `token_divergence`, forward and backward, on one rank.

    columns: of each model on the rank. ids: of a term on ids, which are chosen first. overwrites:
    the gradient takes the place of the logits. A CPU forms an fp32 gradient in the forward pass,
    beside the blocks of the values, and others in backward.
    """
    width = 4 if precision == "fp32" else 2
    gradient = 0.0 if overwrites else float(tokens * columns * width)
    is_plain, in_forward = divergence == "forward_kl", device.kind == "cpu" and width == _FP32
    lasting = tokens * (_TOKEN[device.kind] + (0 if is_plain else _TOKEN_SLOPES))
    blocks = RowBlocks(tokens, columns, width, device)
    if ids is not None:
        assert ids.top_k is not None
        found = id_bytes(blocks, ids.top_k, has_tail=ids.has_tail, split=split)
        before = gradient if in_forward else 0.0
        return max(found.choice, before + found.solved, gradient + found.gradient)
    if device.kind == "gpu":
        # The kernels have no blocks; adaptive KL has those of a plan.
        return gradient + lasting + (blocks.of((), models=2) if _has_blocks(divergence) else 0.0)
    if in_forward or overwrites:
        shares = _SHARES * (split + 2) * tokens if _has_blocks(divergence) and split > 1 else 0
        return gradient + lasting + shares + blocks.of((divergence,), models=2)
    return gradient + lasting + blocks.of((divergence,), models=2, sorts=False)


def _has_blocks(divergence: str) -> bool:
    return divergence == "adaptive_kl"


def _shape(hidden: int, vocabulary: int) -> Architecture:
    """Return a model of one layer; its head is all that counts."""
    return Architecture(
        num_layers=1,
        hidden_size=hidden,
        ffn_hidden_size=hidden,
        num_attention_heads=1,
        num_kv_heads=1,
        head_size=hidden,
        vocab_size=vocabulary,
        max_position_embeddings=1,
    )
