"""A teacher's words on disk: written once by any number of processes, read by sample id."""

from megatron_distill.signals.store.codec_error import CodecError, measure_codec
from megatron_distill.signals.store.layout import pack, unpack
from megatron_distill.signals.store.manifest import Manifest, ShardProof
from megatron_distill.signals.store.maxtext import convert_maxtext
from megatron_distill.signals.store.plan import (
    UNKNOWN,
    CaptureSettings,
    Identity,
    Plan,
    Support,
    tokenizer_folder,
)
from megatron_distill.signals.store.reader import StoreReader
from megatron_distill.signals.store.record_signals import sampled_signal, top_k_signal
from megatron_distill.signals.store.records import (
    DrawnEntries,
    PositionScalars,
    SampleRecord,
    SampleTokens,
    TopKEntries,
    cut_to_k,
    cut_to_mass,
)
from megatron_distill.signals.store.sampling import draw_ids
from megatron_distill.signals.store.store_set import StoreSet, find_stores
from megatron_distill.signals.store.totals import Totals
from megatron_distill.signals.store.verification import (
    Problem,
    VerificationReport,
    repair,
    verify,
)
from megatron_distill.signals.store.writer import ShardWriter, StoreWriter

__all__ = [
    "UNKNOWN",
    "CaptureSettings",
    "CodecError",
    "DrawnEntries",
    "Identity",
    "Manifest",
    "Plan",
    "PositionScalars",
    "Problem",
    "SampleRecord",
    "SampleTokens",
    "ShardProof",
    "ShardWriter",
    "StoreReader",
    "StoreSet",
    "StoreWriter",
    "Support",
    "TopKEntries",
    "Totals",
    "VerificationReport",
    "convert_maxtext",
    "cut_to_k",
    "cut_to_mass",
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
