"""Error of codecs on a trained teacher's distributions: ours and the peers'."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.children import run_child
from benchmarks.harness.environment import ROOT
from benchmarks.stores.data import top_k_of
from benchmarks.stores.polynomial import BUDGET, RECOMMENDED, Polynomial, as_bf16
from megatron_distill.config import load_config, to_yaml
from megatron_distill.evaluation.child_runs import ChildRun, make
from megatron_distill.store import (
    CaptureSettings,
    PositionScalars,
    SampleRecord,
    TopKEntries,
    measure_codec,
    pack,
    unpack,
)
from megatron_distill.store.records import Floats

__all__ = ["LossOfCodec", "TrainedTeacher", "measure_errors", "trained_teacher"]

KS: Final = (16, 64, 128, 256)
_BUDGET_K: Final = 50
# As in the peers, where a tail is 1 minus the sum of the top k.
_LEAST_TAIL: Final = 1e-8
_LARGE: Final = 0.01
_AGREEMENT: Final = 1e-6
_CHILD_SECONDS: Final = 1800.0
_ONE_PROCESS: Final = ("parallel.tensor=1", "parallel.pipeline=1")


@dataclass(frozen=True, eq=False)
class TrainedTeacher:
    """Exact log-probabilities [N, V] fp64 and their ids, most probable first.

    Attributes:
        log_probs_NV: of every position.
        ids_NV: token ids of `log_probs_NV`.
        log_sum_exp_N: of the logits, fp64.
        figures: about the teacher and the text.
    """

    log_probs_NV: NDArray[np.float64]
    ids_NV: NDArray[np.int32]
    log_sum_exp_N: NDArray[np.float64]
    figures: Mapping[str, Any]


@dataclass(frozen=True)
class LossOfCodec:
    """KL divergence of decoded from exact distributions, in nats.

    Attributes:
        codec: layout and setting.
        k: ids per position.
        value_bytes: per token, without ids.
        mean: over positions, between distributions over the k ids and the tail;
            None where the codec stores too little for one.
        p99: its 99th percentile.
        mean_kept: as `mean`, both normalised over the k ids.
        p99_kept: its 99th percentile.
        large: share of positions with more than 0.01 nats, with the tail.
    """

    codec: str
    k: int
    value_bytes: int
    mean: float | None
    p99: float | None
    mean_kept: float
    p99_kept: float
    large: float | None


def trained_teacher(folder: Path, *, steps: int, samples: int) -> TrainedTeacher:
    """Train the quickstart's teacher, unless the folder has it, and run it on held-out text."""
    file = str(ROOT / "configs" / "quickstart_teacher.yaml")
    name = f"teacher_{steps}"
    overrides = [f"output={folder / name}", *_ONE_PROCESS, f"train.steps={steps}"]
    config = load_config(file, overrides)
    run = ChildRun(
        name=name,
        label="teacher",
        place=folder,
        script=ROOT / "launch" / "pretrain_distill.py",
        arguments=("--config", file, *overrides),
        settings=to_yaml(config),
        steps=steps,
        processes=1,
    )
    make(run)
    arrays = folder / f"{name}_words.npz"
    words = ["--run", str(run.folder), "--samples", str(samples), "--arrays", str(arrays)]
    figures = run_child(
        "stores/teacher_worker.py",
        words,
        processes=1,
        name="the teacher's words",
        seconds=_CHILD_SECONDS,
    )
    found = np.load(arrays)
    return TrainedTeacher(
        found["log_probs"], found["ids"], found["log_sum_exp"], {"steps": steps} | figures
    )


def measure_errors(teacher: TrainedTeacher) -> Iterator[LossOfCodec]:
    """Every codec at every k."""
    for k in KS:
        for codec, value_bytes in (("f32", 4 * k), ("f16", 2 * k), ("u8", k + 4)):
            yield _own(teacher, k, codec, value_bytes)
        yield _peer(teacher, k, "bf16 log-probabilities", 2 * k, as_bf16)
        yield _bf16_logits(teacher, k)
        if k > RECOMMENDED.exact:
            yield from _polynomials(teacher, k, "DistillKit recommended", RECOMMENDED)
    yield from _polynomials(teacher, _BUDGET_K, "DistillKit budget", BUDGET)


def _polynomials(
    teacher: TrainedTeacher, k: int, name: str, codec: Polynomial
) -> Iterator[LossOfCodec]:
    for setting, of in ((", as printed", codec), (", normalize_t", codec.normalised)):

        def stored(values: Floats, of: Polynomial = of) -> Floats:
            return of.decode(*of.encode(values), k)

        yield _peer(teacher, k, f"{name}{setting}", codec.value_bytes_per_token, stored)


