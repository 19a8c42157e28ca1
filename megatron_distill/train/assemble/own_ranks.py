"""From a configuration to teachers on ranks of their own: both sides of the bridge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_distill.config import (
    DataConfig,
    EvaluationConfig,
    RunConfig,
    TrainConfig,
    has_own_tokenizer,
    is_aligned,
    teacher_parallel,
)
from megatron_distill.data.loader import StepLoader
from megatron_distill.data.prefetch import PrefetchedUnits, exchange_group
from megatron_distill.data.samples import State
from megatron_distill.data.tokenizers.open import Tokenizer, Vocabulary
from megatron_distill.evaluation.tasks.prepared import PreparedTask
from megatron_distill.models.execution import Execution
from megatron_distill.models.gpt import vocab_shard
from megatron_distill.runtime.batch import Batch
from megatron_distill.runtime.bridge import Bridge
from megatron_distill.runtime.collectives import on_first_rank, together
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.imports import permanent_objects
from megatron_distill.runtime.launch import PRECISIONS, Device
from megatron_distill.store import CaptureSettings
from megatron_distill.train.assemble.alignment import own_tokens
from megatron_distill.train.assemble.answers.plan import (
    answer_plan,
    answer_settings,
    head_parts,
)
from megatron_distill.train.assemble.answers.signals import signal_maker
from megatron_distill.train.assemble.answers.way import student_backend, student_way, teacher_way
from megatron_distill.train.assemble.data import RunSamples
from megatron_distill.train.assemble.evaluated_model import evaluated_model
from megatron_distill.train.assemble.models import (
    build_terms,
    job_groups,
    resolve_model,
    teacher_execution,
    teacher_seed,
    tensor_overlap,
)
from megatron_distill.train.assemble.routing import members, sample_routing, share_of_units
from megatron_distill.train.assemble.site import Site, TeacherFit
from megatron_distill.train.assemble.sources import (
    data_options,
    open_tokenizer,
    publish_files,
    require_same_files,
)
from megatron_distill.train.assemble.tasks import teacher_weights
from megatron_distill.train.evaluation.elsewhere import answer_evaluation, weights_name
from megatron_distill.train.evaluation.phase import EvaluatedModel
from megatron_distill.train.phase_report import PhaseNotes
from megatron_distill.train.phase_timers import TEACHER_PHASES, PhaseTimers
from megatron_distill.train.profile import StepProfiler
from megatron_distill.train.teachers.answer_ring import AnswerRing
from megatron_distill.train.teachers.answers import AnswerPlan
from megatron_distill.train.teachers.live import OnlineTeacher
from megatron_distill.train.teachers.own_ranks import (
    AnswerReader,
    Asking,
    OwnRanksTeacher,
    RemoteHead,
)
from megatron_distill.train.teachers.sent_topk import serving_capture
from megatron_distill.train.teachers.served_steps import ServedSteps
from megatron_distill.train.teachers.serving import (
    AnswerSender,
    LastColumns,
    TeacherServer,
    UnitShare,
    send_head,
    units_of_round,
)
from megatron_distill.train.teachers.units import Message

__all__ = [
    "open_own_ranks",
    "publish_data",
    "publish_start",
    "run_teacher",
]


def open_own_ranks(config: RunConfig, role: str, fit: TeacherFit, site: Site) -> OwnRanksTeacher:
    """Open the student's side of a teacher; nothing is sent before `OwnRanksTeacher.start`.

    Raises ConfigError on all ranks of the student.
    """
    student, vocabulary = fit.student, fit.vocabulary
    groups, execution, device = site.groups, site.execution, site.device
    bridge = device.bridge
    assert bridge is not None, "the caller has looked"
    own = fit.own if has_own_tokenizer(config, role) else None
    tokens = vocabulary if own is None else own.vocabulary
    teacher = resolve_model(config, role, tokens).architecture
    of_head = student if own is None else teacher
    transfer = config.models[role].transfer
    among = members(config).get(role)
    settings = answer_settings(config, role, fit.terms, tokens=tokens.size)
    roles = bridge.roles
    ranks = roles.teacher(role)
    plan = answer_plan(config, ranks, roles, teacher, student, execution.dtype, settings)
    ring, weight, memory = None, None, None
    if groups.is_last_stage and settings is None:
        shard = vocab_shard(of_head, groups, tokens=tokens.size)
        weight = torch.empty(
            shard.stop - shard.start,
            teacher.hidden_size,
            dtype=execution.dtype,
            device=execution.device,
        )
    received, backend = None, student_backend(transfer, plan, device)
    with together():  # memory may be full on some ranks alone
        if plan.needed(bridge.rank):
            received = student_way(backend, transfer, plan, device, site.resources)
    if received is not None:
        way, slots, memory = received
        ring = AnswerRing(
            plan,
            way,
            bridge,
            replica=groups.data.rank(),
            device=execution.device,
            alone=device.alone,
            slots=slots,
        )
    parts = head_parts(plan, teacher, of_head, tokens.size)
    head = RemoteHead(weight, teacher, groups)
    signal_of = signal_maker(
        among, fit.terms, settings, head, execution.device, has_own_tokens=own is not None
    )
    found = OwnRanksTeacher(
        Asking(plan, bridge, ring),
        head,
        AnswerReader(plan, signal_of),
        head_parts=parts if settings is None else (),
        last_step=config.train.steps,
        alone=device.alone,
        shared_memory=memory,
    )
    site.resources.callback(found.close)
    return found


def publish_data(data: DataConfig, bridge: Bridge) -> None:
    """Let the student's first rank tell the teachers' ranks its files.

    Raises DataError on all ranks of the student.
    """
    with together():
        if bridge.rank == 0:
            publish_files(data, bridge)


def publish_start(bridge: Bridge, steps_done: int, last_step: int, data: State) -> None:
    """Let the student's first rank tell the teachers' ranks where it begins."""
    if dist.get_rank() == 0:
        bridge.publish("start", {"steps_done": steps_done, "last_step": last_step, "data": data})


def run_teacher(config: RunConfig, device: Device) -> None:
    """Run this rank's teacher until the student ends.

    Raises a MegatronDistillError on all ranks of the launch together.
    """
    bridge = device.bridge
    assert bridge is not None, "a rank of a teacher has a bridge"
    parallel = teacher_parallel(config, bridge.role.name)
    with (
        bridge.meet("run"),
        permanent_objects(),
        job_groups(parallel, config.runtime, seed=config.seed, trains=False) as groups,
        ExitStack() as resources,
        device.alone,
    ):
        with bridge.meet("tokenizer"):
            pass  # the student's first rank may have to train it
        with bridge.meet("student"):
            opened = _open_teacher(config, groups, device, resources)
            if config.evaluation.tasks and config.evaluation.teacher:
                _publish_weights(config, opened.vocabulary, groups, bridge)
        start = bridge.published("start")
        with bridge.meet("teacher"):
            server = _open_server(config, groups, device, opened, start, resources)
        if start["steps_done"] >= start["last_step"]:
            return
        if server.sender is not None:
            server.sender.connect()
        send_head(opened.teacher, opened.head_parts, bridge)
        device.alone.progress.begin(start["steps_done"] + 1)
        server.serve()


def _publish_weights(
    config: RunConfig, vocabulary: Vocabulary, groups: Groups, bridge: Bridge
) -> None:
    """Publish the digest of this teacher's weights. Collective: that of `teacher_weights`."""
    role = bridge.role
    weights = teacher_weights(config, role.name, vocabulary, groups.world)
    if bridge.rank == role.first:
        bridge.publish(weights_name(role.name), weights)


