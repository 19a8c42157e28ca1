"""One record as bytes: a header of 128 bytes and a payload of sections on 8-byte boundaries.

docs/store_format.md has the table. A record proves itself: its header and its payload by checksums,
its tokens by a digest, its store by the uid of the plan.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_distill.signals.store.codecs import (
    CODECS,
    Array,
    ValueCodec,
    decode_ids,
    encode_ids,
    id_planes,
    normalise,
    spread,
)
from megatron_distill.signals.store.header import (
    HAS_SCALARS,
    HAS_TAIL,
    IS_RAGGED,
    MAGIC,
    MODES,
    RECORD_VERSION,
    Header,
    Sections,
    require_record,
    token_digest,
)
from megatron_distill.signals.store.plan import CaptureSettings
from megatron_distill.signals.store.records import (
    DrawnEntries,
    Entries,
    Floats,
    PositionScalars,
    SampleRecord,
    SampleTokens,
    TopKEntries,
    cut_to_k,
    kept_mask,
)

__all__ = ["decode", "decode_tokens", "pack", "unpack"]

FLAG_BITS: Final = 2


def pack(record: SampleRecord, settings: CaptureSettings, capture_uid: bytes) -> bytes:
    """A record as bytes, the same for the same record.

    Raises:
        StoreError: what the record holds is not what the settings say, or cannot be stored.
    """
    codec = CODECS[settings.codec]
    starts = np.flatnonzero(np.diff(record.document_ids_S1, prepend=-2))
    sections: list[Array] = [
        starts.astype("<u4"),
        record.document_ids_S1[starts].astype("<i4"),
        record.tokens_S1.astype("<i4"),
        *_flag_planes(record.flags_S1),
    ]
    entries = record.entries
    if isinstance(entries, TopKEntries):
        flags, count, body = _top_k_sections(entries, settings, codec)
    else:
        flags, count, body = _drawn_sections(entries, settings)
    scalars: list[Array] = []
    if record.scalars is not None:
        flags |= HAS_SCALARS
        scalars = [
            record.scalars.log_sum_exp_S.astype("<f4"),
            record.scalars.entropy_S.astype(codec.scalar),
            _scalar(record.scalars.label_log_prob_S, codec),
        ]
    payload = b"".join(_aligned(section) for section in (*sections, *scalars, *body))
    header = Header(
        magic=MAGIC,
        version=RECORD_VERSION,
        mode=MODES.index(settings.mode),
        codec=codec.number,
        planes=id_planes(settings.vocab_size),
        temperatures=len(settings.temperatures),
        flags=flags,
        positions=len(record.tokens_S1) - 1,
        vocab_size=settings.vocab_size,
        k=settings.k,
        runs=len(starts),
        sample_id=record.sample_id,
        entries=count,
        digest=token_digest(record.tokens_S1),
        uid=capture_uid,
        payload_bytes=len(payload),
        payload_crc=zlib.crc32(payload),
    )
    return header.content + payload


def _flag_planes(flags_S1: NDArray[np.uint8]) -> list[Array]:
    return [np.packbits(flags_S1 >> bit & 1, bitorder="little") for bit in range(FLAG_BITS)]


def _aligned(section: Array) -> bytes:
    content = np.ascontiguousarray(section).tobytes()
    return content + bytes(-len(content) % 8)


def _count_dtype(k: int) -> str:
    return "<u1" if k < 1 << 8 else "<u2" if k < 1 << 16 else "<u4"


def _top_k_sections(
    entries: TopKEntries, settings: CaptureSettings, codec: ValueCodec
) -> tuple[int, int, list[Array]]:
    flags, sections, mask = 0, [], None
    if entries.n_kept_S is not None:
        flags |= IS_RAGGED
        mask = kept_mask(entries.n_kept_S, settings.k)
        sections.append(entries.n_kept_S.astype(_count_dtype(settings.k)))
    if entries.log_tail_S is not None:
        flags |= HAS_TAIL
        sections.append(_scalar(entries.log_tail_S, codec))
    if entries.log_sum_exp_TS is not None and entries.log_tail_TS is not None:
        sections += [
            np.asarray(entries.temperatures, "<f8"),
            entries.log_sum_exp_TS.astype("<f4"),
            _scalar(entries.log_tail_TS, codec),
        ]
    ids = entries.ids_SK.reshape(-1) if mask is None else entries.ids_SK[mask]
    sections += codec.encode(entries.log_probs_SK, mask)
    sections += encode_ids(ids, id_planes(settings.vocab_size))
    return flags, ids.size, sections


def _scalar(values: Floats, codec: ValueCodec) -> Array:
    """Logs of masses in the codec's precision; a mass too small for it stays above nothing."""
    lowest = np.finfo(codec.scalar).min
    return np.where(np.isneginf(values), values, np.maximum(values, lowest)).astype(codec.scalar)