def _own(teacher: TrainedTeacher, k: int, codec: str, value_bytes: int) -> LossOfCodec:
    values, tail = _kept(teacher, k)
    ids = np.ascontiguousarray(teacher.ids_NV[:, :k])
    vocab_size = teacher.log_probs_NV.shape[1]
    decoded = _stored(codec, TopKEntries(ids, values, tail), vocab_size)
    assert decoded.log_tail_S is not None
    loss = _loss(
        codec=f"ours, {codec}",
        value_bytes=value_bytes,
        exact=(values, tail),
        found=(decoded.log_probs_SK, decoded.log_tail_S),
    )
    measured = measure_codec(codec, ids, values, tail, vocab_size=vocab_size)
    assert loss.mean is not None
    if abs(measured.mean - loss.mean) > _AGREEMENT * max(loss.mean, _AGREEMENT):
        raise SystemExit(
            f"{codec}: {measured.mean} by the store's measure, {loss.mean} by this one"
        )
    return loss


def _stored(codec: str, entries: TopKEntries, vocab_size: int) -> TopKEntries:
    """Entries as read back from a store."""
    positions, k = entries.ids_SK.shape
    settings = CaptureSettings(k=k, vocab_size=vocab_size, sequence_length=positions, codec=codec)
    nothing = np.zeros(positions, np.float32)
    record = SampleRecord(
        sample_id=0,
        tokens_S1=np.zeros(positions + 1, np.int32),
        document_ids_S1=np.zeros(positions + 1, np.int32),
        flags_S1=np.full(positions + 1, 3, np.uint8),
        entries=entries,
        scalars=PositionScalars(nothing, nothing, nothing),
    )
    return top_k_of(unpack(pack(record, settings, bytes(8))))


def _peer(
    teacher: TrainedTeacher, k: int, name: str, value_bytes: int, stored: Callable[[Floats], Floats]
) -> LossOfCodec:
    """A layout without a tail: the tail is the rest of the decoded probabilities."""
    values, tail = _kept(teacher, k)
    decoded = stored(values)
    left = 1 - np.exp(decoded.astype(np.float64)).sum(1)
    found = np.log(np.clip(left, _LEAST_TAIL, 1 - _LEAST_TAIL))
    return _loss(codec=name, value_bytes=value_bytes, exact=(values, tail), found=(decoded, found))


def _bf16_logits(teacher: TrainedTeacher, k: int) -> LossOfCodec:
    values, _ = _kept(teacher, k)
    logits = teacher.log_probs_NV[:, :k] + teacher.log_sum_exp_N[:, None]
    kept = _divergence(values, as_bf16(logits.astype(np.float32)))
    return LossOfCodec(
        codec="bf16 logits",
        k=k,
        value_bytes=2 * k,
        mean=None,
        p99=None,
        mean_kept=float(kept.mean()),
        p99_kept=float(np.quantile(kept, 0.99)),
        large=None,
    )


def _kept(teacher: TrainedTeacher, k: int) -> tuple[Floats, Floats]:
    """The k log-probabilities and the tail, rounded to fp32 once."""
    values = teacher.log_probs_NV
    tail = np.logaddexp.reduce(values[:, k:], axis=1)
    return values[:, :k].astype(np.float32), tail.astype(np.float32)


def _loss(
    *,
    codec: str,
    value_bytes: int,
    exact: tuple[NDArray[Any], NDArray[Any]],
    found: tuple[NDArray[Any], NDArray[Any]],
) -> LossOfCodec:
    whole = _divergence(
        *(np.concatenate([each[0], each[1][:, None]], 1) for each in (exact, found))
    )
    kept = _divergence(exact[0], found[0])
    return LossOfCodec(
        codec=codec,
        k=exact[0].shape[1],
        value_bytes=value_bytes,
        mean=float(whole.mean()),
        p99=float(np.quantile(whole, 0.99)),
        mean_kept=float(kept.mean()),
        p99_kept=float(np.quantile(kept, 0.99)),
        large=float((whole > _LARGE).mean()),
    )


def _divergence(exact: NDArray[Any], found: NDArray[Any]) -> NDArray[np.float64]:
    """KL [N] between rows of log-probabilities, each normalised first."""
    p, q = (
        values.astype(np.float64) - np.logaddexp.reduce(values.astype(np.float64), 1, keepdims=True)
        for values in (exact, found)
    )
    with np.errstate(invalid="ignore"):
        total: NDArray[np.float64] = np.where(p > -np.inf, np.exp(p) * (p - q), 0.0).sum(1)
    return total
