"""The planner's prediction of a case of `benchmarks/step.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

from benchmarks.steps.cases import Body, Case
from megatron_distill.models.architecture import Architecture, MixtureOfExperts
from megatron_distill.models.pipeline_stages import even_layers
from megatron_distill.planning.device import DeviceProfile, Phase
from megatron_distill.planning.memory import stage_need
from megatron_distill.planning.parameters import stage_numbers
from megatron_distill.planning.refine import MeasuredSteps, refined, refined_for
from megatron_distill.planning.run import Choice, LossTerm, PlannedRun
from megatron_distill.planning.search import Planned, planned
from megatron_distill.runtime.groups import Layout

__all__ = ["planned_case", "planned_from_store", "planned_peaks", "refined_by_case", "shape_of"]


def planned_case(
    case: Case,
    device: DeviceProfile,
    *,
    threads: int | None = None,
    document_length: int | None = None,
) -> Planned:
    """Predict time and memory of a case on ranks of a device, which its processes share.

    threads: of each; None: as many as there are cores for. document_length: tokens of the document
    of a mean token; None: that of the case.
    """
    run, choice = _run(case), _choice(case)
    if document_length is not None:
        run = replace(run, document_length=document_length)
    shared = device.shared_by(case.ranks.processes, threads=threads)
    return planned(run, choice, refined_for(shared, run, choice))


def planned_from_store(case: Case, device: DeviceProfile, *, ids: int, threads: int) -> Planned:
    """Predict a case whose teacher is a store of so many ids, with one divergence and its tail."""
    run = replace(_run(case), teacher=None, terms=(LossTerm(),), store_ids=ids)
    choice = replace(_choice(case), place="store", teacher_layout=None, teacher_layers=())
    return planned(run, choice, device.shared_by(case.ranks.processes, threads=threads))


def planned_peaks(case: Case, device: DeviceProfile) -> list[tuple[float, float]]:
    """Return the bytes that last and those of a step's peak, for a rank of each stage."""
    run, choice = _run(case), _choice(case)
    numbers = stage_numbers(run.student, choice.layout, choice.layers, width=run.width)
    shared = device.shared_by(case.ranks.processes)
    needs = [
        stage_need(run, choice, shared, numbers[stage], stage)
        for stage in range(case.ranks.pipeline)
    ]
    return [(need.lasting, need.transient) for need in needs]


def refined_by_case(
    case: Case, device: DeviceProfile, phases: Mapping[str, float], seconds: float
) -> DeviceProfile:
    """Return the device refined by a case's measured phases, as by those of a run."""
    measured = MeasuredSteps(
        phases={phase: phases[phase] for phase in get_args(Phase)},
        step=seconds,
        count=1,
        tokens_per_second=case.tokens_per_step / seconds,
        tflops_per_device=0.0,
    )
    return refined(device, _run(case), _choice(case), measured, shared_by=case.ranks.processes)


def shape_of(body: Body, case: Case) -> Architecture:
    """Return a body with the case's vocabulary and positions."""
    moe = None
    if body.num_experts is not None:
        moe = MixtureOfExperts(body.num_experts, 2, body.ffn_hidden_size)
    return Architecture(
        num_layers=body.num_layers,
        hidden_size=body.hidden_size,
        ffn_hidden_size=body.ffn_hidden_size,
        num_attention_heads=body.num_attention_heads,
        num_kv_heads=body.num_kv_heads,
        head_size=body.hidden_size // body.num_attention_heads,
        vocab_size=case.workload.vocab_size,
        max_position_embeddings=case.workload.sequence_length,
        moe=moe,
    )


def _run(case: Case) -> PlannedRun:
    workload, ranks = case.workload, case.ranks
    sequences = workload.micro_batch_size * workload.micro_batches * ranks.data_parallel
    documents = [length for sample in range(sequences) for length in workload.documents(sample)]
    return PlannedRun(
        student=shape_of(workload.student, case),
        teacher=shape_of(workload.teacher, case),
        sequence_length=workload.sequence_length,
        document_length=round(sum(length**2 for length in documents) / sum(documents)),
        global_batch_size=sequences,
        precision="bf16" if case.precision == "bf16" else "fp32",
        chunk_tokens=case.chunk_tokens,
    )


def _choice(case: Case) -> Choice:
    workload, ranks = case.workload, case.ranks
    layout = Layout(
        ranks.tensor,
        ranks.pipeline,
        ranks.virtual_pipeline,
        ranks.context,
        ranks.expert,
        ranks.sequence,
    )
    return Choice(
        layout=layout,
        ranks=ranks.processes,
        micro_batch_size=workload.micro_batch_size,
        layers=even_layers(workload.student.num_layers, layout.stages),
        place="shared",
        teacher_layout=layout.without_virtual_stages(),
        teacher_layers=even_layers(workload.teacher.num_layers, layout.pipeline),
    )
