"""The bytes are those that docs/internals/store_format.md describes, read here number by number."""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_distill.store import SampleRecord, cut_to_mass, pack, unpack
from tests.support.store_samples import made_up, settings, student_tokens

DOCUMENT = Path(__file__).parents[3] / "docs" / "internals" / "store_format.md"
UID = b"12345678"
FORMATS = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i32": "i", "f16": "e", "f32": "f"}


class Plain:
    """Reads a record by the documented layout, without the package's layout."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.place = 128

    def at(self, offset: int, kind: str) -> int:
        return struct.unpack_from("<" + FORMATS[kind], self.content, offset)[0]

    def take(self, kind: str, count: int) -> list:
        size = struct.calcsize("<" + FORMATS[kind] * count)
        found = struct.unpack_from("<" + FORMATS[kind] * count, self.content, self.place)
        self.place += -(-size // 8) * 8
        return list(found)

    def bits(self, count: int) -> list[int]:
        octets = self.take("u8", -(-count // 8))
        return [octets[i // 8] >> i % 8 & 1 for i in range(count)]


def header_of_the_document() -> list[tuple[int, int, str]]:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\w*) \| ", DOCUMENT.read_text(), re.M)
    return [(int(offset), int(size), kind) for offset, size, kind in rows]


def test_the_header_of_the_document_is_without_gaps() -> None:
    rows = header_of_the_document()
    assert len(rows) == 21
    ends = [offset + size for offset, size, _ in rows]
    assert [offset for offset, _, _ in rows] == [0, *ends[:-1]]
    assert ends[-1] == 128
    for _, size, kind in rows:
        assert kind not in FORMATS or struct.calcsize("<" + FORMATS[kind]) == size


def read_top_k(packed: bytes, codec: str) -> dict[str, object]:
    """Everything of a record with two planes and no further temperatures."""
    plain = Plain(packed)
    positions, k, entries = plain.at(16, "u32"), plain.at(24, "u32"), plain.at(40, "u64")
    runs, flags, half = plain.at(28, "u32"), plain.at(14, "u16"), "f32" if codec == "f32" else "f16"
    starts, numbers = plain.take("u32", runs), plain.take("i32", runs)
    tokens = plain.take("i32", positions + 1)
    planes = [plain.bits(positions + 1), plain.bits(positions + 1)]
    scalars = [plain.take(kind, positions) for kind in ("f32", half, half)]
    n_kept = plain.take("u8", positions) if flags & 1 else [k] * positions
    tail = plain.take(half, positions)
    if codec == "u8":
        top, span = plain.take("f16", positions), plain.take("f16", positions)
        codes = iter(plain.take("u8", entries))
        values = [
            [t - s * next(codes) / 255 for _ in range(n)]
            for t, s, n in zip(top, span, n_kept, strict=True)
        ]
    else:
        flat = iter(plain.take(half, entries))
        values = [[next(flat) for _ in range(n)] for n in n_kept]
    low = plain.take("u16", entries)
    high = [plain.bits(entries) for _ in range(plain.at(12, "u8"))]
    ids = [lo + sum(plane[i] << 16 + p for p, plane in enumerate(high)) for i, lo in enumerate(low)]
    assert plain.place == len(packed)
    documents = np.repeat(numbers, np.diff([*starts, positions + 1])).tolist()
    flags_S1 = [ce + 2 * kd for ce, kd in zip(*planes, strict=True)]
    return {
        "tokens": tokens, "documents": documents, "flags": flags_S1, "scalars": scalars,
        "n_kept": n_kept, "tail": tail, "values": values, "ids": ids,
    }  # fmt: skip


@pytest.mark.parametrize("codec", ["f32", "f16", "u8"])
@pytest.mark.parametrize("top_p", [None, 0.8])
def test_a_record_reads_as_documented(codec: str, top_p: float | None) -> None:
    wanted = settings(codec=codec, top_p=top_p, k=9, sequence_length=21)
    record = made_up(77, wanted) if top_p is None else cut_to_mass(made_up(77, wanted), top_p)
    packed = pack(record, wanted, UID)
    require_header(packed, record, codec, ragged=top_p is not None)
    found, top_k = read_top_k(packed, codec), unpack(packed).entries
    assert found["tokens"] == record.tokens_S1.tolist()
    assert found["documents"] == record.document_ids_S1.tolist()
    assert found["flags"] == record.flags_S1.tolist()
    kept = np.isfinite(record.entries.log_probs_SK)
    assert found["n_kept"] == kept.sum(1).tolist()
    assert found["ids"] == record.entries.ids_SK[kept].tolist()
    assert found["scalars"][0] == record.scalars.log_sum_exp_S.tolist()
    for row, (values, tail) in enumerate(zip(found["values"], found["tail"], strict=True)):
        everything = np.array([*values, tail])
        if codec != "f32":
            everything -= np.logaddexp.reduce(everything)
        decoded = [*top_k.log_probs_SK[row][kept[row]].tolist(), top_k.log_tail_S[row]]
        np.testing.assert_allclose(decoded, everything, rtol=1e-5, atol=1e-6)


def require_header(packed: bytes, record: SampleRecord, codec: str, *, ragged: bool) -> None:
    plain = Plain(packed)
    assert packed[:8] == b"TLSTORE1"
    assert [plain.at(8, "u16"), *packed[10:14]] == [1, 0, ["f32", "f16", "u8"].index(codec), 2, 0]
    assert plain.at(14, "u16") == 6 + ragged
    assert [plain.at(place, "u32") for place in (16, 20, 24)] == [21, 131_073, 9]
    assert plain.at(32, "u64") == 77
    digest = hashlib.blake2b(record.tokens_S1.astype("<i4").tobytes(), digest_size=16).digest()
    assert packed[48:64] == digest
    assert packed[64:72] == UID
    assert plain.at(72, "u64") == len(packed) - 128
    assert plain.at(80, "u32") == zlib.crc32(packed[128:])
    assert packed[84:124] == bytes(40)
    assert plain.at(124, "u32") == zlib.crc32(packed[:124])


def test_a_student_s_tokens_read_as_documented() -> None:
    wanted = settings(k=9, sequence_length=21, student_length=30)
    student = student_tokens(77, wanted)
    packed = pack(replace(made_up(77, wanted), student=student), wanted, UID)
    plain = Plain(packed)
    assert [plain.at(8, "u16"), plain.at(84, "u32")] == [2, 30]
    runs, student_runs = plain.at(28, "u32"), plain.at(88, "u32")
    for count, size in ((runs, 22), (student_runs, 31)):
        starts, numbers = plain.take("u32", count), plain.take("i32", count)
        tokens, planes = plain.take("i32", size), [plain.bits(size), plain.bits(size)]
    assert tokens == student.tokens_W1.tolist()
    documents = np.repeat(numbers, np.diff([*starts, 31])).tolist()
    assert documents == student.document_ids_W1.tolist()
    assert [ce + 2 * kd for ce, kd in zip(*planes, strict=True)] == student.flags_W1.tolist()
    for chunks in (student.chunks_W1, student.teacher_chunks_S1):
        inside, first = plain.bits(len(chunks)), plain.bits(len(chunks))
        numbers = (np.cumsum(first) - 1).tolist()
        found = [n if is_in else -1 for n, is_in in zip(numbers, inside, strict=True)]
        assert found == chunks.tolist()
    assert packed[92:124] == bytes(32)


def test_draws_read_as_documented() -> None:
    wanted = settings(mode="sampled", k=9, sampling_seed=0, sequence_length=21, codec="f32")
    record = made_up(4, wanted)
    packed = pack(record, wanted, UID)
    plain = Plain(packed)
    runs, entries = plain.at(28, "u32"), plain.at(40, "u64")
    assert [packed[10], plain.at(14, "u16")] == [1, 5]
    for kind, count in (("u32", runs), ("i32", runs), ("i32", 22)):
        plain.take(kind, count)
    for _ in range(2):
        plain.bits(22)
    for _ in range(3):
        plain.take("f32", 21)
    drawn = record.entries.counts_SM > 0
    assert plain.take("u8", 21) == drawn.sum(1).tolist()
    assert plain.take("u8", entries) == record.entries.counts_SM[drawn].tolist()
    assert plain.take("u16", entries) == (record.entries.ids_SM[drawn] & 0xFFFF).tolist()


def test_temperatures_follow_the_tail() -> None:
    wanted = settings(codec="f16", temperatures=(0.5, 2.0), k=4, sequence_length=5)
    record = made_up(0, replace(wanted, temperatures=()))
    sums = np.arange(10, dtype=np.float32).reshape(2, 5)
    entries = replace(
        record.entries, temperatures=(0.5, 2.0), log_sum_exp_TS=sums, log_tail_TS=-1 - sums
    )
    packed = pack(replace(record, entries=entries), wanted, UID)
    assert packed[13] == 2
    temperatures = struct.pack("<2d", 0.5, 2.0)
    place = packed.index(temperatures) + len(temperatures)
    assert struct.unpack_from("<10f", packed, place) == tuple(range(10))
    assert struct.unpack_from("<10e", packed, place + 40) == tuple(-1.0 - i for i in range(10))