@dataclass(frozen=True)
class _Opened:
    """A teacher's model, its samples, the plan of its answers, and its share of the units.

    tokenizer: of the teacher, on the first rank; `vocabulary` is its tokens.
    """

    teacher: OnlineTeacher
    tokenizer: Tokenizer | None
    vocabulary: Vocabulary
    samples: RunSamples
    plan: AnswerPlan
    head_parts: tuple[Message, ...]
    settings: CaptureSettings | None
    share: UnitShare


def _open_teacher(
    config: RunConfig, groups: Groups, device: Device, resources: ExitStack
) -> _Opened:
    """Open the tokenizer and build the model. Raises on all ranks of the teacher."""
    bridge = device.bridge
    assert bridge is not None
    role, roles = bridge.role, bridge.roles
    among = members(config).get(role.name)
    options = data_options(config.data, Path(config.output), shows_progress=False)
    tokenizer, vocabulary = open_tokenizer(config, options)
    student = resolve_model(config, "student", vocabulary).architecture
    aligned = own_tokens(config, vocabulary) if is_aligned(config) else None
    own = aligned if has_own_tokenizer(config, role.name) else None
    tokens, length = vocabulary, config.data.sequence_length
    if own is not None:
        tokens, length = own.vocabulary, own.sequence_length
    reading = None if aligned is None else aligned.reading
    options = replace(options, teacher=reading, routing=sample_routing(config))
    source = resolve_model(config, role.name, tokens)
    samples_of_unit = config.train.micro_batch_size
    overlap = tensor_overlap(
        config.runtime, samples=samples_of_unit, length=length, resources=resources
    )
    precision = PRECISIONS[config.train.precision]
    execution = teacher_execution(
        Execution(precision, device.torch_device, tensor_overlap=overlap),
        config.models[role.name],
        teacher_parallel(config, role.name).layers_per_stage.teacher,
        role.name,
    )
    teacher = OnlineTeacher.of_source(
        source,
        execution,
        seed=teacher_seed(config.seed) + (0 if among is None else among.number),
        sequence_length=length,
        shard=vocab_shard(source.architecture, groups, tokens=tokens.size),
        groups=groups,
    )
    samples = RunSamples(
        data=config.data,
        options=options,
        tokenizer=tokenizer,
        seed=config.seed,
        held_out=config.validation.samples,
        teacher_length=None if aligned is None else aligned.sequence_length,
    )
    terms = build_terms(config.objective.terms, vocabulary.size)
    settings = answer_settings(config, role.name, terms, tokens=tokens.size)
    shape, dtype = source.architecture, execution.dtype
    plan = answer_plan(config, role, roles, shape, student, dtype, settings)
    parts = head_parts(plan, shape, student if own is None else shape, tokens.size)
    return _Opened(
        teacher=teacher,
        tokenizer=tokenizer if own is None else own.tokenizer,
        vocabulary=tokens,
        samples=samples,
        plan=plan,
        head_parts=() if settings else parts,
        settings=settings,
        share=share_of_units(among),
    )


