"""A Megatron-Core GPT that ends at its final hidden state.

The output head belongs to the objective, which applies it chunk by chunk, so that no logits of a
whole micro-batch exist.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_distill.models.architecture import Architecture
from megatron_distill.models.execution import Execution, transformer_config
from megatron_distill.models.experts import prepare_experts
from megatron_distill.models.layer_kinds import LayerKinds, rotary_angles
from megatron_distill.models.layers import layer_specs, transformer_engine_runs
from megatron_distill.models.taps import LayerCall
from megatron_distill.models.transformer_engine import check_fp8, overlap_shape
from megatron_distill.models.weights import initialise
from megatron_distill.ops import VocabShard
from megatron_distill.runtime.batch import Batch
from megatron_distill.runtime.groups import Groups


class HiddenStateGPT(GPTModel):
    """A GPTModel whose last stage returns hidden states [s, b, h] instead of logits or a loss.

    Rotary angles are computed from `position_ids`, so that they restart with each document and fit
    a context-parallel shard. Upstream's position embedding is turned off then, because its angles
    do neither.
    """

    def __init__(self, *, architecture: Architecture, **arguments: Any) -> None:
        learned = architecture.positions == "learned"
        super().__init__(
            vocab_size=architecture.padded_vocab_size(
                arguments["config"].tensor_model_parallel_size
            ),
            max_sequence_length=architecture.max_position_embeddings,
            share_embeddings_and_output_weights=architecture.tied_embeddings,
            position_embedding_type="learned_absolute" if learned else "none",
            parallel_output=True,
            **arguments,
        )
        kinds = LayerKinds.of(architecture)
        self.rotations = kinds.rotations
        self.rotary_size = int(architecture.head_size * architecture.rotary_fraction)
        # Rounded to the weights' dtype first, as in the training of families with this scale.
        scale = torch.tensor(architecture.embedding_scale, dtype=self.config.params_dtype)
        self.embedding_scale = float(scale)
        self._is_frozen = False
        prepare_experts(self, groups=arguments["pg_collection"])

    def freeze(self) -> None:
        """Take the weights as final: no gradients, no dropout, and FP8 copies made once."""
        self.requires_grad_(False)
        self.eval()
        self._is_frozen = True

    def set_is_first_microbatch(self) -> None:
        """Let the next pass cast the FP8 copies of the weights again; schedules call it.

        A frozen model's first pass makes them, and they stay, also where the weights are moved.
        """
        if not self._is_frozen:
            super().set_is_first_microbatch()

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, **arguments: Any) -> Any:
        embedded, rotary, *others = super()._preprocess(input_ids, position_ids, **arguments)
        if self.embedding_scale != 1.0 and embedded is not None:
            embedded = embedded * self.embedding_scale
        if self.rotations:
            planes = [
                rotary_angles(
                    position_ids,
                    rotary_size=self.rotary_size,
                    base=rotation.base,
                    scaling=rotation.scaling,
                )[:, :, 0]
                for rotation in self.rotations
            ]
            # [s, b, planes, r], each plane in one piece of memory, as a fused kernel reads it.
            rotary = torch.stack(planes).permute(1, 2, 0, 3)
        return (embedded, rotary, *others)

    def _postprocess(self, hidden_states: Tensor, **_: object) -> Tensor:
        return hidden_states

    def head_weight(self) -> Tensor:
        """Return this rank's rows of the output head [V, H]: the embedding's if tied.

        Exists on the last pipeline stage only.
        """
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def build_gpt(
    architecture: Architecture,
    *,
    groups: Groups,
    execution: Execution,
    seed: int | None,
    interleaved: bool = True,
) -> list[HiddenStateGPT]:
    """Build this rank's model chunks: one, or one per virtual pipeline stage.

    The stages hold `execution.layers_per_stage`.

    `interleaved` false ignores the layout's virtual stages (a forward-only model needs none). With
    a seed the weights are random, a function of (seed, parameter name) alone. Without one they are
    zero, for a checkpoint to fill.
    """
    chunks = empty_gpt(architecture, groups=groups, execution=execution, interleaved=interleaved)
    if seed is None:
        # A checkpoint with different padding lacks padding rows; they must not stay uninitialised.
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.data.zero_()
    else:
        initialise(chunks, architecture, seed=seed, groups=groups)
    return chunks


def empty_gpt(
    architecture: Architecture, *, groups: Groups, execution: Execution, interleaved: bool
) -> list[HiddenStateGPT]:
    """Build the chunks of `build_gpt` with uninitialised weights.

    With `execution.weight_shards` the layers' parameters have shapes and no memory.
    """
    layout = groups.layout
    if not interleaved:
        layout = layout.without_virtual_stages()
    engine_runs = transformer_engine_runs(execution.device)
    check_fp8(architecture, layout, execution, engine_runs=engine_runs)
    buffers = overlap_shape(architecture, layout, execution, engine_runs=engine_runs)
    config = transformer_config(architecture, layout, execution)
    # Interleaved schedules number the chunks by virtual stage; a single chunk has None.
    stages: list[int | None] = list(range(layout.virtual_pipeline or 0)) or [None]
    chunks = []
    for stage in stages:
        first, last = _is_ends(groups, stage=stage, stages=len(stages))
        chunk = HiddenStateGPT(
            architecture=architecture,
            config=config,
            transformer_layer_spec=layer_specs(
                architecture,
                config,
                device=execution.device,
                vp_stage=stage,
                groups=groups,
                is_empty=execution.weight_shards is not None,
            ),
            pre_process=first,
            post_process=last,
            pg_collection=groups.megatron,
            vp_stage=stage,
        )
        for parameter in chunk.parameters():  # upstream leaves position embeddings in fp32
            parameter.data = parameter.data.to(device=execution.device, dtype=execution.dtype)
        if buffers is not None and execution.tensor_overlap is not None:
            execution.tensor_overlap.buffers.attach(chunk.decoder, buffers)
        chunks.append(chunk)
    return chunks


def _is_ends(groups: Groups, *, stage: int | None, stages: int) -> tuple[bool, bool]:
    index = stage or 0
    return (
        groups.is_first_stage and index == 0,
        groups.is_last_stage and index == stages - 1,
    )


def vocab_shard(
    architecture: Architecture, groups: Groups, *, tokens: int | None = None
) -> VocabShard:
    """Return the columns of the vocabulary that this rank's head produces.

    `tokens`: ids of the tokenizer; further rows of the model are padding, as those that tensor
    parallelism adds. None: the tokenizer is unknown, and every row of the model is a token.
    """
    rank, size = groups.tensor.rank(), groups.tensor.size()
    rows = architecture.padded_vocab_size(size) // size
    real = architecture.vocab_size if tokens is None else tokens
    assert real <= architecture.vocab_size, (real, architecture.vocab_size)
    return VocabShard(size=real, start=rank * rows, stop=(rank + 1) * rows)


def run_model(
    model: torch.nn.Module, batch: Batch, *, context_size: int, micro_batch: int | None = None
) -> Tensor:
    """Run one model chunk (wrapped or not) on a micro-batch.

    With `micro_batch`, its number in the step, the taps of the chunk's layers are called. Returns
    the chunk's output [s, b, h], the sequence split over tensor ranks under sequence parallelism.
    """
    assert batch.segments.size == context_size, (batch.segments.size, context_size)
    return model(
        input_ids=batch.tokens_bs,
        position_ids=batch.position_ids_bs,
        attention_mask=None,
        extra_block_kwargs=LayerCall(batch.segments, micro_batch).arguments,
    )


def hidden_for_head(hidden_sbh: Tensor, *, groups: Groups, whole_context: bool = False) -> Tensor:
    """Prepare the last hidden state for the vocabulary-sharded head.

    hidden [s, b, h] (the sequence split over tensor ranks under sequence parallelism) becomes
    [N, H], tokens in (b, s) order. Its gradient is the sum of the tensor ranks' partial gradients.
    With `whole_context` N has the positions of all context ranks, one rank after the other, and the
    gradient is the sum of those ranks' too.

    Collective: tensor group. Sequence parallel: one all-gather forward, one reduce-scatter
    backward; otherwise one all-reduce backward; h elements per token. `whole_context`: context
    group, one all-gather forward, one reduce-scatter backward, h elements per token.
    """
    if groups.layout.sequence:
        hidden_sbh = gather_from_sequence_parallel_region(
            hidden_sbh, tensor_parallel_output_grad=True, group=groups.tensor
        )
    if whole_context and groups.context.size() > 1:
        hidden_sbh = gather_from_sequence_parallel_region(
            hidden_sbh, tensor_parallel_output_grad=True, group=groups.context
        )
    hidden_NH = hidden_sbh.transpose(0, 1).reshape(-1, hidden_sbh.shape[-1])
    if groups.layout.sequence:
        return hidden_NH
    # After the reshape: upstream reduces a contiguous copy of the gradient and drops the result if
    # the gradient is a view. Before the reshape, it is one with more than one sequence.
    return copy_to_tensor_model_parallel_region(hidden_NH, group=groups.tensor)


@torch.no_grad()
def align_head(
    weight_VH: Tensor, *, own: VocabShard, wanted: VocabShard, group: dist.ProcessGroup
) -> Tensor:
    """Return the rows of a vocabulary-sharded head for another sharding of it.

    Models of one tokenizer may have different numbers of rows, and then a rank's rows differ. A
    frozen head is resharded once, at the start. `own` and `wanted` are this rank's rows before and
    after; rows past the real vocabulary are zero. Returns [wanted.stop - wanted.start, H].

    Collective: `group`, one all-gather of the whole head, unless the shards agree.
    """
    if own == wanted:
        return weight_VH
    assert own.size == wanted.size, (own, wanted)
    shards = [torch.empty_like(weight_VH) for _ in range(group.size())]
    dist.all_gather(shards, weight_VH.contiguous(), group=group)
    whole_GH = torch.cat(shards)[: own.size]
    aligned_VH = weight_VH.new_zeros(wanted.stop - wanted.start, weight_VH.shape[1])
    rows = whole_GH[wanted.start : wanted.stop]
    aligned_VH[: rows.shape[0]] = rows
    return aligned_VH
