"""From the configuration of a capture to a teacher store."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_distill import __version__
from megatron_distill.config import (
    CaptureConfig,
    CapturePassConfig,
    ModelConfig,
    StoreConfig,
    data_row,
    layout_row,
    source_in_words,
)
from megatron_distill.data.loader import open_loader
from megatron_distill.data.sources import TeacherReading
from megatron_distill.data.tokenizers.open import Vocabulary
from megatron_distill.errors import ConfigError
from megatron_distill.launching.grace import LongestStep
from megatron_distill.log import get_logger
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.execution import Execution
from megatron_distill.models.gpt import vocab_shard
from megatron_distill.runtime.collectives import from_first_rank, on_first_rank, together
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.launch import PRECISIONS, Device
from megatron_distill.runtime.termination import TerminationRequest
from megatron_distill.store import (
    KINDS,
    CaptureSettings,
    Identity,
    Manifest,
    Plan,
    StoreWriter,
)
from megatron_distill.store.binary import usual_samples_per_shard
from megatron_distill.store.plan import MANIFEST
from megatron_distill.train.assemble.alignment import read_teacher
from megatron_distill.train.assemble.data import RunSamples
from megatron_distill.train.assemble.models import (
    job_groups,
    resolve_model,
    teacher_execution,
    teacher_seed,
    tensor_overlap,
)
from megatron_distill.train.assemble.sources import (
    data_options,
    dataset_digest,
    dataset_settings,
    open_tokenizer,
)
from megatron_distill.train.assemble.start import check_start
from megatron_distill.train.capture.folder import (
    finish_store,
    held_for_job,
    is_complete,
    keep_tokenizer,
    open_begun_store,
    open_store,
    remove_working_folder,
)
from megatron_distill.train.capture.lists import DocumentLists, write_missing_lists
from megatron_distill.train.capture.loop import CaptureParts, ShardFiller, fill_holes
from megatron_distill.train.capture.order import (
    CaptureOrder,
    HoleSource,
    StreamPositions,
    working_folder,
)
from megatron_distill.train.capture.positions import PositionCapture
from megatron_distill.train.model_source import ModelSource, teacher_digest
from megatron_distill.train.progress import CaptureProgress, Work, summary
from megatron_distill.train.reports.banner import (
    banner_text,
    memory_rows,
    model_row,
    store_row,
)
from megatron_distill.train.reports.start_memory import warn_of_capture_memory
from megatron_distill.train.run_folder import FolderAsFound
from megatron_distill.train.teachers.live import OnlineTeacher
from megatron_distill.train.throughput import MemoryOfRank, RankParameters, chunk_logits

_LOGGER = get_logger(__name__)
_PREFETCH = 2


@dataclass(frozen=True)
class _Job:
    """The parts of a capture once its store is open; the samples' tokenizers are on rank 0 only."""

    section: StoreConfig
    samples: RunSamples
    teacher: ModelSource
    groups: Groups
    plan: Plan
    store: StoreWriter | None  # on rank 0 and on ranks that write
    lists: DocumentLists | None  # None where no source has texts, or records are of one plan

    @property
    def folder(self) -> Path:
        """The store's folder."""
        return Path(self.section.path)


