"""Verification of a whole store, repair by quarantine of bad shards, and codec errors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_distill.errors import StoreError, counted
from megatron_distill.runtime.atomic_files import flush_folder, write_errors
from megatron_distill.store.binary import RecordFile, decode, pack, require_record, unpack
from megatron_distill.store.codecs import CODECS
from megatron_distill.store.documents import (
    Pieces,
    documents_name,
    has_documents,
    list_advice,
    load_documents,
    runs_of_sample,
)
from megatron_distill.store.manifest import Manifest, ShardProof, file_sha256
from megatron_distill.store.plan import (
    MANIFEST,
    CaptureSettings,
    Plan,
    data_name,
    repair_advice,
    shard_folder,
    sidecar_name,
)
from megatron_distill.store.records import (
    Floats,
    Integers,
    PositionScalars,
    SampleRecord,
)
from megatron_distill.store.topk_entries import TopKEntries
from megatron_distill.store.writer import repeated_ids, value_problems

__all__ = ["CodecError", "StoreDefect", "VerificationReport", "measure_codec", "repair", "verify"]


_READ_RECORDS: Final = 8
QUARANTINE: Final = "quarantine"


@dataclass(frozen=True)
class StoreDefect:
    """One defect of a store.

    Attributes:
        file: path within the store.
        shard: its number, or None for a file of the whole store.
        sample_id: None if the defect is of the whole file.
        text: description of the defect.
        is_of_list: whether it is of a list of documents, on which no record depends.
    """

    file: str
    shard: int | None
    sample_id: int | None
    text: str
    is_of_list: bool = False


@dataclass(frozen=True)
class VerificationReport:
    """The result of `verify`.

    Attributes:
        plan: of the store.
        problems: all of them, by shard and sample.
        missing: planned shards without files; not a defect of the existing shards.
        samples: number of verified samples without a defect.
    """

    plan: Plan
    problems: tuple[StoreDefect, ...]
    missing: tuple[int, ...]
    samples: int

    @property
    def bad_shards(self) -> tuple[int, ...]:
        """Shards with a defect of their records."""
        return self._shards(of_lists=False)

    @property
    def bad_lists(self) -> tuple[int, ...]:
        """Shards with a defect of their list of documents."""
        return self._shards(of_lists=True)

    def _shards(self, *, of_lists: bool) -> tuple[int, ...]:
        found = {one.shard for one in self.problems if one.is_of_list == of_lists}
        return tuple(sorted(shard for shard in found if shard is not None))


def verify(
    folder: Path, *, progress: Callable[[int, int], None] | None = None
) -> VerificationReport:
    """Read every byte of a store and make every check that is possible without the teacher.

    Args:
        progress: called after each shard with the number of shards done and their total.

    Raises:
        StoreError: the plan is missing or damaged.
    """
    plan = Plan.load(folder)
    problems, missing, good = [], [], 0
    manifest: Manifest | None = None
    try:
        manifest = Manifest.load(folder, plan)
    except StoreError as error:
        problems.append(StoreDefect(MANIFEST, None, None, _plain(error, folder / MANIFEST, folder)))
    lists_documents = has_documents(folder)
    for shard in range(plan.shards):
        there = shard_folder(folder) / sidecar_name(shard)
        if manifest is None and not there.exists():
            missing.append(shard)
        else:
            expected = None if manifest is None else manifest.shards[shard]
            documents: dict[int, Integers] = {}
            found = list(_shard_problems(folder, plan, shard, expected, documents))
            if lists_documents:
                problems += _list_problems(folder, plan, shard, documents)
            bad_samples = {problem.sample_id for problem in found}
            good += 0 if None in bad_samples else plan.count(shard) - len(bad_samples)
            problems += found
        if progress is not None:
            progress(shard + 1, plan.shards)
    return VerificationReport(plan, tuple(problems), tuple(missing), good)


def _shard_problems(
    folder: Path,
    plan: Plan,
    shard: int,
    expected: ShardProof | None,
    documents: dict[int, Integers],
) -> Iterator[StoreDefect]:
    """The defects of a shard's records; `documents` gets those of each intact one, by position."""
    path = shard_folder(folder) / data_name(shard)
    name = str(path.relative_to(folder))
    proof: ShardProof | None = expected
    try:
        proof = ShardProof.load(folder, plan, shard)
    except StoreError as error:
        sidecar = path.with_name(sidecar_name(shard))
        text = _plain(error, sidecar, folder)
        yield StoreDefect(str(sidecar.relative_to(folder)), shard, None, text)
    if proof is not None and expected is not None and proof != expected:
        yield StoreDefect(name, shard, None, f"{MANIFEST} and {sidecar_name(shard)} do not agree")
    try:
        file = RecordFile(path, count=plan.count(shard))
    except StoreError as error:
        yield StoreDefect(name, shard, None, _plain(error, path, folder))
        return
    try:
        if proof is not None and file_sha256(path) != proof.sha256:
            yield StoreDefect(
                name, shard, None, "its bytes do not match the SHA-256 of its sidecar"
            )
        yield from _record_problems(file, plan, shard, name, proof, documents)
    finally:
        file.close()


