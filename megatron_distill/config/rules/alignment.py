"""Rules on terms between two tokenizers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, get_args

from megatron_distill.config.messages import Problem, shown, without_effect
from megatron_distill.config.rules.teacher_parallel import (
    parallel_key,
    teacher_parallel,
    under_key,
)
from megatron_distill.config.rules.teacher_tokenizers import aligned_role, own_tokenizers
from megatron_distill.config.schema import (
    CaptureConfig,
    JobConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TermConfig,
)
from megatron_distill.config.schema.data import TokenizedFormat

__all__ = [
    "alignment_problems",
    "has_own_tokenizer",
    "is_aligned",
    "two_tokenizers_problems",
]

# The divergence that orders tokens by their probability.
_ORDERED: Final = "adaptive_kl"
# Keys of a term that only some alignments use, with their defaults.
_USERS: Final[dict[str, tuple[tuple[str, ...], object]]] = {
    "partition": (("gold",), "strict"),
    "uncommon_top_k": (("gold", "uld"), 256),
    "published": (("projection",), False),
}
_NOT_USED: Final[dict[str, tuple[tuple[str, ...], object]]] = {
    "divergence": (("uld",), "forward_kl"),
    "top_k": (("likelihood", "gold", "uld"), None),
    "support": (("likelihood", "projection", "gold", "uld"), "tail"),
}
# Alignments that a store serves: from labels' log-probabilities, and from a top-k.
_STORED: Final = ("likelihood", "common")


def is_aligned(config: JobConfig) -> bool:
    """Whether the job has a teacher with a tokenizer of its own: a term, or `capture.aligned`."""
    if isinstance(config, CaptureConfig):
        return config.capture.aligned
    assert isinstance(config, RunConfig)
    return any(term.alignment is not None for term in config.objective.terms)


def has_own_tokenizer(config: JobConfig, role: str) -> bool:
    """Whether a teacher is the one with a tokenizer of its own."""
    return is_aligned(config) and role == aligned_role(config)


def alignment_problems(config: RunConfig) -> Iterator[Problem]:
    """Find contradictions of terms with `alignment`, and settings that only these use."""
    for index, term in enumerate(config.objective.terms):
        yield from _term(f"objective.terms.{index}", term)
    teacher = config.teacher
    if not is_aligned(config):
        yield from _without(config, teacher)
        return
    for index, term in enumerate(config.objective.terms):
        if term.alignment is None and not config.teachers:
            key = f"objective.terms.{index}.alignment"
            yield Problem(
                (key,),
                f"{key} = null next to terms with an alignment: a teacher has one tokenizer; give "
                "this term an alignment, or remove it from the others",
            )
    for index, entry in enumerate(config.objective.features):
        if entry.loss == "attention":
            key = f"objective.features.{index}.loss"
            yield Problem(
                (key, "objective.terms"),
                f"{key} = 'attention' compares the weights of the same keys, and terms with an "
                "alignment have a teacher with other tokens; use 'mse' or 'cosine', which compare "
                "states at the ends of chunks",
            )
    role = aligned_role(config)
    section = config.models.get(role)
    if section is not None and section.store is not None:
        yield from _stored(config, role)
    if not config.teachers or len(own_tokenizers(config)) == 1:
        yield from two_tokenizers_problems(config, "objective.terms")


def two_tokenizers_problems(config: JobConfig, cause: str) -> Iterator[Problem]:
    """Find settings that do not fit a teacher with a tokenizer of its own, asked for by `cause`."""
    yield from _sources(config, cause)
    role = aligned_role(config)
    yield from _lengths(config, config.models.get(role), role)


def _stored(config: RunConfig, role: str) -> Iterator[Problem]:
    """Terms that the records of a store cannot serve."""
    for index, term in enumerate(config.objective.terms):
        path = f"objective.terms.{index}"
        if term.alignment is not None and term.alignment not in _STORED:
            yield Problem(
                (f"{path}.alignment", f"{role}.store"),
                f"{path}.alignment = {term.alignment!r}: needs whole distributions, and "
                f"{role}.store has a part. Use 'likelihood' or 'common' with top_k, or set "
                f"{role}.hf or {role}.checkpoint in place of the store",
            )
        if term.alignment == "common" and term.top_k is None:
            yield Problem(
                (f"{path}.top_k", f"{role}.store"),
                f"{path}.top_k = null: compares all common tokens, and {role}.store has a part. "
                f"Set top_k to at most store.k, or set {role}.hf or {role}.checkpoint in place of "
                "the store",
            )
    size = config.data.tokenizer.train_vocab_size
    if not config.data.sources and size is not None:
        yield Problem(
            ("data.tokenizer.train_vocab_size", "data.sources"),
            f"data.tokenizer.train_vocab_size = {size}: there are no data.sources to train it on; "
            "set data.tokenizer.path to the student's tokenizer of the capture",
        )


def _term(path: str, term: TermConfig) -> Iterator[Problem]:
    for name, (users, default) in _USERS.items():
        value = getattr(term, name)
        if term.alignment not in users and value != default:
            reason = f"with {path}.alignment = {shown(term.alignment)}"
            yield without_effect(f"{path}.{name}", value, reason, instead=default)
    if term.alignment is None:
        return
    for name, (others, default) in _NOT_USED.items():
        value = getattr(term, name)
        if term.alignment in others and value != default:
            reason = f"with {path}.alignment = {term.alignment!r}"
            yield without_effect(f"{path}.{name}", value, reason, instead=default)
    if term.divergence == _ORDERED and term.alignment not in ("common", "uld"):
        yield Problem(
            (f"{path}.divergence", f"{path}.alignment"),
            f"{path}.divergence = {term.divergence!r} divides one vocabulary into head and tail; "
            f"it is not defined with {path}.alignment = {term.alignment!r}; use another divergence",
        )
    if (
        term.temperature != 1
        and term.alignment == "likelihood"
        and term.scale_by_temperature_squared
    ):
        reason = f"with {path}.alignment = 'likelihood', whose temperature is of chunks"
        yield without_effect(
            f"{path}.scale_by_temperature_squared", value=True, reason=reason, instead=False
        )


def _without(config: RunConfig, teacher: ModelConfig | None) -> Iterator[Problem]:
    reason = "without a term that has an alignment"
    if teacher is not None and teacher.tokenizer is not None:
        yield Problem(
            ("teacher.tokenizer", "objective.terms"),
            "teacher.tokenizer is set, but no term of the objective has an alignment; set "
            "objective.terms.0.alignment (docs/cross_tokenizer.md), or remove teacher.tokenizer",
        )
    if teacher is not None and teacher.sequence_length is not None:
        value = teacher.sequence_length
        yield without_effect("teacher.sequence_length", value, reason, instead=None)
    # Without a teacher, as a command on a trained student has it, the data's settings may stay.
    for name in () if teacher is None else ("max_unaligned", "document_cache_gib"):
        value, default = getattr(config.data, name), type(config.data).model_fields[name].default
        if value != default:
            yield without_effect(f"data.{name}", value, reason, instead=default)


def _sources(config: JobConfig, cause: str) -> Iterator[Problem]:
    data = config.data
    for name in ("sources", "validation_sources"):
        for index, source in enumerate(getattr(data, name)):
            key = f"data.{name}.{index}"
            if source.format in get_args(TokenizedFormat):
                yield Problem(
                    (f"{key}.format", cause),
                    f"{key}.format = {source.format!r}: its tokens are of one tokenizer, and terms "
                    "with an alignment need texts; use a source of text",
                )
    if not data.isolate_documents:
        yield Problem(
            ("data.isolate_documents", cause),
            "data.isolate_documents = false: a chunk's tokens must not be predicted from another "
            "document; set it to true for terms with an alignment",
        )


def _lengths(config: JobConfig, teacher: ModelConfig | None, role: str) -> Iterator[Problem]:
    length = None if teacher is None else teacher.sequence_length
    if length is None:
        return
    yield from _length(config.parallel, length, role)
    key = parallel_key(config, role)
    if key != "parallel":
        yield from under_key(_length(teacher_parallel(config, role), length, role), key)


def _length(parallel: ParallelConfig, length: int, role: str) -> Iterator[Problem]:
    factor = parallel.context * 2 if parallel.context > 1 else 1
    if parallel.sequence:
        factor = math.lcm(factor, parallel.tensor * parallel.context)
    if length % factor:
        yield Problem(
            (f"{role}.sequence_length", "parallel.context", "parallel.sequence"),
            f"{role}.sequence_length = {length}: with parallel.context = {parallel.context} and "
            f"parallel.tensor = {parallel.tensor} it must be a multiple of {factor}",
        )