def _drawn_sections(
    entries: DrawnEntries, settings: CaptureSettings
) -> tuple[int, int, list[Array]]:
    drawn = entries.counts_SM > 0
    ids, counts = entries.ids_SM[drawn], entries.counts_SM[drawn]
    dtype = _count_dtype(settings.k)
    sections = [drawn.sum(1).astype(dtype), counts.astype(dtype)]
    return IS_RAGGED, ids.size, [*sections, *encode_ids(ids, id_planes(settings.vocab_size))]


def unpack(packed: bytes, k: int | None = None, *, is_checked: bool = False) -> SampleRecord:
    """The record that `pack` made, with the first k ids of each position.

    Needs nothing but the bytes, so that one rank can read and others decode. Bytes that a reader
    has checked already need not be checked again.

    Raises:
        StoreError: the bytes are damaged.
    """
    return decode(packed, Header.of(packed) if is_checked else require_record(packed), k)


def decode(packed: bytes, header: Header, k: int | None = None) -> SampleRecord:
    """The record whose header was found intact, with the first k ids of each position.

    A lossy codec's probabilities are made to sum to one with their tail, at every temperature.
    """
    sections, positions = Sections(packed), header.positions
    tokens = _tokens(sections, header)
    scalar, scalars = header.value_codec.scalar, None
    if header.flags & HAS_SCALARS:
        scalars = PositionScalars(
            *(
                sections.take(dtype, positions).astype(np.float32)
                for dtype in ("<f4", scalar, scalar)
            )
        )
    is_drawn = MODES[header.mode] == "sampled"
    record = SampleRecord(
        sample_id=header.sample_id,
        tokens_S1=tokens.tokens_S1,
        document_ids_S1=tokens.document_ids_S1,
        flags_S1=tokens.flags_S1,
        entries=_drawn(sections, header) if is_drawn else _top_k(sections, header, scalars),
        scalars=scalars,
    )
    return record if k is None or is_drawn else cut_to_k(record, k)


def decode_tokens(packed: bytes, header: Header) -> SampleTokens:
    """The tokens alone of the record whose header was found intact."""
    return _tokens(Sections(packed), header)


def _tokens(sections: Sections, header: Header) -> SampleTokens:
    positions = header.positions
    starts = sections.take("<u4", header.runs).astype(np.int64)
    documents = sections.take("<i4", header.runs).astype(np.int32)
    lengths = np.diff(starts, append=positions + 1)
    tokens = sections.take("<i4", positions + 1).astype(np.int32)
    planes = [
        np.unpackbits(sections.take("u1", -(-(positions + 1) // 8)), bitorder="little")
        for _ in range(FLAG_BITS)
    ]
    flags = sum(plane[: positions + 1] << bit for bit, plane in enumerate(planes))
    return SampleTokens(tokens, np.repeat(documents, lengths), np.asarray(flags, np.uint8))


def _drawn(sections: Sections, header: Header) -> Entries:
    dtype = _count_dtype(header.k)
    n_kept = sections.take(dtype, header.positions).astype(np.int32)
    counts = sections.take(dtype, header.entries).astype(np.int32)
    ids = decode_ids(sections.take, header.entries, header.planes)
    mask = kept_mask(n_kept, header.k)
    shape = (header.positions, header.k)
    return DrawnEntries(spread(ids, shape, mask), spread(counts, shape, mask))


def _top_k(sections: Sections, header: Header, scalars: PositionScalars | None) -> Entries:
    positions, codec = header.positions, header.value_codec
    shape, mask, n_kept, tail = (positions, header.k), None, None, None
    if header.is_ragged:
        n_kept = sections.take(_count_dtype(header.k), positions).astype(np.int32)
        mask = kept_mask(n_kept, header.k)
    if header.flags & HAS_TAIL:
        tail = sections.take(codec.scalar, positions).astype(np.float32)
    temperatures: Sequence[float] = ()
    sums_TS = tails_TS = None
    if header.temperatures:
        cells = header.temperatures * positions
        temperatures = sections.take("<f8", header.temperatures).tolist()
        sums_TS = sections.take("<f4", cells).astype(np.float32).reshape(-1, positions)
        tails_TS = sections.take(codec.scalar, cells).astype(np.float32).reshape(-1, positions)
    values = codec.decode(sections.take, shape, mask, header.entries)
    if mask is not None:
        values[~mask] = -np.inf
    if not codec.is_exact:
        shift = normalise(values, tail)
        values -= shift[:, None]
        tail = None if tail is None else tail - shift
        if scalars is not None and sums_TS is not None and tails_TS is not None:
            logits = values + scalars.log_sum_exp_S[:, None]
            for row, temperature in enumerate(temperatures):
                at_temperature = logits / np.float32(temperature) - sums_TS[row][:, None]
                shift = normalise(at_temperature, tails_TS[row])
                sums_TS[row] += shift
                tails_TS[row] -= shift
    ids = spread(decode_ids(sections.take, header.entries, header.planes), shape, mask)
    return TopKEntries(ids, values, tail, n_kept, tuple(temperatures), sums_TS, tails_TS)
