"""Byte-exact alignment of two tokenizations, and the map between two vocabularies."""

from megatron_distill.align.build_map import build_vocabulary_map
from megatron_distill.align.byte_spans import ByteTokenizer, continued_spans, token_spans
from megatron_distill.align.chunks import Chunks, align_spans, chunk_numbers
from megatron_distill.align.coverage import Coverage, SideCoverage, chunks_that_fit, coverage
from megatron_distill.align.map_file import cached_vocabulary_map, load_map, save_map
from megatron_distill.align.messages import RenderedTokens, align_messages, closing_roles
from megatron_distill.align.special_roles import special_roles
from megatron_distill.align.vocabulary_map import MapColumns, VocabularyMap

__all__ = [
    "ByteTokenizer",
    "Chunks",
    "Coverage",
    "MapColumns",
    "RenderedTokens",
    "SideCoverage",
    "VocabularyMap",
    "align_messages",
    "align_spans",
    "build_vocabulary_map",
    "cached_vocabulary_map",
    "chunk_numbers",
    "chunks_that_fit",
    "closing_roles",
    "continued_spans",
    "coverage",
    "load_map",
    "save_map",
    "special_roles",
    "token_spans",
]
