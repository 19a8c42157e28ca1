"""Evaluation and text generation with trained models, from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megatron_distill.config import RunConfig
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.errors import ConfigError
from megatron_distill.models.execution import Execution
from megatron_distill.models.generation import Sampling, Stops, WriteRow
from megatron_distill.models.generation.memory import free_cache_gib
from megatron_distill.models.generation.model import CachedGPT
from megatron_distill.models.gpt import HiddenStateGPT
from megatron_distill.models.sharded_weights import has_sharded_weights
from megatron_distill.runtime.collectives import from_first_rank, together
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.launch import PRECISIONS, Device
from megatron_distill.train.assemble.distillation import OpenRun, open_held_out, open_run
from megatron_distill.train.assemble.evaluation import awake
from megatron_distill.train.assemble.models import job_groups, resolve_model
from megatron_distill.train.assemble.site import Site
from megatron_distill.train.assemble.sources import data_options, open_tokenizer, read_tokenizer
from megatron_distill.train.checkpoint.description import Description, resolve_checkpoint
from megatron_distill.train.checkpoint.reader import MappedChunks, load_shards
from megatron_distill.train.checkpoint.state import replicated_shards
from megatron_distill.train.comparison import compare_held_out
from megatron_distill.train.evaluation.draft_speedup import best_draft, draft_cost, speedup_of
from megatron_distill.train.evaluation.speculative import (
    RULES,
    AcceptanceRule,
    Speculated,
    block_figures,
    speculate,
)
from megatron_distill.train.evaluation.teacher_text import Text, compare_texts, held_out_prompts
from megatron_distill.train.evaluation.text_hash import hash_of_ids
from megatron_distill.train.features import FeatureLosses
from megatron_distill.train.metrics import LabelTotals, public_names
from megatron_distill.train.model_source import teacher_digest
from megatron_distill.train.optimizer import wrap_data_parallel
from megatron_distill.train.run_state import check_same_features
from megatron_distill.train.step import Student
from megatron_distill.train.teachers.live import OnlineTeacher
from megatron_distill.train.teachers.own_layout import OwnLayout
from megatron_distill.train.validation import HeldOut, evaluating, validate

_NEW_TOKENS = 128  # that continue a held-out prompt, or half a sequence if that is less


def evaluate(
    config: RunConfig, device: Device, *, teacher_text: bool = False, drafts: Sequence[int] = ()
) -> dict[str, object]:
    """Return the held-out figures of the student, and of its teacher if the configuration has one.

    Names, including `sources` and `teachers`, are those of the `validation` objects of a run's
    metrics; `comparison` has the figures of `compare_held_out` and `best_draft`. `teacher_text`:
    the same figures on texts that the teacher writes, `comparison_on_teacher_text`. `drafts`:
    lengths of drafts that `speculative` has the measured tokens per verification of.

    Raises a MegatronDistillError on all ranks together.
    """
    if config.validation.samples == 0:
        raise ConfigError("validation.samples=0: nothing is held out; set it to 1 or more")
    with (
        job_groups(config.parallel, config.runtime, seed=config.seed, trains=False) as groups,
        ExitStack() as resources,
        device.alone,
    ):
        # Nothing is trained, so nothing is recomputed.
        execution = Execution(PRECISIONS[config.train.precision], device.torch_device)
        opened = open_run(config, Site(groups, execution, device, resources))
        teacher = _teacher_beside(opened) if teacher_text or drafts else None
        chunks = opened.student.build(opened.site.execution, groups=groups, seed=config.seed)
        for chunk in chunks:
            chunk.requires_grad_(False)  # so that the wrapper allocates no gradient buffers
        if opened.objective.features is not None:
            _restore_features(opened.objective.features, chunks, config.student.checkpoint, groups)
        wrapped = wrap_data_parallel(chunks, config.optimizer, groups=groups)
        student = Student(chunks, wrapped, groups, config.data.sequence_length)
        held_out = open_held_out(config.train, config.objective, opened)
        means, sources = validate(student, held_out)
        counts = LabelTotals.of(held_out.steps, ()).whole
        teachers = held_out.objective.take_teacher_figures(means, counts)
        found: dict[str, object] = {**public_names(means)}
        if sources:
            found["sources"] = sources
        if teachers:
            found["teachers"] = teachers
        compared = compare_held_out(student, held_out)
        found["comparison"] = compared | best_draft(compared, cost=_draft_cost(opened))
        if teacher is not None:
            found |= _on_own_texts(
                config, opened, teacher, student, held_out, teacher_text=teacher_text, drafts=drafts
            )
        return found


def _restore_features(
    features: FeatureLosses,
    chunks: Sequence[HiddenStateGPT],
    checkpoint: str | None,
    groups: Groups,
) -> None:
    """Tap the paired layers, and load the projectors from the student's checkpoint.

    Raises CheckpointError on all ranks: the checkpoint has other features or projectors. Raises
    ConfigError: there is no checkpoint, and projectors are needed.
    """
    features.attach(chunks)
    if features.projectors is None:
        return
    remedy = "set objective.features=[] to evaluate without them"
    if checkpoint is None:
        raise ConfigError(
            "objective.features: their projectors are in a run's checkpoint, and "
            f"student.checkpoint = null; name the run, or {remedy}"
        )
    with together():
        folder = resolve_checkpoint(checkpoint)
        check_same_features(Description.read(folder), features.as_dict(), folder, remedy=remedy)
        stored = MappedChunks(folder)
    load_shards(replicated_shards(features.projectors.sharded_state(), groups), stored, groups)


def _on_own_texts(
    config: RunConfig,
    opened: OpenRun,
    teacher: OnlineTeacher,
    student: Student,
    held_out: HeldOut,
    *,
    teacher_text: bool,
    drafts: Sequence[int],
) -> dict[str, object]:
    """Return the figures on continuations of the held-out prompts; see `evaluate`."""
    groups, device = opened.site.groups, opened.site.execution.device
    drafter = CachedGPT(
        student.chunks,
        opened.student.architecture,
        groups,
        device,
        vocab_size=opened.vocabulary.size,
    )
    verifier = replace(drafter, chunks=[teacher.model], architecture=teacher.architecture)
    tokenizer = opened.samples.tokenizer
    stop_ids = from_first_rank(lambda: () if tokenizer is None else tokenizer.end_ids)
    length = config.data.sequence_length
    prompts = held_out_prompts(held_out.steps, groups, most=max(1, length // 4))
    tokens = min(_NEW_TOKENS, max(1, length // 2))
    _require_room(drafts, prompts, min(drafter.positions, verifier.positions))
    cost = _draft_cost(opened)
    found: dict[str, object] = {}
    with evaluating(student), awake(opened, "teacher", teacher):
        cache_gib = free_cache_gib(config.generation.cache_gib, device, groups.world)
        drafter, verifier = (replace(one, cache_gib=cache_gib) for one in (drafter, verifier))
        if teacher_text:
            rows = [WriteRow(ids, number, tokens) for number, ids in enumerate(prompts)]
            written = verifier.write(
                rows,
                sampling=Sampling(temperature=1.0, seed=config.seed),
                stops=Stops(ids=stop_ids),
            )
            texts = [Text(row.ids, text.ids) for row, text in zip(rows, written, strict=True)]
            compared = compare_texts(verifier, drafter, texts)
            found["comparison_on_teacher_text"] = compared | best_draft(compared, cost=cost)
        if drafts:
            write = partial(
                speculate,
                verifier,
                drafter,
                prompts,
                tokens=tokens,
                seed=config.seed,
                stop_ids=stop_ids,
            )
            prompt_hash = hash_of_ids([(ids,) for ids in prompts])
            found["speculative"] = {
                rule: {
                    str(draft): _drafted(write, draft, rule, cost) | {"prompt_hash": prompt_hash}
                    for draft in drafts
                }
                for rule in RULES
            }
    return found


def _require_room(
    drafts: Sequence[int], prompts: Sequence[tuple[int, ...]], positions: int
) -> None:
    """Raise ConfigError for drafts that are too long for a block after every prompt."""
    most = positions - min(map(len, prompts), default=0) - 2
    for draft in drafts:
        if draft > most:
            raise ConfigError(
                f"--speculative {draft}: no held-out prompt leaves room for such a draft in the "
                f"{positions:,} positions of both models; give {most} at most"
            )


def _drafted(
    write: Callable[..., list[Speculated]], draft: int, rule: AcceptanceRule, cost: float | None
) -> dict[str, object]:
    """Return the figures of drafts of one length, with their speed-up."""
    figures = block_figures(write(draft=draft, rule=rule), rule)
    return {**figures, **speedup_of(figures, draft=draft, cost=cost)}


def _draft_cost(opened: OpenRun) -> float | None:
    """Return the cost of the student's step over that of a single live teacher."""
    teacher = opened.teacher.shapes.get("teacher")
    if teacher is None:
        return None
    length = opened.samples.data.sequence_length
    return draft_cost(opened.student.architecture, teacher, sequence_length=length)