def _list_problems(
    folder: Path, plan: Plan, shard: int, documents: Mapping[int, Integers]
) -> Iterator[StoreDefect]:
    """The defects of a shard's list, and its differences from the records, one per sample.

    documents: of each intact record, by its position in the shard.
    """
    path = shard_folder(folder) / documents_name(shard)
    name = str(path.relative_to(folder))
    try:
        pieces = load_documents(folder, plan, shard)
    except StoreError as error:
        yield StoreDefect(name, shard, None, _plain(error, path, folder), is_of_list=True)
        return
    ordered = pieces[np.argsort(pieces["sample"], kind="stable")]
    has_texts_alone = _has_texts_alone(plan)
    for position, document_ids_S1 in documents.items():
        begin, end = np.searchsorted(ordered["sample"], [position, position + 1])
        if begin == end and not has_texts_alone:
            continue
        difference = _difference(ordered[begin:end], document_ids_S1)
        if difference is not None:
            sample_id = plan.first(shard) + position
            yield StoreDefect(name, shard, sample_id, difference, is_of_list=True)


def _has_texts_alone(plan: Plan) -> bool:
    """Whether each sample has documents of text: conversations and files of tokens have none."""
    sources = plan.identity.settings.get("dataset", {}).get("sources", {})
    return all(
        "conversation" not in source and source.get("format") != "megatron"
        for source in sources.values()
    )


def _difference(pieces: Pieces, document_ids_S1: Integers) -> str | None:
    """The first difference between the pieces that a list has of a record, and its documents."""
    places, counts = runs_of_sample(document_ids_S1)
    if len(pieces) != len(counts):
        listed = counted(len(pieces), "document")
        return f"lists {listed}; the record has {counted(len(counts), 'document')}"
    for number, (piece, place, count) in enumerate(zip(pieces, places, counts, strict=True)):
        first, tokens = int(piece["place"]), int(piece["count"])
        if (first, tokens) != (place, count):
            return (
                f"lists {counted(tokens, 'token')} from position {first} on for document "
                f"{number}; the record has {counted(int(count), 'token')} from {place} on"
            )
        # A record is cut from a row of documents: only its first one can have begun before it.
        if number and piece["first"]:
            return (
                f"lists token {int(piece['first'])} of its text as the first one of document "
                f"{number}, which begins inside the record"
            )
    return None


def _record_problems(
    file: RecordFile,
    plan: Plan,
    shard: int,
    name: str,
    proof: ShardProof | None,
    documents: dict[int, Integers],
) -> Iterator[StoreDefect]:
    root = hashlib.blake2b(digest_size=32)
    is_whole = True
    for position, content, damage in _contents(file, plan.count(shard)):
        sample_id = plan.first(shard) + position
        if damage is not None or content is None:
            is_whole = False
            yield StoreDefect(name, shard, sample_id, damage or "missing")
            continue
        try:
            header = require_record(
                content, capture_uid=plan.uid, sample_id=sample_id, settings=plan.settings
            )
            record = decode(content, header)
        except StoreError as error:
            is_whole = False
            yield StoreDefect(name, shard, sample_id, str(error))
            continue
        root.update(header.digest)
        documents[position] = record.document_ids_S1
        for problems in (value_problems(record, plan.settings), repeated_ids(record)):
            for text in problems:
                yield StoreDefect(name, shard, sample_id, text)
    if proof is not None and is_whole and root.hexdigest() != proof.token_root:
        yield StoreDefect(
            name, shard, None, "its tokens do not match the token root of its sidecar"
        )


def _contents(file: RecordFile, count: int) -> Iterator[tuple[int, bytes | None, str | None]]:
    """Position, content and error of all records; a bad record does not hide its neighbours."""
    for start in range(0, count, _READ_RECORDS):
        positions = range(start, min(start + _READ_RECORDS, count))
        try:
            together = file.read(positions)
        except StoreError:
            for position in positions:
                try:
                    yield position, file.read([position])[0], None
                except StoreError as error:
                    yield position, None, _plain(error, file.path, file.path.parent.parent)
            continue
        for position, content in zip(positions, together, strict=True):
            yield position, content, None


