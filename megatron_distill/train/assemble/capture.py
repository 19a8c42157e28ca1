"""From the configuration of a capture to a teacher store."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_distill import __version__, log
from megatron_distill.config import CaptureConfig
from megatron_distill.data.sources import open_training
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.errors import ConfigError
from megatron_distill.log import get_logger
from megatron_distill.models.gpt import vocab_shard
from megatron_distill.runtime.collectives import on_first_rank, together
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.launch import Device
from megatron_distill.runtime.termination import TerminationRequest
from megatron_distill.store import CaptureSettings, Identity, Manifest, Plan, StoreWriter
from megatron_distill.store.binary import usual_samples_per_shard
from megatron_distill.store.plan import MANIFEST
from megatron_distill.train.assemble.banner import RankParameters, capture_banner
from megatron_distill.train.assemble.checks import check_start
from megatron_distill.train.assemble.data import open_loader
from megatron_distill.train.assemble.failed_start import FolderAsFound
from megatron_distill.train.assemble.identity import (
    dataset_digest,
    dataset_settings,
    teacher_digest,
)
from megatron_distill.train.assemble.models import (
    Origin,
    build_online_teacher,
    execution_on,
    find_origin,
    job_groups,
    teacher_seed,
)
from megatron_distill.train.assemble.sources import data_options, source_specs
from megatron_distill.train.assemble.tokenizer import Vocabulary, open_tokenizer
from megatron_distill.train.capture.folder import (
    finish_store,
    held_for_job,
    is_complete,
    keep_tokenizer,
    open_begun_store,
    open_store,
    remove_working_folder,
)
from megatron_distill.train.capture.loop import CaptureParts, fill_holes
from megatron_distill.train.capture.order import (
    CaptureOrder,
    HoleSource,
    StreamPlaces,
    working_folder,
)
from megatron_distill.train.capture.positions import PositionCapture
from megatron_distill.train.capture.progress import CaptureProgress, Work, summary
from megatron_distill.train.capture.writer import ShardFiller

_LOGGER = get_logger(__name__)
_PREFETCH = 2


@dataclass(frozen=True)
class _Job:
    """The parts of a capture once its store is open; the tokenizer is on rank 0 only."""

    config: CaptureConfig
    device: Device
    groups: Groups
    origin: Origin
    tokenizer: Tokenizer | None
    plan: Plan
    store: StoreWriter | None  # on rank 0 and on ranks that write

    @property
    def folder(self) -> Path:
        """The store's folder."""
        return Path(self.config.store.path)


def run_capture(config: CaptureConfig, device: Device, termination: TerminationRequest) -> bool:
    """Assemble and run one capture in the current world; return whether all of its part is written.

    Raises a MegatronDistillError on all ranks together. Process groups are gone afterwards, so that
    another job may follow in the same processes.
    """
    folder = Path(config.store.path)
    with job_groups(config, trains=False) as groups, ExitStack() as resources, device.alone:
        found = FolderAsFound(
            folder,
            kept_file=None,
            prepared=str(working_folder(folder).relative_to(folder) / "cache"),
            work=("shards", MANIFEST),
        )
        with together():
            if dist.get_rank() == 0:
                check_start(config)
        tokenizer, vocabulary = open_tokenizer(config)
        assert config.teacher is not None, "the rules of a capture ask for one"
        origin = find_origin(config.teacher, "teacher", config, vocabulary)
        plan = _plan(config, origin, vocabulary, groups)
        if _begin(folder, plan):
            return True
        resources.enter_context(held_for_job(folder, config.store.job))
        if config.store.jobs == 1:  # else another job may have begun to write there
            resources.enter_context(found.put_back_on_failure())
        store = _open_where_written(folder, plan, groups)
        with together():
            if tokenizer is not None:
                keep_tokenizer(folder, tokenizer)
        job = _Job(config, device, groups, origin, tokenizer, plan, store)
        order = _order(job)
        if order.holes:
            parts = _assemble(job, order, resources)
            found.has_started()
            if not fill_holes(parts, termination):
                _LOGGER.info(
                    "stopped by a signal; start the same command again to write what is missing"
                )
                return False
        found.has_started()
        _finish(job)
        return True


def _plan(config: CaptureConfig, origin: Origin, vocabulary: Vocabulary, groups: Groups) -> Plan:
    """Return the plan of the store, the same on all ranks. Raises on all of them.

    Collective: world, those of `teacher_digest` and one broadcast of a short object.
    """
    with together():  # before the teacher's weights are read
        settings = _settings(config, origin)
        dataset = dataset_settings(config) if dist.get_rank() == 0 else {}
    teacher = teacher_digest(origin, seed=teacher_seed(config), group=groups.world)
    said: list[Plan | None] = [None]
    with together():
        if dist.get_rank() == 0:
            identity = Identity(
                teacher=teacher,
                tokenizer=vocabulary.identity,
                dataset=dataset_digest(dataset, vocabulary.identity),
                settings={
                    "teacher": _teacher_name(config),
                    "precision": config.capture.precision,
                    "version": __version__,
                    "dataset": dataset,
                },
            )
            store = config.store
            per_shard = store.samples_per_shard or usual_samples_per_shard(settings, store.samples)
            said = [Plan(settings, identity, store.samples, per_shard)]
    dist.broadcast_object_list(said, src=0)
    assert said[0] is not None
    return said[0]


