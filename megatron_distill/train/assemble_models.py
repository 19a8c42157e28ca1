"""From a configuration to models: architectures, initial weights, student, teacher."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_distill.config import (
    PARAMETERS,
    ArchitectureConfig,
    ModelConfig,
    RunConfig,
    check_architecture,
)
from megatron_distill.errors import ConfigError
from megatron_distill.losses import Term
from megatron_distill.models.architecture import Architecture, Execution
from megatron_distill.models.gpt import HiddenStateGPT, build_gpt, vocab_shard
from megatron_distill.models.head import align_head
from megatron_distill.ops import LogitRule
from megatron_distill.runtime.collectives import together
from megatron_distill.runtime.groups import Groups
from megatron_distill.train.assemble_data import Vocabulary
from megatron_distill.train.checkpoint import Description, load_state, resolve_checkpoint
from megatron_distill.train.objective import TokenObjective
from megatron_distill.train.run_state import (
    check_same_model,
    load_chunks,
    saved_architecture,
    sharded_model,
)
from megatron_distill.train.teacher import OnlineTeacher

_TEACHER_SEED_OFFSET = 1


def resolve_architecture(
    model: ModelConfig, role: str, config: RunConfig, vocabulary: Vocabulary
) -> Architecture:
    """Return the architecture that a section describes, or that its checkpoint was saved with.

    Raises ConfigError or CheckpointError on all ranks: no architecture, a vocabulary smaller than
    the tokenizer's, or a shape that this layout cannot hold.
    """
    with together():
        architecture = (
            _described(model.architecture, config, vocabulary)
            if model.architecture is not None
            else _saved(model, role)
        )
        if architecture.vocab_size < vocabulary.size:
            raise ConfigError(
                f"{role}.architecture.vocab_size is {architecture.vocab_size}, but the tokenizer "
                f"has {vocabulary.size} tokens; set it to {vocabulary.size} or more"
            )
        problems = check_architecture(
            _as_config(architecture), role, config.parallel, config.data.sequence_length
        )
        if problems:
            raise ConfigError("\n".join(problems))
    return architecture


def _saved(model: ModelConfig, role: str) -> Architecture:
    if model.checkpoint is None:
        raise ConfigError(
            f"{role} has neither an architecture nor a checkpoint; give {role}.architecture or "
            f"{role}.checkpoint"
        )
    folder = resolve_checkpoint(model.checkpoint)
    return saved_architecture(Description.read(folder), folder)


def _described(
    described: ArchitectureConfig, config: RunConfig, vocabulary: Vocabulary
) -> Architecture:
    fields = described.model_dump()
    moe = fields["moe"]
    if moe is not None:
        moe["ffn_hidden_size"] = moe["ffn_hidden_size"] or described.ffn_hidden_size
    heads = described.num_attention_heads
    defaults = {
        "num_kv_heads": heads,
        "head_size": described.hidden_size // heads,
        "vocab_size": vocabulary.size,
        "max_position_embeddings": config.data.sequence_length,
    }
    for name, value in defaults.items():
        if fields[name] is None:
            fields[name] = value
    return Architecture.from_dict(fields)


def _as_config(architecture: Architecture) -> ArchitectureConfig:
    return ArchitectureConfig.model_validate(architecture.as_dict())


def build_student(
    config: RunConfig,
    architecture: Architecture,
    *,
    groups: Groups,
    execution: Execution,
    vocabulary: Vocabulary,
) -> list[HiddenStateGPT]:
    """Build the student's chunks with random weights or those of `student.checkpoint`."""
    chunks = build_gpt(
        architecture,
        groups=groups,
        execution=execution,
        seed=None if config.student.checkpoint else config.seed,
    )
    if config.student.checkpoint:
        _load_weights(chunks, config.student.checkpoint, architecture, groups, vocabulary)
    return chunks


def build_teacher(
    config: RunConfig,
    *,
    student: Architecture,
    groups: Groups,
    execution: Execution,
    vocabulary: Vocabulary,
) -> OnlineTeacher | None:
    """Build the frozen teacher, or return None when there is none.

    Raises ConfigError on all ranks when the vocabularies differ.
    """
    if config.teacher is None:
        return None
    architecture = resolve_architecture(config.teacher, "teacher", config, vocabulary)
    if architecture.vocab_size != student.vocab_size:
        raise ConfigError(
            f"the teacher's vocabulary has {architecture.vocab_size} tokens and the student's "
            f"{student.vocab_size}; distillation on logits needs one vocabulary: set "
            "student.architecture.vocab_size to the teacher's and use its tokenizer"
        )
    path = config.teacher.checkpoint
    (model,) = build_gpt(
        architecture,
        groups=groups,
        execution=execution,
        seed=None if path else config.seed + _TEACHER_SEED_OFFSET,
        interleaved=False,
    )
    if path:
        _load_weights([model], path, architecture, groups, vocabulary)
    model.requires_grad_(False)
    model.eval()
    return OnlineTeacher(
        model=model,
        architecture=architecture,
        head_weight=_teacher_head(model, architecture, student, groups),
        groups=groups,
        sequence_length=config.data.sequence_length,
    )


def build_objective(
    config: RunConfig, architecture: Architecture, *, groups: Groups
) -> TokenObjective:
    """Translate the configured objective for a student of this architecture.

    Raises ConfigError, on all ranks, for a top-k larger than the vocabulary.
    """
    return TokenObjective(
        ce_weight=config.objective.ce_weight,
        terms=_terms(config, architecture),
        has_teacher=config.teacher is not None,
        chunk_tokens=config.objective.chunk_tokens,
        shard=vocab_shard(architecture, groups),
        logit_rule=LogitRule(architecture.logit_softcap, architecture.logit_scale),
        groups=groups,
    )


def _terms(config: RunConfig, architecture: Architecture) -> tuple[Term, ...]:
    for index, term in enumerate(config.objective.terms):
        if term.top_k is not None and term.top_k > architecture.vocab_size:
            raise ConfigError(
                f"objective.terms.{index}.top_k is {term.top_k}, but the vocabulary has "
                f"{architecture.vocab_size} tokens; lower it, or leave it out to compare all"
            )
    return tuple(
        Term(**term.model_dump(exclude=set(PARAMETERS)), parameters=term.parameters)
        for term in config.objective.terms
    )


def _teacher_head(
    model: HiddenStateGPT, architecture: Architecture, student: Architecture, groups: Groups
) -> torch.Tensor | None:
    if not groups.is_last_stage:
        return None
    return align_head(
        model.head_weight().detach(),
        own=vocab_shard(architecture, groups),
        wanted=vocab_shard(student, groups),
        group=groups.tensor,
    )


def _load_weights(
    chunks: list[HiddenStateGPT],
    path: str,
    architecture: Architecture,
    groups: Groups,
    vocabulary: Vocabulary,
) -> None:
    """Fill the chunks from a checkpoint of the same architecture and tokenizer, in any layout."""
    with together():
        folder: Path = resolve_checkpoint(path)
        check_same_model(Description.read(folder), architecture, vocabulary.identity, folder)
    load_chunks(chunks, load_state(sharded_model(chunks, groups), folder))
