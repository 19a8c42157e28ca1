"""Megatron-Core's table of the layers of each pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_distill.models.pipeline_stages import even_layers

__all__ = ["StageLayers", "configured_layers", "layer_table"]


class StageLayers(PipelineParallelLayerLayout):
    """Upstream's table of stages, for models with and without virtual stages in one process.

    Upstream reads the number of virtual stages from a process-wide setting, but a teacher without
    them may run beside a student that has them. Here a virtual stage of None is the first one.
    """

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of each stage, in the order of the forward pass."""
        return tuple(
            stages[virtual].count(LayerType.decoder)
            for virtual in range(self.virtual_pipeline_model_parallel_size)
            for stages in self.layout
        )

    def get_num_layers_to_build(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Return the number of layers of a stage."""
        return int(self.layout[_rank(pp_rank)][vp_stage or 0].count(layer_type))

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Return the number of layers in all earlier stages."""
        before = (vp_stage or 0) * self.pipeline_model_parallel_size + _rank(pp_rank)
        return sum(
            stages[virtual].count(layer_type)
            for rank, stages in enumerate(self.layout)
            for virtual in range(self.virtual_pipeline_model_parallel_size)
            if virtual * self.pipeline_model_parallel_size + rank < before
        )


def _rank(pp_rank: int | None) -> int:
    """Return the pipeline rank; upstream passes None for this rank."""
    return parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank


def layer_table(layers: Sequence[int], pipeline: int) -> StageLayers | None:
    """Return the table of stages, or None if all hold the same number, as upstream assumes.

    `layers` of each stage; `pipeline` ranks.
    """
    assert all(count > 0 for count in layers), layers
    if len(set(layers)) == 1:
        return None
    table = [[LayerType.decoder] * count for count in layers]
    table[0].insert(0, LayerType.embedding)
    table[-1].append(LayerType.loss)
    return StageLayers(table, pipeline)


def configured_layers(config: TransformerConfig) -> tuple[int, ...]:
    """Return the layers of each stage of a built model."""
    table = config.pipeline_model_parallel_layout
    if isinstance(table, StageLayers):
        return table.layers
    chunks = config.virtual_pipeline_model_parallel_size or 1
    return even_layers(config.num_layers, config.pipeline_model_parallel_size * chunks)
