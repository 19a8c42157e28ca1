"""Sidecars and the manifest: sizes, checksums and totals of shards and of a whole store."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_distill.errors import StoreError, counted
from megatron_distill.store.plan import (
    FORMAT,
    MANIFEST,
    VERSION,
    Plan,
    read_bytes,
    repair_advice,
    require_version,
    sealed,
    shard_folder,
    sidecar_name,
    unsealed,
)
from megatron_distill.store.records import SampleRecord, trained_positions

__all__ = ["Manifest", "ShardProof", "Totals", "file_sha256"]


_READ_BYTES = 1 << 22


@dataclass(frozen=True)
class ShardProof:
    """A shard's sidecar: the samples of its file, with size and checksums.

    Attributes:
        shard: its number.
        first_sample: id of its first sample.
        count: number of its samples.
        file_bytes: size of the file.
        sha256: of the file.
        token_root: BLAKE2b-256 of its samples' token digests, one after another.
        totals: sums over its positions.
    """

    shard: int
    first_sample: int
    count: int
    file_bytes: int
    sha256: str
    token_root: str
    totals: Totals

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return dict(vars(self)) | {"totals": self.totals.as_json()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ShardProof:
        """The inverse of `as_json`."""
        return cls(**(value | {"totals": Totals.from_json(value["totals"])}))

    def content(self, plan: Plan) -> bytes:
        """The bytes of the sidecar."""
        head = {"format": FORMAT, "version": VERSION, "capture_uid": plan.uid.hex()}
        return sealed(head | self.as_json())

    @classmethod
    def load(cls, folder: Path, plan: Plan, shard: int) -> ShardProof:
        """Read a shard's sidecar. Raises StoreError: damaged, of another store or another shard."""
        path = shard_folder(folder) / sidecar_name(shard)
        value = unsealed(path, advice=repair_advice(folder, file=True))
        require_version(path, value)
        _require_plan(path, value, plan)
        try:
            proof = cls.from_json({name: value[name] for name in cls.__dataclass_fields__})
        except (KeyError, TypeError) as error:
            raise StoreError(
                f"{path}: not in the format of this release ({error}); {repair_advice(folder)}"
            ) from error
        expected = (shard, plan.first(shard), plan.count(shard))
        if (proof.shard, proof.first_sample, proof.count) != expected:
            raise StoreError(
                f"{path}: describes shard {proof.shard}; its name is that of shard {shard}: shards "
                f"are swapped or duplicated; {repair_advice(folder)}"
            )
        return proof


@dataclass(frozen=True)
class Manifest:
    """manifest.json: marks a store as complete, with the sidecar of every shard."""

    plan: Plan
    shards: Sequence[ShardProof]

    @property
    def totals(self) -> Totals:
        """Sums over all shards."""
        return Totals.of_all(proof.totals for proof in self.shards)

    @property
    def file_bytes(self) -> int:
        """Size of all shards."""
        return sum(proof.file_bytes for proof in self.shards)

    @property
    def tokens(self) -> int:
        """Number of stored positions, trained or not."""
        return self.plan.samples * self.plan.settings.sequence_length

    @property
    def content(self) -> bytes:
        """The bytes of manifest.json."""
        settings = self.plan.settings
        return sealed(
            {
                "format": FORMAT,
                "version": VERSION,
                "complete": True,
                "capture_uid": self.plan.uid.hex(),
                "plan": self.plan.as_json(),
                "supports": list(settings.supports),
                "lacks": list(settings.lacks),
                "tokens": self.tokens,
                "file_bytes": self.file_bytes,
                "bytes_per_token": round(self.file_bytes / self.tokens, 3),
                "totals": self.totals.as_json(),
                "shards": [proof.as_json() for proof in self.shards],
            }
        )

    @classmethod
    def load(cls, folder: Path, plan: Plan) -> Manifest:
        """Read the manifest of a complete store. Raises StoreError: missing or damaged."""
        path = folder / MANIFEST
        if not path.is_file():
            there = sum(
                (shard_folder(folder) / sidecar_name(shard)).is_file()
                for shard in range(plan.shards)
            )
            raise StoreError(
                f"{folder}: incomplete, {there} of {counted(plan.shards, 'shard')} and no "
                f"{MANIFEST}; run the capture again to write the missing shards"
            )
        value = unsealed(path, advice=repair_advice(folder, file=True))
        require_version(path, value)
        _require_plan(path, value, plan)
        try:
            manifest = cls(plan, tuple(ShardProof.from_json(proof) for proof in value["shards"]))
        except (KeyError, TypeError) as error:
            raise StoreError(f"{path}: not in the format of this release ({error})") from error
        if len(manifest.shards) != plan.shards or manifest.content != sealed(
            {k: v for k, v in value.items() if k != "seal"}
        ):
            raise StoreError(
                f"{path}: damaged, its totals differ from the sums over its shards; "
                f"{repair_advice(folder)}"
            )
        return manifest

    def require_sidecars(self, folder: Path) -> None:
        """Raise StoreError unless every shard's sidecar exists and agrees with the manifest."""
        for shard, proof in enumerate(self.shards):
            path = shard_folder(folder) / sidecar_name(shard)
            advice = repair_advice(folder, file=True)
            if read_bytes(path, advice=advice) != proof.content(self.plan):
                ShardProof.load(folder, self.plan, shard)  # raises if the sidecar itself is damaged
                raise StoreError(f"{path}: does not agree with {MANIFEST}; {advice}")


