"""From a configuration to its teacher: a store, a live model here or elsewhere, or several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from megatron_distill.config import ModelConfig, RunConfig, TrainConfig, teacher_parallel
from megatron_distill.data.collation import UnitRows
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.gpt import vocab_shard
from megatron_distill.runtime.groups import create_second_groups
from megatron_distill.runtime.layout import Layout
from megatron_distill.signals import Teacher
from megatron_distill.train.aligned_loss import AlignedLoss
from megatron_distill.train.assemble.alignment import Live, TeacherTokenizer
from megatron_distill.train.assemble.answers.plan import answer_metrics
from megatron_distill.train.assemble.answers.signals import moved_top_k
from megatron_distill.train.assemble.models import resolve_model, teacher_execution, teacher_seed
from megatron_distill.train.assemble.own_ranks import open_own_ranks
from megatron_distill.train.assemble.several import open_several
from megatron_distill.train.assemble.shapes import layout_of
from megatron_distill.train.assemble.site import Site, TeacherFit
from megatron_distill.train.assemble.stores.teacher import SeveralStores, Stored, open_stored
from megatron_distill.train.several_loss import SeveralLoss
from megatron_distill.train.teachers.live import OnlineTeacher
from megatron_distill.train.teachers.own_layout import OwnLayout
from megatron_distill.train.teachers.own_ranks import OwnRanksTeacher
from megatron_distill.train.teachers.resting import RestingTeacher
from megatron_distill.train.teachers.stored import stored_metrics

__all__ = ["OpenTeacher", "open_teacher", "with_movement"]


@dataclass(frozen=True, kw_only=True)
class OpenTeacher:
    """The teacher of a run, with the values of its kind; without a teacher all are empty.

    Attributes:
        signals: source of the training samples' signals.
        metrics: names of the reported metrics besides the losses.
        models: live models on these ranks by role in the log.
        shapes: of all live models by role in the log.
        stored: the stores, if the teacher is stored.
        stored_samples: in the stores, by role.
        remotes: live models on ranks of their own, by role.
        aligned: loss between two tokenizers.
        several: loss of several teachers.
        units: of a step that each teacher with its own layout runs on this rank.
        moved_bytes: that a teacher in another layout or elsewhere sends in a step, headers aside.
        held_values: numbers held on this rank beside the model: a head, slots of answers.
    """

    signals: Teacher | None = None
    metrics: tuple[str, ...] = ()
    models: Mapping[str, OnlineTeacher | OwnLayout] = field(default_factory=dict)
    shapes: Mapping[str, Architecture] = field(default_factory=dict)
    stored: Stored | SeveralStores | None = None
    stored_samples: Mapping[str, int] = field(default_factory=dict)
    remotes: Mapping[str, OwnRanksTeacher] = field(default_factory=dict)
    aligned: AlignedLoss | None = None
    several: SeveralLoss | None = None
    units: tuple[UnitRows, ...] = ()
    moved_bytes: int | None = None
    held_values: int = 0


def open_teacher(config: RunConfig, fit: TeacherFit, site: Site) -> OpenTeacher:
    """Open the stores, build the live teacher or teachers, or reach one elsewhere.

    Raises ConfigError, CheckpointError or StoreError on all ranks.
    """
    section = config.teacher
    if config.teachers:
        return _several(config, fit, site)
    if section is None:
        return OpenTeacher()
    if site.device.bridge is not None:
        return _on_own_ranks(config, section, fit, site)
    if section.store is not None:
        return _stored(config, fit, site)
    online, aligned = _live(config, section, fit, site), None
    if fit.own is not None:
        online, aligned = _with_head(section, online, config.objective.chunk_tokens, fit, site)
    opened = OpenTeacher(
        signals=online,
        metrics=answer_metrics(section.transfer, fit.terms),
        models={"teacher": online},
        shapes={"teacher": online.architecture},
        aligned=aligned,
    )
    if isinstance(online, OwnLayout):
        return with_movement(opened, [online], config.train)
    if section.offload:
        return replace(opened, signals=RestingTeacher.of(online, key="teacher.offload"))
    return opened


def _live(
    config: RunConfig, section: ModelConfig, fit: TeacherFit, site: Site
) -> OnlineTeacher | OwnLayout:
    """Build the model, in the student's layout or its own."""
    tokens = fit.vocabulary if fit.own is None else fit.own.vocabulary
    source = resolve_model(config, "teacher", tokens)
    build: Callable[..., OnlineTeacher | OwnLayout] = OnlineTeacher.of_source
    layout = layout_of(teacher_parallel(config))
    if layout != site.groups.layout.without_virtual_stages():
        build = _in_own_layout(config, layout, fit, site)
    # The head's rows are those of the student's vocabulary, unless the teacher has another one.
    of_head = fit.student if fit.own is None else source.architecture
    return build(
        source,
        teacher_execution(site.execution, section, config.parallel.layers_per_stage.teacher),
        seed=teacher_seed(config.seed),
        sequence_length=section.sequence_length or config.data.sequence_length,
        shard=vocab_shard(of_head, site.groups, tokens=tokens.size),
        groups=site.groups,
        offload_hidden=section.offload_hidden,
    )


