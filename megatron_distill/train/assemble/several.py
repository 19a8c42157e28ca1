"""From a configuration to several teachers, their loss, and the routing of samples to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from megatron_distill.config import (
    ModelConfig,
    RunConfig,
    has_own_ranks,
    own_tokenizers,
    routed_terms,
    teacher_parallel,
)
from megatron_distill.errors import ConfigError
from megatron_distill.losses import ChunkTerm, Term
from megatron_distill.models.gpt import vocab_shard
from megatron_distill.models.sharded_weights import needs_every_replica
from megatron_distill.runtime.groups import Groups, create_second_groups
from megatron_distill.runtime.layout import Layout
from megatron_distill.signals import Teacher
from megatron_distill.train.aligned_loss import AlignedLoss
from megatron_distill.train.assemble.alignment import Live, TeacherTokenizer
from megatron_distill.train.assemble.answers.plan import answer_metrics
from megatron_distill.train.assemble.answers.signals import moved_top_k
from megatron_distill.train.assemble.models import resolve_model, teacher_execution, teacher_seed
from megatron_distill.train.assemble.own_ranks import open_own_ranks
from megatron_distill.train.assemble.routing import members
from megatron_distill.train.assemble.shapes import layout_of
from megatron_distill.train.assemble.site import Site, TeacherFit
from megatron_distill.train.assemble.stores.source import OneOfSeveral
from megatron_distill.train.assemble.stores.teacher import SeveralStores, Stored, open_stored
from megatron_distill.train.several_loss import SeveralLoss
from megatron_distill.train.teachers.live import OnlineTeacher, live_metrics
from megatron_distill.train.teachers.own_layout import OwnLayout
from megatron_distill.train.teachers.own_ranks import OwnRanksTeacher, RemoteHead
from megatron_distill.train.teachers.resting import RestingTeacher
from megatron_distill.train.teachers.sent_topk import SentTopK
from megatron_distill.train.teachers.several import SeveralTeachers

__all__ = ["OpenTeachers", "open_several"]


@dataclass(frozen=True)
class OpenTeachers:
    """The teachers of a run with several.

    Attributes:
        models: the live ones by role.
        teacher: their signals.
        loss: their loss.
        metrics: the reported metrics that every teacher has.
        stored: the stores; None where all are models.
        aligned: the loss of the teacher with a tokenizer of its own; None without one.
        own_layouts: the live ones in another layout than the student's, by their numbers.
        remotes: the live ones on ranks of their own, by role.
    """

    models: Mapping[str, OnlineTeacher | OwnLayout]
    teacher: SeveralTeachers
    loss: SeveralLoss
    metrics: tuple[str, ...]
    stored: SeveralStores | None
    aligned: AlignedLoss | None = None
    own_layouts: tuple[OwnLayout, ...] = ()
    remotes: Mapping[str, OwnRanksTeacher] = field(default_factory=dict)


def open_several(config: RunConfig, fit: TeacherFit, site: Site) -> OpenTeachers:
    """Open the teachers of `teachers` one after the other.

    Raises ConfigError, CheckpointError or StoreError on all ranks.

    Collective: those of `OnlineTeacher.of_source`, `OwnLayout.of_source`, `open_own_ranks` or
    `open_stored`, per teacher; for each different layout, creation of its groups.
    """
    assert config.teachers is not None, "the caller has looked"
    groups, chunk_tokens = site.groups, config.objective.chunk_tokens
    plain = tuple(term for term in fit.terms if isinstance(term, Term))
    aligned: AlignedLoss | None = None
    foreign = frozenset(own_tokenizers(config))
    models: dict[str, OnlineTeacher | OwnLayout] = {}
    layouts = _Layouts(site.groups, config.runtime.timeout_seconds)
    stores: dict[str, Stored] = {}
    teachers: dict[str, Teacher] = {}
    remotes: dict[str, OwnRanksTeacher] = {}
    metrics = [_metrics(fit.terms)]
    known = members(config)
    for own in known.values():
        name, section = own.name, config.teachers[own.name]
        tokens = fit.own if name in foreign else None
        if section.store is not None:
            stores[name] = _stored(config, own, fit, site, tokens)
            teachers[name] = stores[name].teacher
            if tokens is None:
                metrics.append(stores[name].metrics(plain))
            else:
                _, aligned = _connected(tokens, None, own, chunk_tokens, fit, site)
            continue
        sends_ids = section.transfer.what == "top_k"
        if sends_ids and tokens is None:
            metrics.append(answer_metrics(section.transfer, plain))
        if site.device.bridge is not None and has_own_ranks(config, own.key):
            teachers[name] = remotes[own.key] = open_own_ranks(config, own.key, fit, site)
            if tokens is not None:
                head = None if sends_ids else remotes[own.key].head
                aligned = _on_own_ranks(tokens, head, own, chunk_tokens, fit, site)
            continue
        live = _live(config, own, section, fit, site, layouts, tokens)
        if tokens is not None and sends_ids:
            _, aligned = _connected(tokens, None, own, chunk_tokens, fit, site)
        elif tokens is not None:
            live, aligned = _connected(tokens, live, own, chunk_tokens, fit, site)
        models[name] = teachers[name] = live
        if section.offload and isinstance(live, OnlineTeacher):
            teachers[name] = RestingTeacher.of(live, key=f"{own.key}.offload")
    drawn = {name for name, store in stores.items() if not store.settings.kind.is_ranked}
    several = SeveralTeachers(
        teachers,
        named=frozenset(own.name for own in known.values() if own.is_named),
        has_routed_terms=bool(routed_terms(config)),
        joint=_run_together(models, groups),
        own_tokens=foreign,
    )
    loss = SeveralLoss.of(plain, tuple(teachers), groups.context, elsewhere=foreign, drawn=drawn)
    return OpenTeachers(
        models={f"teachers.{name}": model for name, model in models.items()},
        teacher=several,
        loss=loss,
        metrics=tuple(name for name in metrics[0] if all(name in one for one in metrics)),
        stored=SeveralStores(tuple(stores.values())) if stores else None,
        aligned=aligned,
        own_layouts=tuple(model for model in models.values() if isinstance(model, OwnLayout)),
        remotes=remotes,
    )


def _stored(
    config: RunConfig,
    own: OneOfSeveral,
    fit: TeacherFit,
    site: Site,
    tokens: TeacherTokenizer | None,
) -> Stored:
    """Open the store of a teacher; `tokens`: of a tokenizer of its own."""
    found = open_stored(config, fit, site, tokens, own)
    apart = [key for key in members(config) if has_own_ranks(config, key)]
    if found.is_by_document and tokens is not None and apart:
        raise ConfigError(
            f"{own.key}.store: its records are found by text, and the ranks of {apart[0]} pack the "
            f"samples without it. Capture a store with capture.aligned=true, or run {apart[0]} on "
            f"the student's ranks (remove {apart[0]}.ranks and {apart[0]}.nodes)"
        )
    return found


@dataclass
class _Layouts:
    """The groups of the teachers' layouts beside the student's, each made once."""

    student: Groups
    timeout_seconds: float
    made: dict[Layout, Groups] = field(default_factory=dict)
    teachers: int = 0

    def builder(
        self, layout: Layout, *, has_own_tokens: bool, top_k: SentTopK | None
    ) -> Callable[..., OnlineTeacher | OwnLayout]:
        """Return a function that builds a model in a layout; `top_k`: as of `OwnLayout`.

        Collective: the whole world, group creation, where the layout is new.
        """
        if layout == self.student.layout.without_virtual_stages():
            return OnlineTeacher.of_source
        if layout not in self.made:
            minutes = self.timeout_seconds / 60
            self.made[layout] = create_second_groups(layout, timeout_minutes=minutes)
        number, self.teachers = self.teachers, self.teachers + 1
        return partial(
            OwnLayout.of_source,
            own_groups=self.made[layout],
            timeout_seconds=self.timeout_seconds,
            number=number,
            has_own_tokens=has_own_tokens,
            top_k=top_k,
        )


def _live(
    config: RunConfig,
    own: OneOfSeveral,
    section: ModelConfig,
    fit: TeacherFit,
    site: Site,
    layouts: _Layouts,
    tokens: TeacherTokenizer | None,
) -> OnlineTeacher | OwnLayout:
    """Build a model, in the student's layout or its own; `tokens`: of a tokenizer of its own."""
    groups = site.groups
    vocabulary = fit.vocabulary if tokens is None else tokens.vocabulary
    source = resolve_model(config, own.key, vocabulary)
    # The head's rows are those of the student's vocabulary, unless the teacher has another one.
    of_head = fit.student if tokens is None else source.architecture
    layout, has_own_tokens = layout_of(teacher_parallel(config, own.key)), tokens is not None
    top_k = moved_top_k(
        config,
        own.key,
        fit.terms,
        site.execution.device,
        tokens=vocabulary.size,
        has_own_tokens=has_own_tokens,
    )
    return layouts.builder(layout, has_own_tokens=has_own_tokens, top_k=top_k)(
        source,
        teacher_execution(site.execution, section, None, own.key),
        seed=teacher_seed(config.seed) + own.number,
        sequence_length=section.sequence_length or config.data.sequence_length,
        shard=vocab_shard(of_head, groups, tokens=vocabulary.size),
        groups=groups,
        offload_hidden=section.offload_hidden,
    )