def run_capture(config: CaptureConfig, device: Device, termination: TerminationRequest) -> bool:
    """Assemble and run one capture in the current world; return whether all of its part is written.

    Raises a MegatronDistillError on all ranks together. Process groups are gone afterwards, so that
    another job may follow in the same processes.
    """
    folder = Path(config.store.path)
    with (
        job_groups(config.parallel, config.runtime, seed=config.seed, trains=False) as groups,
        ExitStack() as resources,
        device.alone,
    ):
        found = FolderAsFound(
            folder,
            rewritten_file=None,
            prepared=str(working_folder(folder).relative_to(folder) / "cache"),
            work=("shards", MANIFEST),
        )
        with together():
            if dist.get_rank() == 0:
                check_start(config)
        options = data_options(config.data, working_folder(folder), keeps_weights=False)
        tokenizer, vocabulary = open_tokenizer(config, options)
        reading, of_teacher = _open_reading(config, vocabulary)
        options = replace(options, teacher=reading)
        teacher = resolve_model(config, "teacher", of_teacher or vocabulary)
        warn_of_capture_memory(config, teacher.architecture, device, groups)
        plan = _plan(config, teacher, vocabulary, of_teacher, groups)
        samples = RunSamples(
            data=config.data, options=options, tokenizer=tokenizer, seed=config.seed
        )
        lists = _lists(config.store, plan, samples)
        if _begin(folder, plan, lists):
            return True
        resources.enter_context(held_for_job(folder, config.store.job))
        if config.store.jobs == 1:  # else another job may have begun to write there
            resources.enter_context(found.put_back_on_failure())
        store = _open_where_written(folder, plan, groups)
        with together():
            if tokenizer is not None:
                keep_tokenizer(folder, reading.tokenizer if reading else tokenizer)
        job = _Job(config.store, samples, teacher, groups, plan, store, lists)
        order = _order(job, config.capture)
        if order.holes:
            parts = _assemble(config, job, order, device, resources)
            found.has_started()
            if not fill_holes(parts, termination):
                return _stopped()
        found.has_started()
        if lists is not None and not write_missing_lists(
            lists, samples.open_training, termination, device.torch_device
        ):
            return _stopped()
        _finish(job)
        return True


def _stopped() -> bool:
    _LOGGER.info("stopped by a signal; start the same command again to write what is missing")
    return False


def _lists(section: StoreConfig, plan: Plan, samples: RunSamples) -> DocumentLists | None:
    """Return the lists of documents that the capture writes.

    A store for one other tokenizer has both sides of each sample, and needs none.
    """
    if plan.settings.student_length is not None or not samples.has_texts:
        return None
    return DocumentLists(Path(section.path), plan, section.job, section.jobs)


def _open_reading(
    config: CaptureConfig, vocabulary: Vocabulary
) -> tuple[TeacherReading | None, Vocabulary | None]:
    """Open the teacher's own tokenizer, on the first rank, and its facts; None with one tokenizer.

    vocabulary: of the student. Raises DataError or ConfigError on all ranks.

    Collective: world, one broadcast of a short object.
    """
    if not config.capture.aligned:
        return None, None
    reading: TeacherReading | None = None
    with together():
        if dist.get_rank() == 0:
            reading = read_teacher(
                config,
                vocabulary,
                remedy="set capture.aligned=false, and capture for a run without `alignment`",
            )
    return reading, from_first_rank(lambda: Vocabulary.of(reading.tokenizer) if reading else None)


def _plan(
    config: CaptureConfig,
    teacher: ModelSource,
    vocabulary: Vocabulary,
    of_teacher: Vocabulary | None,
    groups: Groups,
) -> Plan:
    """Return the plan of the store, the same on all ranks.

    of_teacher: the vocabulary of the teacher's own tokenizer; None with one tokenizer. Raises a
    MegatronDistillError on all ranks.

    Collective: world, those of `teacher_digest` and one broadcast of a short object.
    """
    section, data = config.store, config.data
    stored = of_teacher or vocabulary
    length = config.models["teacher"].sequence_length or data.sequence_length
    with together():  # before the teacher's weights are read
        settings = _settings(section, stored.size, length, config.seed)
        if of_teacher is not None:
            settings = replace(settings, student_length=data.sequence_length)
        dataset = dataset_settings(data, config.seed) if dist.get_rank() == 0 else {}
    digest = teacher_digest(teacher, seed=teacher_seed(config.seed), group=groups.world)

    def plan() -> Plan:
        facts = {
            "teacher": _name(config.models["teacher"]),
            "precision": config.capture.precision,
            "version": __version__,
            "dataset": dataset,
        }
        both = dict.fromkeys((vocabulary.identity, stored.identity))
        identity = Identity(
            teacher=digest,
            tokenizer=stored.identity,
            dataset=dataset_digest(dataset, *both),
            settings=facts,
            student_tokenizer=None if of_teacher is None else vocabulary.identity,
        )
        per_shard = section.samples_per_shard
        per_shard = per_shard or usual_samples_per_shard(settings, section.samples)
        return Plan(settings, identity, section.samples, per_shard)

    return from_first_rank(plan)


