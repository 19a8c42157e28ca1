"""From a model and its tasks to what evaluates it: a scorer, and a writer of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_distill.config import EvaluationConfig
from megatron_distill.data.tokenizers.open import Tokenizer, Vocabulary
from megatron_distill.evaluation.tasks.prepared import PreparedTask
from megatron_distill.log import get_logger
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.generation.memory import CACHE_GIB
from megatron_distill.models.generation.model import CachedGPT
from megatron_distill.models.gpt import HiddenStateGPT, vocab_shard
from megatron_distill.models.sharded_weights import has_sharded_weights
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.termination import is_requested
from megatron_distill.train.assemble.tasks import longest_input
from megatron_distill.train.evaluation.pass_scoring import PassScorer
from megatron_distill.train.evaluation.phase import EvaluatedModel
from megatron_distill.train.evaluation.scoring import ModelScorer, ModelWriter

__all__ = ["evaluated_model", "shared_tokenizer", "without_texts"]

_LOGGER = get_logger(__name__)

_ROWS = 256  # prompts of one call, per data and context rank


def without_texts(
    role: str, tasks: tuple[PreparedTask, ...], *, is_sharded: bool
) -> tuple[PreparedTask, ...]:
    """Return the tasks that a model can do; without those of generated text if it is sharded."""
    texts = [task.task.name for task in tasks if task.task.kind == "generation"]
    if not texts or not is_sharded:
        return tasks
    _LOGGER.info(
        "%s: no results of %s: a model with sharded weights generates no text; set "
        "%s.shard_weights=false to evaluate it",
        *(role, ", ".join(texts), role),
    )
    return tuple(task for task in tasks if task.task.kind != "generation")


def evaluated_model(
    role: str,
    chunks: Sequence[HiddenStateGPT],
    shape: Architecture,
    tasks: Sequence[PreparedTask],
    *,
    section: EvaluationConfig,
    cache_gib: float | None,
    groups: Groups,
    device: torch.device,
    tokenizer: Tokenizer | None,
    vocabulary: Vocabulary,
    in_use: Callable[[], AbstractContextManager[object]] = nullcontext,
    writes: bool = False,
    stop_requested: Callable[[], bool] | None = None,
) -> EvaluatedModel:
    """Return the model of these chunks with its scorer, and its writer if a task needs one.

    vocabulary: of its tokenizer. cache_gib: None: that in training. writes: it writes text without
    a task. stop_requested: whether this rank is to stop; None: whether it had a signal.

    Collective: with a writer that of `shared_tokenizer`, as stop strings need it everywhere.
    """
    asked = stop_requested or is_requested
    settings = (longest_input(shape, section), section.batch_tokens, asked)
    if has_sharded_weights(chunks[0]):
        shard = vocab_shard(shape, groups, tokens=vocabulary.size)
        scorer = PassScorer(chunks[0], shape, shard, groups, device, *settings)
        return EvaluatedModel(
            role, scorer, tasks, in_use, tokenizer=vocabulary.identity, stop_requested=asked
        )
    cached = CachedGPT(
        chunks,
        shape,
        groups,
        device,
        vocab_size=vocabulary.size,
        cache_gib=CACHE_GIB if cache_gib is None else cache_gib,
    )
    writer: ModelWriter | None = None
    if writes or any(task.task.kind == "generation" for task in tasks):
        decoding = replace(cached, decode=shared_tokenizer(tokenizer).decode)
        rows = _ROWS * groups.data_context.size()
        writer = ModelWriter(decoding, rows, section.batch_tokens, stop_requested=asked)
    own = ModelScorer(cached, *settings)
    return EvaluatedModel(
        role, own, tasks, in_use, writer, tokenizer=vocabulary.identity, stop_requested=asked
    )


def shared_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the first rank's tokenizer on every rank.

    Collective: world, one broadcast of the tokenizer.
    """
    shared = [tokenizer]
    dist.broadcast_object_list(shared, src=0)
    assert shared[0] is not None, "the first rank has it"
    return shared[0]
