"""From a configuration to several teachers, their loss, and the routing of samples to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_distill.config import RunConfig, own_tokenizers, routed_terms
from megatron_distill.data.routing import Routing
from megatron_distill.losses import ChunkTerm, Term
from megatron_distill.models.gpt import vocab_shard
from megatron_distill.signals import Teacher
from megatron_distill.train.aligned_loss import AlignedLoss
from megatron_distill.train.assemble.alignment import TeacherTokens
from megatron_distill.train.assemble.models import resolve_model, teacher_fp8, teacher_seed
from megatron_distill.train.assemble.site import Site
from megatron_distill.train.assemble.teacher_fit import TeacherFit
from megatron_distill.train.several_loss import SeveralLoss
from megatron_distill.train.teachers.live import OnlineTeacher, live_metrics
from megatron_distill.train.teachers.resting import RestingTeacher
from megatron_distill.train.teachers.several import SeveralTeachers

__all__ = ["OpenTeachers", "open_several", "sample_routing", "several_metrics"]


@dataclass(frozen=True)
class OpenTeachers:
    """The teachers of a run with several: their models by role, their signals and their loss."""

    models: Mapping[str, OnlineTeacher]
    teacher: SeveralTeachers
    loss: SeveralLoss
    aligned: AlignedLoss | None = None  # of the one with a tokenizer of its own


def open_several(config: RunConfig, fit: TeacherFit, site: Site) -> OpenTeachers:
    """Build the teachers of `teachers` one after the other.

    Raises ConfigError or CheckpointError on all ranks.

    Collective: those of `OnlineTeacher.of_source`, per teacher.
    """
    assert config.teachers is not None, "the caller has looked"
    groups, execution = site.groups, site.execution
    plain = [term for term in fit.terms if isinstance(term, Term)]
    own, aligned = fit.own, None
    foreign = frozenset(own_tokenizers(config))
    models: dict[str, OnlineTeacher] = {}
    teachers: dict[str, Teacher] = {}
    for number, (name, section) in enumerate(sorted(config.teachers.items())):
        key = f"teachers.{name}"
        vocabulary = own.vocabulary if own is not None and name in foreign else fit.vocabulary
        source = resolve_model(config, key, vocabulary)
        # The head's rows are those of the student's vocabulary, unless the teacher has another one.
        of_head = source.architecture if name in foreign else fit.student
        models[name] = OnlineTeacher.of_source(
            source,
            replace(execution, fp8=teacher_fp8(section, key), layers_per_stage=None),
            seed=teacher_seed(config.seed) + number,
            sequence_length=section.sequence_length or config.data.sequence_length,
            shard=vocab_shard(of_head, groups, tokens=vocabulary.size),
            groups=groups,
            offload_hidden=section.offload_hidden,
        )
        if own is not None and name in foreign:
            chunk_tokens = config.objective.chunk_tokens
            models[name], found = _connected(own, models[name], chunk_tokens, fit, site)
            aligned = replace(found, teacher=(name, number))
        teachers[name] = models[name]
        if section.offload:
            teachers[name] = RestingTeacher.of(models[name], key=f"{key}.offload")
    named = {name for term in fit.terms if term.teachers for name in term.teachers.names}
    several = SeveralTeachers(
        teachers,
        named=frozenset(named),
        has_routed_terms=bool(routed_terms(config)),
        is_joint=groups.layout.expert > 1,
        own_tokens=foreign,
    )
    by_role = {f"teachers.{name}": model for name, model in models.items()}
    loss = SeveralLoss.of(plain, tuple(models), groups.context, elsewhere=foreign)
    return OpenTeachers(by_role, several, loss, aligned)


def _connected(
    own: TeacherTokens, online: OnlineTeacher, chunk_tokens: int | None, fit: TeacherFit, site: Site
) -> tuple[OnlineTeacher, AlignedLoss]:
    """Return a teacher with its head in the layout of the loss, and the loss without labels."""
    device = site.execution.device
    teacher, loss = own.connect(
        online, fit.student, fit.vocabulary, site.groups, device, chunk_tokens=chunk_tokens
    )
    assert isinstance(teacher, OnlineTeacher)
    # The cross-entropy is in the pass of the other terms.
    return teacher, replace(loss, planner=replace(loss.planner, has_labels=False))


def several_metrics(terms: Sequence[Term | ChunkTerm]) -> tuple[str, ...]:
    """Return the names of the metrics of the first term's target, besides the losses.

    None where a sample may have a teacher with another tokenizer in place of that target.
    """
    plain = [term for term in terms if isinstance(term, Term)]
    is_routed = any(term.teachers is None for term in terms if isinstance(term, ChunkTerm))
    return () if not plain or (is_routed and plain[0].teachers is None) else live_metrics(plain)


def sample_routing(config: RunConfig) -> Routing | None:
    """Return the routing of samples to teachers; None where every term names its teachers."""
    if not routed_terms(config):
        return None
    names = tuple(sorted(config.teachers or ()))  # their order in the file changes nothing
    shares = config.objective.routing_weights
    weights = None if shares is None else tuple(shares.get(name, 0.0) for name in names)
    return Routing(names, weights, config.seed)