def _connected(
    tokens: TeacherTokenizer,
    online: Live,
    own: OneOfSeveral,
    chunk_tokens: int | None,
    fit: TeacherFit,
    site: Site,
) -> tuple[Live, AlignedLoss]:
    """Return a teacher with its head in the layout of the loss, and the loss without labels."""
    device = site.execution.device
    teacher, loss = tokens.connect(
        online, fit.student, fit.vocabulary, site.groups, device, chunk_tokens=chunk_tokens
    )
    # The cross-entropy is in the pass of the other terms.
    planner = replace(loss.planner, has_labels=False)
    return teacher, replace(loss, planner=planner, teacher=(own.name, own.number))


def _on_own_ranks(
    tokens: TeacherTokenizer,
    head: RemoteHead | None,
    own: OneOfSeveral,
    chunk_tokens: int | None,
    fit: TeacherFit,
    site: Site,
) -> AlignedLoss:
    """Return the loss of a teacher elsewhere; its head is None where it sends top-k ids."""
    if head is None:
        _, loss = _connected(tokens, None, own, chunk_tokens, fit, site)
    else:
        _, loss = _connected(tokens, head, own, chunk_tokens, fit, site)
    return loss


def _run_together(
    models: Mapping[str, OnlineTeacher | OwnLayout], groups: Groups
) -> frozenset[str]:
    """Return the teachers that data-parallel ranks run together."""
    return frozenset(
        name
        for name, model in models.items()
        if isinstance(model, OwnLayout) or needs_every_replica(model.model, groups)
    )


def _metrics(terms: Sequence[Term | ChunkTerm]) -> tuple[str, ...]:
    """Return the names of the metrics of the first term's target, besides the losses.

    None where a sample may have a teacher with another tokenizer in place of that target.
    """
    plain = [term for term in terms if isinstance(term, Term)]
    is_routed = any(term.teachers is None for term in terms if isinstance(term, ChunkTerm))
    return () if not plain or (is_routed and plain[0].teachers is None) else live_metrics(plain)
