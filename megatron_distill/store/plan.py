"""The plan of a store: capture settings, identity, and the samples of each shard.

It is a JSON file sealed with the SHA-256 of its content, as a store's other JSON files are.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from megatron_distill.errors import StoreError
from megatron_distill.signals import Support
from megatron_distill.store.codecs import CODECS
from megatron_distill.store.drawn_entries import DrawnEntries
from megatron_distill.store.records import Entries
from megatron_distill.store.topk_entries import TopKEntries

__all__ = [
    "CaptureSettings",
    "FORMAT",
    "Identity",
    "KINDS",
    "Plan",
    "Support",
    "UNKNOWN",
    "VERSION",
    "canonical",
    "data_name",
    "plan_differences",
    "read_bytes",
    "repair_advice",
    "require_version",
    "sealed",
    "shard_folder",
    "sidecar_name",
    "tokenizer_folder",
    "unsealed",
]


def canonical(value: dict[str, Any]) -> bytes:
    """JSON with one form per value: sorted keys, two spaces, ASCII."""
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode("ascii")


def sealed(value: dict[str, Any]) -> bytes:
    """Canonical JSON, with the SHA-256 of the remaining content under `seal`."""
    return canonical(value | {"seal": hashlib.sha256(canonical(value)).hexdigest()})


def repair_advice(store: Path, *, file: bool = False) -> str:
    """The advice at the end of a message about a damaged store; `file`: also to restore a copy."""
    first = "restore the file from a copy, or " if file else ""
    return f"{first}run `megatron-distill store repair {store}`, then the capture again"


def unsealed(path: Path, *, advice: str) -> dict[str, Any]:
    """The content of a sealed file. Raises StoreError: unreadable, or changed."""
    text = read_bytes(path, advice=advice)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise StoreError(f"{path}: damaged, not valid JSON; {advice}") from error
    if not isinstance(value, dict) or not _is_sealed(value, text):
        raise StoreError(f"{path}: damaged, its content does not match its seal; {advice}")
    return value


def _is_sealed(value: dict[str, Any], text: bytes) -> bool:
    try:
        return sealed({name: part for name, part in value.items() if name != "seal"}) == text
    except ValueError:
        return False  # NaN: json.loads accepts it, the canonical writer does not


def read_bytes(path: Path, *, advice: str = "") -> bytes:
    """The content of a file. Raises StoreError with its path and the advice."""
    try:
        return path.read_bytes()
    except OSError as error:
        end = f"; {advice}" if advice else ""
        raise StoreError(f"{path}: cannot be read ({error.strerror}){end}") from error


FORMAT: Final = "megatron-distill teacher store"
VERSION: Final = 1
PLAN: Final = "plan.json"
MANIFEST: Final = "manifest.json"
UID_BYTES: Final = 8
UNKNOWN: Final = "unknown"  # a digest missing in a store's source

# The kinds of entries by the mode of a capture. Their order is the code in a record's header.
KINDS: Final[Mapping[str, type[Entries]]] = MappingProxyType(
    {"top_k": TopKEntries, "sampled": DrawnEntries}
)
Normalisation = Literal["vocabulary", "kept"]


@dataclass(frozen=True)
class CaptureSettings:
    """The settings of a capture: which part of a teacher's distributions is stored.

    Attributes:
        k: ids per position, or draws where `mode` is sampled.
        vocab_size: ids of the tokenizer, without padding columns.
        sequence_length: positions S of a sample.
        mode: a kind of entries: the most probable ids, or ids drawn with replacement.
        codec: f32 (every bit), f16 or u8.
        top_p: mass after which a position's ids were cut, or None.
        temperatures: further temperatures, with an exact normaliser and tail.
        sampling_seed: of the draws.
        normalised_over: "kept" if the source has only k logits per position: the records then have
            no tail and no scalars.
        student_length: positions of a sample in the tokens of a student with another tokenizer;
            None where both have one tokenizer.

    Raises:
        StoreError: a value is out of range, or two are incompatible.
    """

    k: int
    vocab_size: int
    sequence_length: int
    mode: str = "top_k"
    codec: str = "u8"
    top_p: float | None = None
    temperatures: tuple[float, ...] = ()
    sampling_seed: int | None = None
    normalised_over: Normalisation = "vocabulary"
    student_length: int | None = None

    def __post_init__(self) -> None:
        for wrong in self._problems():
            raise StoreError(f"capture settings: {wrong}")

    def _problems(self) -> Iterator[str]:
        if not 1 <= self.vocab_size <= 1 << 31:
            yield f"vocab_size is {self.vocab_size}; it must be between 1 and {1 << 31}"
        if self.mode not in KINDS:
            yield f"mode is {self.mode!r}; it must be one of {', '.join(KINDS)}"
        if not 1 <= self.k <= self.kind.largest_k(self.vocab_size):
            yield (
                f"k is {self.k}; it must be between 1 and the vocabulary of {self.vocab_size}, or "
                "65535 draws"
            )
        if not 1 <= self.sequence_length < 1 << 31:
            yield f"sequence_length is {self.sequence_length}; it must be at least 1"
        if self.student_length is not None and not 1 <= self.student_length < 1 << 31:
            yield f"student_length is {self.student_length}; it must be at least 1"
        if self.codec not in CODECS:
            yield f"codec is {self.codec!r}; it must be one of {', '.join(CODECS)}"
        if self.top_p is not None and not 0 < self.top_p < 1:
            yield f"top_p is {self.top_p}; it must be between 0 and 1, or null to keep k ids"
        if not all(0 < t < math.inf and t != 1.0 for t in self.temperatures):
            yield f"temperatures are {self.temperatures}; they must be positive and not 1"
        if list(self.temperatures) != sorted(set(self.temperatures)) or len(self.temperatures) > 99:
            yield f"temperatures are {self.temperatures}; they must ascend, 99 at most"
        if self.kind.needs_seed != (self.sampling_seed is not None):
            yield "sampling_seed belongs to mode: sampled, and to no other"
        if self.normalised_over not in get_args(Normalisation):
            yield f"normalised_over is {self.normalised_over!r}; it must be vocabulary or kept"
        is_ranked = self.kind.is_ranked
        needs_normaliser = not is_ranked or self.top_p is not None or self.temperatures
        if self.normalised_over == "kept" and needs_normaliser:
            yield "top_p, temperatures and mode: sampled need normalised_over: vocabulary"
        if not is_ranked and (self.top_p is not None or self.temperatures):
            yield "top_p and temperatures belong to mode: top_k"

    @property
    def kind(self) -> type[Entries]:
        """The kind of entries."""
        return KINDS[self.mode]

    @property
    def is_complete(self) -> bool:
        """Whether the records have tails and scalars of the whole vocabulary."""
        return self.normalised_over == "vocabulary"

    @property
    def supports(self) -> tuple[Support, ...]:
        """Supports of a top-k that records can serve; empty where ids are not ranked."""
        if not self.kind.is_ranked:
            return ()
        return get_args(Support) if self.is_complete else ("renormalized",)

    @property
    def lacks(self) -> tuple[str, ...]:
        """The fields missing in the records."""
        if self.is_complete:
            return ()
        return ("log_tail", "log_sum_exp", "entropy", "label_log_prob")


@dataclass(frozen=True)
class Identity:
    """The teacher and the data of a store.

    Attributes:
        teacher: digest of the weights.
        tokenizer: digest of its files.
        dataset: digest of corpus, packing and order.
        settings: further plain JSON values, such as names.
        student_tokenizer: digest of the files of the student's tokenizer, where it is another one;
            None where both have one tokenizer.
    """

    teacher: str
    tokenizer: str
    dataset: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    student_tokenizer: str | None = None


@dataclass(frozen=True)
class Plan:
    """`samples` records in shards of `samples_per_shard`, the last one shorter.

    Raises:
        StoreError: no samples, or no samples per shard.
    """

    settings: CaptureSettings
    identity: Identity
    samples: int
    samples_per_shard: int

    def __post_init__(self) -> None:
        for name in ("samples", "samples_per_shard"):
            if getattr(self, name) < 1:
                raise StoreError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-self.samples // self.samples_per_shard)

    def first(self, shard: int) -> int:
        """Id of the first sample of a shard."""
        return shard * self.samples_per_shard

    def count(self, shard: int) -> int:
        """Samples of a shard."""
        return min(self.samples_per_shard, self.samples - self.first(shard))

    def as_json(self) -> dict[str, Any]:
        """Plain values: the content of plan.json."""
        identity = asdict(self.identity) | {"settings": dict(self.identity.settings)}
        capture = asdict(self.settings) | {"temperatures": list(self.settings.temperatures)}
        for section, name in ((identity, "student_tokenizer"), (capture, "student_length")):
            if section[name] is None:
                del section[name]  # absent from stores of one tokenizer, as in older releases
        return {
            "format": FORMAT,
            "version": VERSION,
            "capture": capture,
            "identity": identity,
            "samples": self.samples,
            "samples_per_shard": self.samples_per_shard,
        }

    @property
    def content(self) -> bytes:
        """The bytes of plan.json."""
        return sealed(self.as_json())

    @cached_property  # read for every record
    def uid(self) -> bytes:
        """Eight bytes that tie records to this plan: the head of SHA-256 of plan.json."""
        return hashlib.sha256(self.content).digest()[:UID_BYTES]

    @classmethod
    def load(cls, folder: Path) -> Plan:
        """Read the plan of a store. Raises StoreError: no store, another version, or damaged."""
        path = folder / PLAN
        if not path.is_file():
            raise StoreError(f"{folder}: not a teacher store (no {PLAN}); correct the path")
        value = unsealed(path, advice="restore it from a copy, nothing else can")
        require_version(path, value)
        try:
            capture = dict(value["capture"])
            capture["temperatures"] = tuple(capture["temperatures"])
            plan = cls(
                CaptureSettings(**capture),
                Identity(**value["identity"]),
                value["samples"],
                value["samples_per_shard"],
            )
        except (KeyError, TypeError, ValueError, StoreError) as error:
            raise StoreError(f"{path}: not in the format of this release ({error})") from error
        if plan.content != sealed({name: part for name, part in value.items() if name != "seal"}):
            raise StoreError(f"{path}: contains fields of a later release; use that release")
        return plan

    def require_same(
        self, found: Plan, path: Path, *, named: Callable[[str], str] | None = None
    ) -> None:
        """Raise StoreError naming the differences, unless the plans are equal.

        `named` maps a dotted name such as `capture.k` to its name in the message; None: its last
        part.
        """
        differences = plan_differences(found.as_json(), self.as_json(), named or _own_name)
        if differences:
            raise StoreError(
                f"{path}: the store was started with other settings ({'; '.join(differences)}); "
                "restore these to continue, or name another folder"
            )


def require_version(path: Path, value: Any) -> None:
    """Raise StoreError unless a JSON value is of this format and version."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise StoreError(f"{path}: not a file of a {FORMAT}; correct the path")
    if value.get("version") != VERSION:
        raise StoreError(
            f"{path}: version {value.get('version')} of the store's format; this release reads "
            f"version {VERSION}: use the release that wrote it, or capture the store again"
        )


def plan_differences(
    there: Mapping[str, Any],
    wanted: Mapping[str, Any],
    named: Callable[[str], str],
    prefix: str = "",
) -> list[str]:
    """Return the differences between two plans, or between parts of them below `prefix`."""
    found = []
    for key in sorted(there.keys() | wanted.keys()):
        one, other = there.get(key), wanted.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += plan_differences(one, other, named, f"{prefix}{key}.")
        elif one != other:
            found.append(f"{named(f'{prefix}{key}')} is {one!r} in the store, not {other!r}")
    return found


def _own_name(name: str) -> str:
    return name.removeprefix("capture.").removeprefix("identity.").removeprefix("settings.")


def shard_folder(folder: Path) -> Path:
    """The folder of a store's shards."""
    return folder / "shards"


def tokenizer_folder(folder: Path) -> Path:
    """The folder of the tokenizer of a store's tokens; readers of records do not need it."""
    return folder / "tokenizer"


def data_name(shard: int) -> str:
    """File name of a shard's records."""
    return f"logits-{shard:06d}.array_record"


def sidecar_name(shard: int) -> str:
    """File name of a shard's sidecar."""
    return f"logits-{shard:06d}.json"