def _settings(
    section: StoreConfig, vocab_size: int, sequence_length: int, seed: int
) -> CaptureSettings:
    """Return the settings of a store of `vocab_size` ids, those of the tokenizer."""
    kind = KINDS[section.mode]
    if kind.is_ranked and section.k > vocab_size:
        raise ConfigError(f"store.k = {section.k}: the tokenizer has {vocab_size} tokens; lower it")
    return CaptureSettings(
        k=section.k,
        vocab_size=vocab_size,
        sequence_length=sequence_length,
        mode=section.mode,
        codec=section.codec,
        top_p=section.top_p,
        temperatures=section.temperatures,
        sampling_seed=seed if kind.needs_seed else None,
    )


def _name(teacher: ModelConfig) -> str:
    path = teacher.hf or teacher.checkpoint
    return "random weights" if path is None else Path(path).expanduser().resolve().name


def _begin(folder: Path, plan: Plan, lists: DocumentLists | None) -> bool:
    """Begin the store on rank 0; return on all ranks whether it is complete already.

    lists: those that it must have.

    Collective: world, an all-gather and a broadcast of short objects.
    """

    def begin() -> bool:
        store = open_store(folder, plan)
        if not is_complete(store) or (lists is not None and lists.missing()):
            return False
        remove_working_folder(folder)  # killed between the manifest and this removal
        _LOGGER.info("nothing to do: the store is complete")
        _LOGGER.info("%s", summary(str(folder), Manifest.load(folder, plan)))
        return True

    return from_first_rank(begin)


def _open_where_written(folder: Path, plan: Plan, groups: Groups) -> StoreWriter | None:
    """Open the begun store on rank 0 and on the ranks that write; raises on all.

    Collective: world, an all-gather of short objects.
    """
    store: StoreWriter | None = None
    with together():
        if dist.get_rank() == 0 or _writes(groups):
            store = open_begun_store(folder, plan)
    return store


def _writes(groups: Groups) -> bool:
    """Return whether this rank writes its replica's records."""
    return groups.is_last_stage and groups.tensor.rank() == 0 and groups.context.rank() == 0


def _order(job: _Job, passes: CapturePassConfig) -> CaptureOrder:
    """Return the assignment of samples to rows, from the holes that rank 0 finds.

    Collective: world, an all-gather and a broadcast of short objects.
    """

    def holes() -> list[int]:
        assert job.store is not None, "the first rank has opened it"
        return [hole for hole in job.store.holes() if hole % job.section.jobs == job.section.job]

    return CaptureOrder(
        holes=tuple(from_first_rank(holes)),
        samples=job.plan.samples,
        samples_per_shard=job.plan.samples_per_shard,
        replicas=job.groups.data.size(),
        micro_batch_size=passes.micro_batch_size,
        micro_batches=passes.micro_batches,
    )


def _execution(
    config: CaptureConfig, length: int, device: Device, resources: ExitStack
) -> Execution:
    overlap = tensor_overlap(
        config.runtime,
        samples=config.capture.micro_batch_size,
        length=length,
        resources=resources,
    )
    return teacher_execution(
        Execution(
            PRECISIONS[config.capture.precision], device.torch_device, tensor_overlap=overlap
        ),
        config.models["teacher"],
        config.parallel.layers_per_stage.teacher,
    )