def repair(folder: Path, report: VerificationReport) -> list[Path]:
    """Move bad shards to quarantine, as holes for the writer; returns the moved files' new paths.

    Of a shard whose list of documents alone is bad the list is moved, and the records stay. The
    manifest is moved too if it is damaged or lists a moved shard; the writer writes a new one.
    An interrupted repair leaves whole shards or holes; running it again completes it.

    Raises:
        StoreError: the folder cannot be written.
    """
    shards = shard_folder(folder)
    moved = []
    wanted = [shards / name for shard in report.bad_shards for name in _names(shard)]
    wanted += [shards / documents_name(shard) for shard in report.bad_lists]
    if report.bad_shards or any(problem.file == MANIFEST for problem in report.problems):
        # Manifest and sidecars move before the files that they list.
        wanted.insert(0, folder / MANIFEST)
    with write_errors(folder / QUARANTINE):
        for path in wanted:
            if path.exists():
                (folder / QUARANTINE).mkdir(exist_ok=True)
                target = _free_name(folder / QUARANTINE / path.name)
                path.rename(target)
                flush_folder(path.parent)
                moved.append(target)
        if moved:
            flush_folder(folder / QUARANTINE)
    return moved


def _names(shard: int) -> tuple[str, ...]:
    return sidecar_name(shard), data_name(shard), documents_name(shard)


def _free_name(path: Path) -> Path:
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


def _plain(error: StoreError, path: Path, folder: Path) -> str:
    """An error's text without the path and the advice, which a report does not need."""
    text = str(error).removeprefix(f"{path}: ").removeprefix(f"{path.parent}: ")
    for is_file in (True, False):
        text = text.removesuffix(f"; {repair_advice(folder, file=is_file)}")
    return text.removesuffix(f"; {list_advice(folder)}")


@dataclass(frozen=True)
class CodecError:
    """KL divergence of decoded from exact distributions over the top-k ids and the tail, in nats.

    Attributes:
        codec: its name.
        bytes_per_token: of a whole record, without the container.
        mean: over positions.
        p99: its 99th percentile.
        largest_log_prob: largest error of a log-probability whose probability is above 1e-4.
    """

    codec: str
    bytes_per_token: float
    mean: float
    p99: float
    largest_log_prob: float


def measure_codec(
    codec: str, ids_SK: Integers, log_probs_SK: Floats, log_tail_S: Floats, *, vocab_size: int
) -> CodecError:
    """Encode and decode S positions with a codec, and measure the error.

    Shapes: ids and log-probs ``[S, K]``, descending, and log tails ``[S]`` that complete them.
    """
    positions, k = ids_SK.shape
    assert codec in CODECS
    settings = CaptureSettings(k=k, vocab_size=vocab_size, sequence_length=positions, codec=codec)
    zeros = np.zeros(positions, np.float32)
    record = SampleRecord(
        sample_id=0,
        tokens_S1=np.zeros(positions + 1, np.int32),
        document_ids_S1=np.zeros(positions + 1, np.int32),
        flags_S1=np.full(positions + 1, 3, np.uint8),
        entries=TopKEntries(ids_SK, log_probs_SK, log_tail_S),
        scalars=PositionScalars(zeros, zeros, zeros),
    )
    packed = pack(record, settings, bytes(8))
    decoded = unpack(packed).entries
    assert isinstance(decoded, TopKEntries)
    assert decoded.log_tail_S is not None
    exact = _distribution(log_probs_SK, log_tail_S)
    found = _distribution(decoded.log_probs_SK, decoded.log_tail_S)
    with np.errstate(invalid="ignore"):
        terms = np.where(exact > -np.inf, np.exp(exact) * (exact - found), 0.0)
    divergence = terms.sum(1)
    counts = log_probs_SK > np.log(1e-4)
    error = np.abs(log_probs_SK.astype(np.float64) - decoded.log_probs_SK)[counts]
    return CodecError(
        codec=codec,
        bytes_per_token=len(packed) / positions,
        mean=float(divergence.mean()),
        p99=float(np.quantile(divergence, 0.99)),
        largest_log_prob=float(error.max(initial=0.0)),
    )


def _distribution(log_probs_SK: Floats, log_tail_S: Floats) -> NDArray[np.float64]:
    """Log-probabilities [S, K + 1] whose rows sum to one in fp64."""
    values = np.concatenate([log_probs_SK, log_tail_S[:, None]], axis=1).astype(np.float64)
    total: NDArray[np.float64] = values - np.logaddexp.reduce(values, axis=1, keepdims=True)
    return total