def _require_plan(path: Path, value: dict[str, Any], plan: Plan) -> None:
    if value.get("capture_uid") != plan.uid.hex():
        raise StoreError(
            f"{path}: belongs to another store (capture {value.get('capture_uid')}, not "
            f"{plan.uid.hex()}); put back the file of this one"
        )


def file_sha256(path: Path) -> str:
    """SHA-256 of a file. Raises StoreError: it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while block := stream.read(_READ_BYTES):
                digest.update(block)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()


@dataclass(frozen=True)
class Totals:
    """Sums over positions whose label is trained; means are sums over `positions`.

    Attributes:
        positions: their number.
        kept: number of stored ids (distinct ids, for draws).
        kept_mass: probability of the stored ids.
        entropy: of the teacher, nat.
        label_log_prob: of the teacher, nat; its mean is minus the teacher's cross-entropy.
        kept_histogram: entry i counts positions with 2^i to 2^(i + 1) - 1 ids.
    """

    positions: int = 0
    kept: int = 0
    kept_mass: float = 0.0
    entropy: float = 0.0
    label_log_prob: float = 0.0
    kept_histogram: tuple[int, ...] = ()

    @classmethod
    def of_record(cls, record: SampleRecord) -> Totals:
        """The sums of one sample."""
        trained = trained_positions(record)
        entries, scalars = record.entries, record.scalars
        width, id_counts = entries.ids()[0].shape[1], entries.id_counts()
        counts = np.bincount(id_counts[trained], minlength=width + 1)
        histogram = [int(counts[1 << i : 2 << i].sum()) for i in range(width.bit_length())]
        return cls(
            positions=int(trained.sum()),
            kept=int(id_counts[trained].sum()),
            kept_mass=entries.mass(trained),
            entropy=_sum(None if scalars is None else scalars.entropy_S, trained),
            label_log_prob=_sum(None if scalars is None else scalars.label_log_prob_S, trained),
            kept_histogram=tuple(histogram),
        )

    @classmethod
    def of_all(cls, parts: Iterable[Totals]) -> Totals:
        """The totals of several parts."""
        total = cls()
        for part in parts:
            width = max(len(total.kept_histogram), len(part.kept_histogram))
            histograms = [
                list(each.kept_histogram) + [0] * (width - len(each.kept_histogram))
                for each in (total, part)
            ]
            total = cls(
                positions=total.positions + part.positions,
                kept=total.kept + part.kept,
                kept_mass=total.kept_mass + part.kept_mass,
                entropy=total.entropy + part.entropy,
                label_log_prob=total.label_log_prob + part.label_log_prob,
                kept_histogram=tuple(map(sum, zip(*histograms, strict=True))),
            )
        return total

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"kept_histogram": list(self.kept_histogram)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Totals:
        """The inverse of `as_json`."""
        return cls(**(value | {"kept_histogram": tuple(value["kept_histogram"])}))


def _sum(values: Any, trained: Any) -> float:
    return 0.0 if values is None else float(values[trained].sum(dtype=np.float64))
