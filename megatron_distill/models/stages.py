"""Which layers a pipeline stage holds, where the stages do not divide them."""

from __future__ import annotations

from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_distill.runtime.groups import Layout


class StageLayers(PipelineParallelLayerLayout):
    """Upstream's table of stages, for models with and without virtual stages in one process.

    Upstream's own counts ask the process whether there are virtual stages, which a teacher has none
    of beside a student that does. Here no virtual stage is the first one.
    """

    def get_num_layers_to_build(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Return how many layers a stage holds."""
        return int(self.layout[_rank(pp_rank)][vp_stage or 0].count(layer_type))

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Return how many layers all stages before hold."""
        before = (vp_stage or 0) * self.pipeline_model_parallel_size + _rank(pp_rank)
        return sum(
            stages[virtual].count(layer_type)
            for rank, stages in enumerate(self.layout)
            for virtual in range(self.virtual_pipeline_model_parallel_size)
            if virtual * self.pipeline_model_parallel_size + rank < before
        )


def _rank(pp_rank: int | None) -> int:
    """Return the pipeline rank that is meant; upstream passes none where it means this one."""
    return parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank


def stage_layers(num_layers: int, layout: Layout) -> StageLayers | None:
    """Return the table of stages, or None where all hold the same number, upstream's own rule.

    The surplus goes to the first stages, virtual ones counted in the order in which a token passes
    them: the last, which has the head as well, is among those with fewest.
    """
    stages = layout.pipeline * (layout.virtual_pipeline or 1)
    fewest, surplus = divmod(num_layers, stages)
    if not surplus:
        return None
    assert fewest > 0, (num_layers, stages)
    table = [[LayerType.decoder] * (fewest + (stage < surplus)) for stage in range(stages)]
    table[0].insert(0, LayerType.embedding)
    table[-1].append(LayerType.loss)
    return StageLayers(table, layout.pipeline)


def ranks_of_layers(num_layers: int, layout: Layout) -> tuple[int, ...]:
    """Return the pipeline rank of each layer, whether the stages divide them or not."""
    stages = layout.pipeline * (layout.virtual_pipeline or 1)
    fewest, surplus = divmod(num_layers, stages)
    return tuple(
        stage % layout.pipeline
        for stage in range(stages)
        for _ in range(fewest + (stage < surplus))
    )
