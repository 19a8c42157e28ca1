"""Vocabulary-parallel mathematics on tensors and process groups."""

from megatron_distill.ops.log_softmax import vocab_parallel_log_softmax
from megatron_distill.ops.topk import vocab_parallel_gather, vocab_parallel_topk
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.signals import LogitRule

__all__ = [
    "LogitRule",
    "VocabShard",
    "vocab_parallel_gather",
    "vocab_parallel_log_softmax",
    "vocab_parallel_topk",
]