def _teacher_beside(opened: OpenRun) -> OnlineTeacher:
    """Return the live teacher with the student's tokens and layout; raises ConfigError."""
    teacher = opened.teacher.models.get("teacher")
    named = "--speculative and --teacher-text"
    if teacher is None:
        raise ConfigError(
            f"{named} read and write with the run's teacher, and no single live one is on the "
            "student's ranks; give its weights, teacher.hf or teacher.checkpoint, and set "
            "teacher.store=null"
        )
    if opened.teacher.aligned is not None:
        raise ConfigError(f"{named}: the teacher has another tokenizer; leave them out")
    if isinstance(teacher, OwnLayout):
        raise ConfigError(
            f"{named}: the teacher has a layout of its own; set teacher.parallel=null"
        )
    if has_sharded_weights(teacher.model):
        raise ConfigError(
            f"{named}: a teacher with sharded weights writes no text; set "
            "teacher.shard_weights=false"
        )
    return teacher


@dataclass(frozen=True)
class TextWriter:
    """A student that is found but not built, for checks of a prompt before its weights are read.

    Attributes:
        tokenizer: on the first rank, or on all that asked for it.
        positions: the most tokens of a text.
        digest: returns that of the weights, see `teacher_digest`.
        build: reads the weights. Both raise a MegatronDistillError on all ranks together.
    """

    tokenizer: Tokenizer | None
    positions: int
    digest: Callable[[], str]
    build: Callable[[], CachedGPT]