def _open_server(
    config: RunConfig,
    groups: Groups,
    device: Device,
    opened: _Opened,
    start: dict[str, Any],
    resources: ExitStack,
) -> TeacherServer:
    """Open the samples where the student begins.

    Raises ConfigError or DataError on all ranks of the teacher.
    """
    plan, bridge = opened.plan, device.bridge
    assert bridge is not None
    way = sender = None
    with together():
        if bridge.rank == bridge.role.first:
            require_same_files(config.data, bridge)
        if plan.sends(bridge.rank):
            way = teacher_way(config.models[plan.role].transfer, plan, device, resources)
    if way is not None:
        sender = AnswerSender(
            plan,
            way,
            bridge,
            device=device.torch_device,
            alone=device.alone,
        )
        resources.callback(sender.stop)
    units = units_of_round(plan, opened.teacher)
    cache_gib = config.generation.cache_gib
    evaluated = partial(_evaluated, config.evaluation, cache_gib, opened, device)
    exchange = exchange_group(timeout_seconds=bridge.timeout_seconds)
    loader = _open_loader(config.train, device, opened, held_out=False, exchange=exchange)
    steps = resources.enter_context(
        PrefetchedUnits(
            loader,
            units=units,
            replicas=plan.units.teacher_replicas,
            last_step=start["last_step"],
            group=exchange,
        )
    )
    loader.load_state_dict(start["data"])
    server = TeacherServer(
        plan=plan,
        bridge=bridge,
        groups=groups,
        teacher=opened.teacher,
        columns=_sent_columns(config.objective.chunk_tokens, opened, groups),
        units=units,
        loader=steps,
        steps=_served_steps(config, groups, device, sender, start, resources),
        held_out=_held_out(config.train, device, opened, units),
        sender=sender,
        device=device.torch_device,
        alone=device.alone,
        evaluate=partial(answer_evaluation, bridge, evaluated),
        share=opened.share,
        has_own_tokens=has_own_tokenizer(config, plan.role),
    )
    if plan.has_features:
        server.tap()
    return server


