"""Byte-exact alignment of two tokenizations, and the map between two vocabularies."""

from megatron_distill.align.byte_spans import ByteTokenizer, token_spans
from megatron_distill.align.chunks import Chunks, align_spans, chunk_numbers
from megatron_distill.align.coverage import Coverage, SideCoverage, chunks_that_fit, coverage
from megatron_distill.align.messages import RenderedTokens, align_messages, closing_roles

__all__ = [
    "ByteTokenizer",
    "Chunks",
    "Coverage",
    "RenderedTokens",
    "SideCoverage",
    "align_messages",
    "align_spans",
    "chunk_numbers",
    "chunks_that_fit",
    "closing_roles",
    "coverage",
    "token_spans",
]
