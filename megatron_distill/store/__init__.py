"""Stores: a teacher's outputs on disk, written by any number of processes, read by sample id."""

from megatron_distill.store.binary import cut_to_rows, pack, unpack
from megatron_distill.store.documents import DocumentIndex
from megatron_distill.store.drawn_entries import DrawnEntries, draw_ids, sampled_signal
from megatron_distill.store.manifest import Manifest, ShardProof, Totals
from megatron_distill.store.maxtext import convert_maxtext
from megatron_distill.store.plan import (
    KINDS,
    UNKNOWN,
    CaptureSettings,
    Identity,
    Plan,
    Support,
    tokenizer_folder,
)
from megatron_distill.store.reader import StoreReader, StoreSet, find_stores
from megatron_distill.store.records import (
    Entries,
    PositionScalars,
    SampleRecord,
    SampleTokens,
    SelectionPlace,
    StudentTokens,
    cut_to_k,
)
from megatron_distill.store.topk_entries import TopKEntries, cut_to_mass, top_k_signal
from megatron_distill.store.verify import (
    CodecError,
    StoreDefect,
    VerificationReport,
    measure_codec,
    repair,
    verify,
)
from megatron_distill.store.writer import ShardWriter, StoreWriter

__all__ = [
    "KINDS",
    "UNKNOWN",
    "CaptureSettings",
    "CodecError",
    "DocumentIndex",
    "DrawnEntries",
    "Entries",
    "Identity",
    "Manifest",
    "Plan",
    "PositionScalars",
    "SampleRecord",
    "SampleTokens",
    "SelectionPlace",
    "ShardProof",
    "ShardWriter",
    "StoreDefect",
    "StoreReader",
    "StoreSet",
    "StoreWriter",
    "StudentTokens",
    "Support",
    "TopKEntries",
    "Totals",
    "VerificationReport",
    "convert_maxtext",
    "cut_to_k",
    "cut_to_mass",
    "cut_to_rows",
    "draw_ids",
    "find_stores",
    "measure_codec",
    "pack",
    "repair",
    "sampled_signal",
    "tokenizer_folder",
    "top_k_signal",
    "unpack",
    "verify",
]