def _served_steps(
    config: RunConfig,
    groups: Groups,
    device: Device,
    sender: AnswerSender | None,
    start: dict[str, Any],
    resources: ExitStack,
) -> ServedSteps:
    bridge = device.bridge
    assert bridge is not None
    timers = PhaseTimers(device.torch_device, TEACHER_PHASES, progress=device.alone.progress)
    profiler = StepProfiler(
        Path(config.output),
        **config.profile.model_dump(),
        timers=timers,
        device=device.torch_device,
        bridge=bridge,
    )
    notes = PhaseNotes(
        bridge,
        timers_interval=config.logging.timers_interval,
        straggler_interval=config.logging.straggler_interval,
        stage=groups.pipeline.rank(),
    )
    profiler = resources.enter_context(profiler)
    return ServedSteps(timers, profiler, notes, sender, last_step=start["last_step"])


def _evaluated(
    section: EvaluationConfig,
    cache_gib: float | None,
    opened: _Opened,
    device: Device,
    tasks: tuple[PreparedTask, ...],
    stop_requested: Callable[[], bool],
) -> EvaluatedModel:
    """Return the teacher with the tasks that it can do. Collective: that of `evaluated_model`."""
    role, teacher = opened.plan.role, opened.teacher
    return evaluated_model(
        role,
        [teacher.model],
        teacher.architecture,
        tasks,
        section=section,
        cache_gib=cache_gib,
        groups=teacher.groups,
        device=device.torch_device,
        tokenizer=opened.tokenizer,
        vocabulary=opened.vocabulary,
        stop_requested=stop_requested,
    )


def _sent_columns(chunk_tokens: int | None, opened: _Opened, groups: Groups) -> LastColumns:
    if opened.settings is None:
        return lambda hidden_sbh, _: (hidden_sbh.detach(),)
    return serving_capture(opened.settings, opened.teacher, groups, chunk_tokens)


def _held_out(
    train: TrainConfig, device: Device, opened: _Opened, units: Sequence[int]
) -> list[list[Batch]]:
    """Read this replica's units of the held-out batches."""
    count = -(-opened.samples.held_out // train.global_batch_size)
    if not count:
        return []
    with _open_loader(train, device, opened, held_out=True) as loader:
        replicas = opened.plan.units.teacher_replicas
        steps = range(1, count + 1)
        return [loader.take_units(step, units, replicas=replicas) for step in steps]


def _open_loader(
    train: TrainConfig,
    device: Device,
    opened: _Opened,
    *,
    held_out: bool,
    exchange: dist.ProcessGroup | None = None,
) -> StepLoader:
    samples = opened.samples
    opening = samples.read_held_out if held_out else samples.open_training
    return StepLoader(
        on_first_rank(opening, device=device.torch_device),
        sequence_length=samples.data.sequence_length,
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        data_parallel_size=opened.plan.units.student_replicas,
        isolate_documents=samples.data.isolate_documents,
        device=device.torch_device,
        group=exchange,
        prefetch=0 if held_out else 2,
        sources=len(samples.names(held_out=held_out)),
        teacher_length=samples.teacher_length,
    )
