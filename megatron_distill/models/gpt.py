"""A Megatron-Core GPT that ends at its final hidden state.

The output head belongs to the objective, which applies it chunk by chunk, so that no logits of a
whole micro-batch exist.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_distill.models.architecture import Architecture, Execution, transformer_config
from megatron_distill.models.attention import attention_mask
from megatron_distill.models.initialise import initialise
from megatron_distill.models.specs import layer_specs
from megatron_distill.ops import VocabShard
from megatron_distill.runtime.batch import Batch
from megatron_distill.runtime.groups import Groups, Layout


class HiddenStateGPT(GPTModel):
    """A GPTModel whose last stage returns hidden states [s, b, h] instead of logits or a loss.

    Rotary angles are read from `position_ids`, so that they restart with each document and follow
    a context-parallel shard wherever its tokens stand. Upstream is told of no position embedding
    in that case (`rotary_base_of_positions` given), because its own angles know neither.
    """

    def __init__(self, *, rotary_base_of_positions: float | None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.rotary_base_of_positions = rotary_base_of_positions

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, **arguments: Any) -> Any:
        outputs = super()._preprocess(input_ids, position_ids, **arguments)
        if self.rotary_base_of_positions is None:
            return outputs
        rotary_sb1d = rotary_angles(
            position_ids, head_size=self.config.kv_channels, base=self.rotary_base_of_positions
        )
        return (outputs[0], rotary_sb1d, *outputs[2:])

    def _postprocess(self, hidden_states: Tensor, **_: object) -> Tensor:
        return hidden_states

    def head_weight(self) -> Tensor:
        """Return this rank's rows of the output head [V, H], the embedding's where they are tied.

        Exists on the last pipeline stage only.
        """
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def rotary_angles(position_ids_bs: Tensor, *, head_size: int, base: float) -> Tensor:
    """Return the rotation angles of each position, fp32 [s, b, 1, head_size].

    Source: RoFormer, arXiv 2104.09864, equation 15; the two halves of a head rotate together.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=position_ids_bs.device)
    frequencies = base ** (-exponents / head_size)
    angles_bsr = position_ids_bs[..., None].float() * frequencies
    return torch.cat((angles_bsr, angles_bsr), dim=-1).transpose(0, 1).unsqueeze(2)


def build_gpt(
    architecture: Architecture,
    *,
    groups: Groups,
    execution: Execution,
    seed: int | None,
    interleaved: bool = True,
) -> list[HiddenStateGPT]:
    """Build this rank's model chunks: one, or one per virtual pipeline stage.

    `interleaved` false ignores the layout's virtual stages (a model that only runs forward needs
    none). With a seed the weights are random and a function of (seed, parameter name) alone;
    without one they are left as allocated, for a checkpoint to fill.
    """
    layout = groups.layout
    if not interleaved:
        layout = _without_virtual_stages(layout)
    config = transformer_config(architecture, layout, execution)
    # Interleaved schedules hand one stage index to each chunk; a single chunk has none.
    stages: list[int | None] = list(range(layout.virtual_pipeline or 0)) or [None]
    learned = architecture.positions == "learned"
    chunks = []
    for stage in stages:
        first, last = _is_ends(groups, stage=stage, stages=len(stages))
        chunk = HiddenStateGPT(
            config=config,
            transformer_layer_spec=layer_specs(
                architecture,
                config,
                device=execution.device,
                vp_stage=stage,
                pp_rank=groups.pipeline.rank(),
            ),
            vocab_size=architecture.padded_vocab_size(layout.tensor),
            max_sequence_length=architecture.max_position_embeddings,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tied_embeddings,
            position_embedding_type="learned_absolute" if learned else "none",
            rotary_base_of_positions=None if learned else architecture.rope_base,
            pg_collection=groups.megatron,
            vp_stage=stage,
        )
        for parameter in chunk.parameters():  # upstream leaves position embeddings in fp32
            parameter.data = parameter.data.to(device=execution.device, dtype=execution.dtype)
        chunks.append(chunk)
    if seed is None:
        # Padding rows are in no checkpoint of another padding, and must not be what memory held.
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.data.zero_()
    else:
        initialise(chunks, architecture, seed=seed, groups=groups)
    return chunks


def _without_virtual_stages(layout: Layout) -> Layout:
    return Layout(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        virtual_pipeline=None,
        context=layout.context,
        expert=layout.expert,
        sequence=layout.sequence,
    )


def _is_ends(groups: Groups, *, stage: int | None, stages: int) -> tuple[bool, bool]:
    index = stage or 0
    return (
        groups.is_first_stage and index == 0,
        groups.is_last_stage and index == stages - 1,
    )


def vocab_shard(architecture: Architecture, groups: Groups) -> VocabShard:
    """Return the columns of the vocabulary that this rank's head produces."""
    rank, size = groups.tensor.rank(), groups.tensor.size()
    rows = architecture.padded_vocab_size(size) // size
    return VocabShard(size=architecture.vocab_size, start=rank * rows, stop=(rank + 1) * rows)


def run_model(model: torch.nn.Module, batch: Batch, *, context_size: int) -> Tensor:
    """Run one model chunk (wrapped or not) on a micro-batch.

    Returns the chunk's output [s, b, h], the sequence split over tensor ranks under sequence
    parallelism.
    """
    return model(
        input_ids=batch.tokens_bs,
        position_ids=batch.position_ids_bs,
        attention_mask=attention_mask(batch, context_size=context_size),
    )


def hidden_for_head(hidden_sbh: Tensor, *, groups: Groups) -> Tensor:
    """Bring the last hidden state in front of the vocabulary-sharded head.

    hidden [s, b, h] (the sequence split over tensor ranks under sequence parallelism) becomes
    [N, H], tokens in (b, s) order. Its gradient is the sum of the tensor ranks' partial gradients.

    Collective: tensor group. Sequence parallel: one all-gather forward, one reduce-scatter
    backward; otherwise one all-reduce backward; h elements per token.
    """
    if groups.layout.sequence:
        hidden_sbh = gather_from_sequence_parallel_region(
            hidden_sbh, tensor_parallel_output_grad=True, group=groups.tensor
        )
    hidden_NH = hidden_sbh.transpose(0, 1).reshape(-1, hidden_sbh.shape[-1])
    if groups.layout.sequence:
        return hidden_NH
    # After the reshape, because upstream adds up a contiguous copy of the gradient and throws the
    # sum away where the gradient is a view: in front of it, with more than one sequence.
    return copy_to_tensor_model_parallel_region(hidden_NH, group=groups.tensor)