@contextmanager
def text_writer(
    config: RunConfig, device: Device, *, tokenizer_everywhere: bool = False
) -> Iterator[TextWriter]:
    """Open the tokenizer of a student that generates text, and find its model.

    tokenizer_everywhere: on all ranks, which stop strings need. Raises a MegatronDistillError on
    all ranks together.
    """
    with (
        job_groups(config.parallel, config.runtime, seed=config.seed, trains=False) as groups,
        device.alone,
    ):
        options = data_options(
            config.data, Path(config.output), shows_progress=config.logging.progress
        )
        tokenizer, vocabulary = open_tokenizer(config, options)
        if tokenizer_everywhere:
            with together():
                tokenizer = tokenizer or read_tokenizer(config, options)
        source = resolve_model(config, "student", vocabulary)
        execution = Execution(PRECISIONS[config.train.precision], device.torch_device)

        def build() -> CachedGPT:
            chunks = source.build(execution, groups=groups, seed=config.seed)
            for chunk in chunks:
                chunk.freeze()
            return CachedGPT(
                chunks,
                source.architecture,
                groups,
                device.torch_device,
                vocab_size=vocabulary.size,
                cache_gib=free_cache_gib(
                    config.generation.cache_gib, device.torch_device, groups.world
                ),
                decode=None if tokenizer is None else tokenizer.decode,
            )

        digest = partial(teacher_digest, source, seed=config.seed, group=groups.world)
        yield TextWriter(tokenizer, source.architecture.max_position_embeddings, digest, build)