def _in_own_layout(
    config: RunConfig, layout: Layout, fit: TeacherFit, site: Site
) -> Callable[..., OwnLayout]:
    """Create the groups of the teacher's layout. Collective: world, group creation."""
    timeout_seconds, has_own_tokens = config.runtime.timeout_seconds, fit.own is not None
    tokens = fit.vocabulary if fit.own is None else fit.own.vocabulary
    top_k = moved_top_k(
        config,
        "teacher",
        fit.terms,
        site.execution.device,
        tokens=tokens.size,
        has_own_tokens=has_own_tokens,
    )
    return partial(
        OwnLayout.of_source,
        own_groups=create_second_groups(layout, timeout_minutes=timeout_seconds / 60),
        timeout_seconds=timeout_seconds,
        has_own_tokens=has_own_tokens,
        top_k=top_k,
    )


def _connected(
    own: TeacherTokenizer, online: Live, chunk_tokens: int | None, fit: TeacherFit, site: Site
) -> tuple[Live, AlignedLoss]:
    device = site.execution.device
    return own.connect(
        online, fit.student, fit.vocabulary, site.groups, device, chunk_tokens=chunk_tokens
    )


def _with_head(
    section: ModelConfig,
    online: OnlineTeacher | OwnLayout,
    chunk_tokens: int | None,
    fit: TeacherFit,
    site: Site,
) -> tuple[OnlineTeacher | OwnLayout, AlignedLoss]:
    """Return a teacher with a tokenizer of its own, its head in the layout of the loss.

    One that moves a top-k runs its head itself.
    """
    assert fit.own is not None
    if section.transfer.what == "top_k":
        return online, _connected(fit.own, None, chunk_tokens, fit, site)[1]
    return _connected(fit.own, online, chunk_tokens, fit, site)


def with_movement(
    opened: OpenTeacher, found: Sequence[OwnLayout], train: TrainConfig
) -> OpenTeacher:
    """Add the units of teachers with their own layouts, and the sizes of their movements."""
    size = train.micro_batch_size
    micro_batches = train.global_batch_size // (size * found[0].groups.data.size())
    return replace(
        opened,
        units=tuple(online.unit_rows(micro_batches) for online in found),
        moved_bytes=sum(online.moved_bytes(micro_batches, size) for online in found),
        held_values=sum(online.head_copy for online in found),
    )


def _stored(config: RunConfig, fit: TeacherFit, site: Site) -> OpenTeacher:
    own, aligned = fit.own, None
    stored = open_stored(config, fit, site, own)
    if own is not None:
        _, aligned = _connected(own, None, config.objective.chunk_tokens, fit, site)
    return OpenTeacher(
        signals=stored.teacher,
        metrics=stored_metrics(stored.settings, fit.terms),
        stored=stored,
        stored_samples={"teacher": stored.samples},
        aligned=aligned,
    )


def _on_own_ranks(
    config: RunConfig, section: ModelConfig, fit: TeacherFit, site: Site
) -> OpenTeacher:
    remote, aligned = open_own_ranks(config, "teacher", fit, site), None
    chunk_tokens = config.objective.chunk_tokens
    if fit.own is not None and section.transfer.what == "top_k":
        _, aligned = _connected(fit.own, None, chunk_tokens, fit, site)
    elif fit.own is not None:
        _, aligned = _connected(fit.own, remote.head, chunk_tokens, fit, site)
    opened = OpenTeacher(
        signals=remote,
        metrics=answer_metrics(section.transfer, fit.terms),
        aligned=aligned,
    )
    return _with_remotes(opened, {"teacher": remote}, site.execution.dtype.itemsize)


def _with_remotes(
    opened: OpenTeacher, found: Mapping[str, OwnRanksTeacher], width: int
) -> OpenTeacher:
    """Add teachers elsewhere, and the sizes of their answers; `width`: bytes of a number."""
    moved = sum(remote.step_bytes for remote in found.values())
    held = sum(remote.held_bytes for remote in found.values())
    return replace(
        opened,
        remotes=found,
        shapes={**opened.shapes, **{role: one.head.architecture for role, one in found.items()}},
        moved_bytes=moved + (opened.moved_bytes or 0),
        held_values=held // width + opened.held_values,
    )


def _several(config: RunConfig, fit: TeacherFit, site: Site) -> OpenTeacher:
    found = open_several(config, fit, site)
    opened = OpenTeacher(
        signals=found.teacher,
        metrics=found.metrics,
        models=found.models,
        shapes={role: model.architecture for role, model in found.models.items()},
        stored=found.stored,
        stored_samples={one.key: one.samples for one in found.stored.parts} if found.stored else {},
        several=found.loss,
        aligned=found.aligned,
    )
    if found.own_layouts:
        opened = with_movement(opened, found.own_layouts, config.train)
    if found.remotes:
        opened = _with_remotes(opened, found.remotes, site.execution.dtype.itemsize)
    return opened