def _assemble(
    config: CaptureConfig,
    job: _Job,
    order: CaptureOrder,
    device: Device,
    resources: ExitStack,
) -> CaptureParts:
    groups, data, plan = job.groups, config.data, job.plan.settings
    execution = _execution(config, plan.sequence_length, device, resources)
    places = StreamPositions(working_folder(job.folder), job.plan.uid)
    source = _open_source(job, places, order, execution.device)
    loader = open_loader(
        source,
        sequence_length=data.sequence_length,
        global_batch_size=order.global_batch_size,
        micro_batch_size=order.micro_batch_size,
        isolate_documents=data.isolate_documents,
        groups=groups,
        device=execution.device,
        prefetch=_PREFETCH,
        teacher_length=None if plan.student_length is None else plan.sequence_length,
    )
    resources.callback(loader.close)
    shard = vocab_shard(job.teacher.architecture, groups, tokens=plan.vocab_size)
    teacher = OnlineTeacher.of_source(
        job.teacher,
        execution,
        seed=teacher_seed(config.seed),
        sequence_length=plan.sequence_length,
        shard=shard,
        groups=groups,
        offload_hidden=config.models["teacher"].offload_hidden,
    )
    _LOGGER.info("%s", _banner(config, job, teacher.model))
    filler: ShardFiller | None = None
    if job.store is not None and _writes(groups):
        filler = ShardFiller(job.store, most_waiting=2 * order.micro_batches)
        resources.callback(filler.close)
    return CaptureParts(
        order=order,
        teacher=teacher,
        loader=loader,
        positions=PositionCapture(
            plan,
            shard,
            groups.tensor,
            config.capture.chunk_tokens,
        ),
        filler=filler,
        source=source,
        stream_positions=places,
        progress=_open_progress(job, order),
        longest_step=LongestStep(working_folder(job.folder)) if dist.get_rank() == 0 else None,
        groups=groups,
        device=execution.device,
    )


def _banner(config: CaptureConfig, job: _Job, model: torch.nn.Module) -> str:
    shape, first = job.teacher.architecture, next(model.parameters())
    tokens = config.capture.micro_batch_size * job.plan.settings.sequence_length
    logits = chunk_logits(
        config.capture.chunk_tokens,
        tokens // config.parallel.context,
        shape,
        tensor=config.parallel.tensor,
        device=first.device,
    )
    memory = MemoryOfRank.of_capture(
        RankParameters.of((), [model]), dtype=first.dtype, logits=logits
    )
    return capture_banner(
        config, shape, job.plan, memory=memory, world_size=job.groups.world.size()
    )


def capture_banner(
    config: CaptureConfig,
    shape: Architecture,
    plan: Plan,
    *,
    memory: MemoryOfRank,
    world_size: int,
) -> str:
    """Return the lines of a capture: teacher, layout, data, store, memory."""
    source = source_in_words(config.models["teacher"], shape.num_layers)
    rows = [
        model_row("teacher", shape, source),
        layout_row(config.parallel, world_size, config.capture.precision),
        data_row(config.data),
        store_row(plan, job=config.store.job, jobs=config.store.jobs),
        *memory_rows(memory, pipeline=config.parallel.pipeline),
    ]
    return banner_text(f"capture into {config.store.path}", rows)


def _open_source(
    job: _Job, places: StreamPositions, order: CaptureOrder, device: torch.device
) -> HoleSource | None:
    """Open the stream that a training run would read, on the first rank. Raises on all ranks."""

    def opened() -> HoleSource:
        return HoleSource(
            job.samples.open_training(),
            order,
            known=places.load(),
            list_documents=None if job.lists is None else job.lists.write,
        )

    return on_first_rank(opened, device=device)


def _open_progress(job: _Job, order: CaptureOrder) -> CaptureProgress | None:
    if dist.get_rank() != 0:
        return None
    ours, plan = job.section, job.plan
    shards = len(range(ours.job, plan.shards, ours.jobs))
    work = Work(
        shards=shards,
        shards_before=shards - len(order.holes),
        samples=order.wanted_samples,
        sequence_length=plan.settings.sequence_length,
    )
    if work.shards_before:
        _LOGGER.info("%d of %d shards exist already", work.shards_before, work.shards)
    return CaptureProgress.on_screen(work, samples_per_shard=plan.samples_per_shard)


def _finish(job: _Job) -> None:
    """Finish the store if this job is the last one. Raises StoreError on all ranks."""
    ours = job.section
    with together():
        if job.store is not None and dist.get_rank() == 0:
            manifest = finish_store(job.store, job=ours.job, jobs=ours.jobs)
            if manifest is None:
                _LOGGER.info("this job's shards are written; other jobs have not finished")
            else:
                _LOGGER.info("%s", summary(ours.path, manifest))