def _settings(config: CaptureConfig, origin: Origin) -> CaptureSettings:
    store, vocab_size = config.store, origin.architecture.vocab_size
    if store.mode == "top_k" and store.k > vocab_size:
        raise ConfigError(
            f"store.k = {store.k}: the teacher's vocabulary has {vocab_size} tokens; lower it"
        )
    return CaptureSettings(
        k=store.k,
        vocab_size=vocab_size,
        sequence_length=config.data.sequence_length,
        mode=store.mode,
        codec=store.codec,
        top_p=store.top_p,
        temperatures=store.temperatures,
        sampling_seed=config.seed if store.mode == "sampled" else None,
    )


def _teacher_name(config: CaptureConfig) -> str:
    assert config.teacher is not None
    path = config.teacher.hf or config.teacher.checkpoint
    return "random weights" if path is None else Path(path).expanduser().resolve().name


def _begin(folder: Path, plan: Plan) -> bool:
    """Begin the store on rank 0; return on all ranks whether it is complete already.

    Collective: world, an all-gather and a broadcast of short objects.
    """
    complete = [False]
    with together():
        if dist.get_rank() == 0:
            complete = [is_complete(open_store(folder, plan))]
            if complete[0]:
                remove_working_folder(folder)  # killed between the manifest and this removal
                _LOGGER.info("nothing to do: the store is complete")
                _LOGGER.info("%s", summary(str(folder), Manifest.load(folder, plan)))
    dist.broadcast_object_list(complete, src=0)
    return complete[0]


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


def _order(job: _Job) -> CaptureOrder:
    """Return the assignment of samples to rows, from the holes that rank 0 finds.

    Collective: world, an all-gather and a broadcast of short objects.
    """
    ours = job.config.store
    holes: list[list[int]] = [[]]
    with together():
        if job.store is not None and dist.get_rank() == 0:
            holes = [[shard for shard in job.store.holes() if shard % ours.jobs == ours.job]]
    dist.broadcast_object_list(holes, src=0)
    return CaptureOrder(
        holes=tuple(holes[0]),
        samples=job.plan.samples,
        samples_per_shard=job.plan.samples_per_shard,
        replicas=job.groups.data.size(),
        micro_batch_size=job.config.capture.micro_batch_size,
        micro_batches=job.config.capture.micro_batches,
    )


def _assemble(job: _Job, order: CaptureOrder, resources: ExitStack) -> CaptureParts:
    config, groups, device = job.config, job.groups, job.device.torch_device
    places = StreamPlaces(working_folder(job.folder), job.plan.uid)
    source = _open_source(job, places, order, device)
    loader = open_loader(
        source,
        config.data,
        global_batch_size=order.global_batch_size,
        micro_batch_size=order.micro_batch_size,
        groups=groups,
        device=device,
        prefetch=_PREFETCH,
    )
    resources.callback(loader.close)
    execution = execution_on(job.device, precision=config.capture.precision)
    teacher = build_online_teacher(config, job.origin, groups=groups, execution=execution)
    _LOGGER.info(
        "%s",
        capture_banner(
            config,
            job.plan,
            teacher=job.origin.architecture,
            mine=RankParameters.of((), teacher.model),
            world_size=groups.world.size(),
            device=device,
        ),
    )
    filler: ShardFiller | None = None
    if job.store is not None and _writes(groups):
        filler = ShardFiller(job.store, most_waiting=2 * order.micro_batches)
        resources.callback(filler.close)
    return CaptureParts(
        order=order,
        teacher=teacher,
        loader=loader,
        positions=PositionCapture(
            job.plan.settings,
            vocab_shard(job.origin.architecture, groups),
            groups.tensor,
            config.capture.chunk_tokens,
        ),
        filler=filler,
        source=source,
        places=places,
        progress=_open_progress(job, order),
        groups=groups,
        device=device,
    )


def _open_source(
    job: _Job, places: StreamPlaces, order: CaptureOrder, device: torch.device
) -> HoleSource | None:
    """Open the stream that a training run would read, on the first rank. Raises on all ranks."""
    data = job.config.data

    def opened() -> HoleSource:
        assert job.tokenizer is not None, "the first rank has the tokenizer"
        stream = open_training(
            source_specs(data.sources),
            tokenizer=job.tokenizer,
            options=data_options(job.config),
            seed=job.config.seed,
        )
        return HoleSource(
            stream,
            order,
            known=places.load(),
            sequence_length=data.sequence_length,
            padding_token=job.tokenizer.eos_id,
        )

    return on_first_rank(opened, device=device)


def _open_progress(job: _Job, order: CaptureOrder) -> CaptureProgress | None:
    if dist.get_rank() != 0:
        return None
    ours, plan = job.config.store, job.plan
    shards = len(range(ours.job, plan.shards, ours.jobs))
    work = Work(
        shards=shards,
        shards_before=shards - len(order.holes),
        samples=order.wanted_samples,
        sequence_length=plan.settings.sequence_length,
    )
    if work.shards_before:
        _LOGGER.info("%d of %d shards exist already", work.shards_before, work.shards)
    progress = CaptureProgress(sys.stderr, work, samples_per_shard=plan.samples_per_shard)
    # Log lines go above the bar, not through it.
    log.configure(dist.get_rank(), stream=progress.stream)
    return progress


def _finish(job: _Job) -> None:
    """Finish the store if this job is the last one. Raises StoreError on all ranks."""
    ours = job.config.store
    with together():
        if job.store is not None and dist.get_rank() == 0:
            manifest = finish_store(job.store, job=ours.job, jobs=ours.jobs)
            if manifest is None:
                _LOGGER.info("this job's shards are written; other jobs have not finished")
            else:
                _LOGGER.info("%s", summary(ours.path, manifest))
