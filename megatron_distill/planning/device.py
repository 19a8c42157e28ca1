"""Devices as data: rates, memory, links and reading, each file with its source and date."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Final, Literal, get_args

import yaml
from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from megatron_distill.errors import ConfigError
from megatron_distill.planning.curves import Curve, share
from megatron_distill.planning.links import Link, Positive, ProfileTable
from megatron_distill.runtime.atomic_files import replace_file

__all__ = [
    "ALIASED_COLUMNS",
    "CALIBRATED",
    "DeviceProfile",
    "MeasuredRun",
    "Phase",
    "Precision",
    "LONG_DOCUMENT",
    "SCORED_DOCUMENT",
    "SEGMENTED_COLUMNS",
    "Sharing",
    "device_names",
    "device_text",
    "load_device",
    "reading_seconds",
    "write_device",
]

Phase = Literal["teacher", "forward", "loss", "backward", "communication", "optimizer"]
Precision = Literal["bf16", "fp32", "fp8"]
# Who has a machine's cores: one rank of a run, several, or ranks that leave some idle.
Sharing = Literal["one rank", "several ranks", "idle cores"]
# The file that `megatron-distill calibrate` writes, by the kind of the machine.
CALIBRATED: Final = {"cpu": "this-cpu", "gpu": "this-gpu"}
# Rows of so many fp32 logits begin in the same sets of a core's second cache, usually of 1 MiB in
# eight ways.
ALIASED_COLUMNS: Final = 2**15
# Columns of a row per chosen id from which a choice reads segments, and not the whole row twice:
# ops/topk.py.
SEGMENTED_COLUMNS: Final = 192
# Tokens of the documents in which attention is measured on a CPU: a long one is computed in larger
# blocks, at another rate.
SCORED_DOCUMENT: Final = 512
LONG_DOCUMENT: Final = 2048
_FOLDER: Final = Path(__file__).parent / "devices"
# Sizes that differ by no more than this factor have phases at about the same rates.
_NEAR: Final = 1.25
# Characters of a wrong value in a message.
_SHOWN: Final = 40


class MeasuredRun(ProfileTable):
    """Measured over predicted times of a run's phases, and the run that they hold for.

    ranks, threads: of a run that share a CPU, and of each of them; 1 on other devices. work: sizes
    that may differ by a quarter; kinds: what may not differ; see `refine`. factors: of each phase.
    """

    precision: Precision
    ranks: int = 1
    threads: int = 1
    work: dict[str, Positive]
    kinds: dict[str, str] = Field(default_factory=dict)
    factors: dict[Phase, Positive] = Field(default_factory=dict)

    def nearest(self, others: Sequence[MeasuredRun]) -> MeasuredRun | None:
        """Return the one whose factors hold best for this run; None: those of none do.

        Kinds and the sharing of cores are equal, and no number of the work differs by more than a
        quarter. The largest ratio of these numbers is then the smallest.
        """
        found = [(ratio, one) for one in others if (ratio := self._ratio(one)) <= _NEAR]
        return min(found, key=lambda each: each[0])[1] if found else None

    def _ratio(self, other: MeasuredRun) -> float:
        ours, theirs = (
            (one.precision, one.ranks, one.threads, one.kinds, one.work.keys())
            for one in (self, other)
        )
        if ours != theirs:
            return inf
        pairs = [(size, other.work[name]) for name, size in self.work.items()]
        return max((max(pair) / min(pair) for pair in pairs), default=1.0)


class DeviceProfile(ProfileTable):
    """One device, as the planner needs it.

    Attributes:
        memory_gib: that a process can allocate; reserved_gib of it by the driver and libraries.
        peak_tflops: of dense matrix products, by precision.
        product_efficiency: share of the peak over the GFLOP of one product, ascending.
        attention_efficiency: share of the peak of a fused attention's products, forward and
            backward. score_ns: of the softmax of one score, which the width of a head does not
            change, where it was measured. Both of a CPU per score that is needed, in documents of
            `SCORED_DOCUMENT` tokens. long_attention_efficiency, long_score_ns: of `LONG_DOCUMENT`
            tokens; None: those of short ones.
        memory_gb_per_s, memory_efficiency: of element-wise work; the share over its megabytes.
        kernel_us: of starting one operation.
        transformer_engine: whether the shares are meant for its layers, attention and Adam.
        logit_ns: of one logit of one model in the losses and their gradient, by precision, where it
            was measured; else memory limits it. aliased_logit_ns: the same where rows of logits are
            a multiple of `ALIASED_COLUMNS` apart, of which a cache keeps few at a time.
        choice_ns: of one logit where the most probable ids and their statistics are chosen, as a
            capture does, by precision, where it was measured; else as in the losses.
            narrow_choice_ns: the same of rows with fewer than `SEGMENTED_COLUMNS` per id.
        update_ns: of one parameter in the optimizer, where it was measured; 0: memory limits it.
        cores: of a CPU, which its ranks share; None: ranks share nothing.
        threads: of one rank of a CPU. core_share: of a core that a rank has, where it has no whole
            one.
        thread_efficiency: of a CPU, speed of n threads over n, by the GFLOP of a product,
            ascending. Other work divides like the smallest product.
        node, network: links inside a node, and between nodes.
        ranks: of a run, that share a CPU. idle_cores: whether they leave some of its cores idle.
        factors: measured over predicted time of a step's phases, for every run that is planned.
        runs: the same of measured runs, in place of these for runs like them; see `refine`.
        step_factors: the same of a CPU, by who has its cores and by precision: of the steps that
            `calibrate` takes. Layers have more than the sum of their calls, and threads and ranks
            share caches and memory.
        layer_us: what a pass of a layer of any size takes besides its share of the work, where
            `calibrate` told it from that by steps of two sizes; by who has the cores.
        spread: of each measured rate that differed between the rounds of `calibrate`, by its key:
            the range over the median.
        measured_in: seconds that `calibrate` took; 0: it did not say.
        source, date: of the figures. efficiency_source: of the shares, which no maker publishes.
    """

    name: str
    title: str
    kind: Literal["gpu", "cpu"] = "gpu"
    memory_gib: Positive
    reserved_gib: float = Field(default=0.0, ge=0)
    peak_tflops: dict[Precision, Positive]
    product_efficiency: Curve
    attention_efficiency: tuple[Positive, Positive]
    score_ns: tuple[float, float] = (0.0, 0.0)
    long_attention_efficiency: tuple[Positive, Positive] | None = None
    long_score_ns: tuple[float, float] | None = None
    memory_gb_per_s: Positive
    memory_efficiency: Curve
    kernel_us: float = Field(ge=0)
    transformer_engine: bool = False
    logit_ns: dict[Precision, Positive] = Field(default_factory=dict)
    aliased_logit_ns: dict[Precision, Positive] = Field(default_factory=dict)
    choice_ns: dict[Precision, Positive] = Field(default_factory=dict)
    narrow_choice_ns: dict[Precision, Positive] = Field(default_factory=dict)
    update_ns: float = Field(default=0.0, ge=0)
    cores: int | None = None
    threads: int = 1
    core_share: float = Field(default=1.0, gt=0, le=1)
    thread_efficiency: Curve = ((1.0, 1.0),)
    ranks: int = 1
    idle_cores: bool = False
    factors: dict[Phase, Positive] = Field(default_factory=dict)
    runs: tuple[MeasuredRun, ...] = ()
    step_factors: dict[Sharing, dict[Precision, dict[Phase, Positive]]] = Field(
        default_factory=dict
    )
    layer_us: dict[Sharing, dict[Phase, Positive]] = Field(default_factory=dict)
    node: Link
    network: Link
    spread: dict[str, float] = Field(default_factory=dict)
    measured_in: float = Field(default=0.0, ge=0)
    source: str
    efficiency_source: str
    date: str

    @field_validator("peak_tflops")
    @classmethod
    def _trains(cls, peaks: dict[Precision, float]) -> dict[Precision, float]:
        if not {"bf16", "fp32"} & peaks.keys():
            raise ValueError(
                "needs bf16 or fp32, the TFLOP/s of dense products: attention has no other"
            )
        return peaks

    @field_validator("reserved_gib")
    @classmethod
    def _leaves_memory(cls, reserved: float, info: ValidationInfo) -> float:
        memory = info.data.get("memory_gib", inf)
        if reserved >= memory:
            raise ValueError(f"must be less than memory_gib, {memory:g}, of which it is a part")
        return reserved

    @property
    def memory_bytes(self) -> float:
        """Bytes that a process can allocate."""
        return self.memory_gib * 2**30

    def peak_flops(self, precision: Precision) -> float:
        """Return the highest FLOP/s of products in a precision.

        Raises ConfigError: the file of the device has no such rate.
        """
        found = self.peak_tflops.get(precision)
        if found is None:
            known = ", ".join(self.peak_tflops) or "nothing"
            raise ConfigError(
                f"device {self.name}: `peak_tflops` has {known}, and this run computes in "
                f"{precision}; add `{precision}`, the TFLOP/s of dense products, to `peak_tflops` "
                "in the device's file"
            )
        return found * 1e12

    def shared_by(self, ranks: int, *, threads: int | None = None) -> DeviceProfile:
        """Return the device of one rank where `ranks` of a machine share the cores of a CPU.

        threads: of each rank; None, or more than there are cores for: as many as there are.
        """
        if self.cores is None:
            return self
        idle_cores = threads is not None and threads < self.cores // ranks
        used = threads if threads is not None and idle_cores else self.cores / ranks
        alone = ((self.product_efficiency[0][0], 1.0),)
        gains = self.thread_efficiency if used > 1 else alone
        # Attention over long documents divides like the largest product, other work like the least.
        factor, longest = used * gains[0][1], gains[-1][1]
        sizes = sorted({size for size, _ in (*self.product_efficiency, *gains)})
        return self.model_copy(
            update={
                "peak_tflops": {key: value * used for key, value in self.peak_tflops.items()},
                "product_efficiency": tuple(
                    (size, share(self.product_efficiency, size) * share(gains, size))
                    for size in sizes
                ),
                **{
                    key: None if pair is None else tuple(value * gain for value in pair)
                    for key, pair, gain in (
                        ("attention_efficiency", self.attention_efficiency, gains[0][1]),
                        ("score_ns", self.score_ns, 1 / factor),
                        ("long_attention_efficiency", self.long_attention_efficiency, longest),
                        ("long_score_ns", self.long_score_ns, 1 / (used * longest)),
                    )
                },
                "memory_gb_per_s": self.memory_gb_per_s * factor,
                "logit_ns": {key: value / factor for key, value in self.logit_ns.items()},
                "aliased_logit_ns": {
                    key: value / factor for key, value in self.aliased_logit_ns.items()
                },
                "choice_ns": {key: value / factor for key, value in self.choice_ns.items()},
                "narrow_choice_ns": {
                    key: value / factor for key, value in self.narrow_choice_ns.items()
                },
                "update_ns": self.update_ns / factor,
                "kernel_us": self.kernel_us / min(1.0, used),
                "memory_gib": self.memory_gib / ranks,
                "cores": None,
                "ranks": ranks,
                "idle_cores": idle_cores,
                "threads": max(1, int(used)),
                "core_share": min(1.0, used),
            }
        )

    @property
    def sharing(self) -> Sharing:
        """Who has the cores of a CPU."""
        if self.idle_cores:
            return "idle cores"
        return "one rank" if self.ranks == 1 else "several ranks"

    def factor(self, phase: Phase, precision: Precision) -> float:
        """Return the measured over the predicted time of a phase, 1 without a measurement.

        Without what `layer_excess` has of it.
        """
        known = self._of_steps(phase, precision) - self.layer_excess(phase, precision)
        return self.factors.get(phase, 1.0) * known

    def layer_excess(self, phase: Phase, precision: Precision) -> float:
        """Return the share by which a layer of `calibrate`'s one rank took longer than planned.

        Threads of a rank begin each operation together, and wait for each other at its end. That
        takes as long in layers of all sizes, so that it is added to each: of one rank with all
        cores, if these are several. Else 0, and where `layer_us` was measured.
        """
        has_threads = self.sharing == "one rank" and self.threads > 1
        has_threads &= self.sharing not in self.layer_us
        of_layers = has_threads and phase in ("teacher", "forward", "backward")
        return max(0.0, self._of_steps(phase, precision) - 1.0) if of_layers else 0.0

    def layer_seconds(self, phase: Phase) -> float:
        """Return the time of `layer_us` of a rank, 0 where it was not measured."""
        known = self.layer_us.get(self.sharing, {}).get(phase, 0.0)
        return known * 1e-6 / self.core_share

    def _of_steps(self, phase: Phase, precision: Precision) -> float:
        known = self.step_factors
        found = known.get(self.sharing)
        if found is None and self.idle_cores:  # of a file from before they were measured
            found = known.get("one rank" if self.ranks == 1 else "several ranks")
        # One precision may have been measured with one sharing alone.
        others = (one[precision] for one in known.values() if precision in one)
        factors = (found or {}).get(precision) or next(others, {})
        return factors.get(phase, 1.0)

    def logit_seconds(
        self, precision: Precision, columns: float, *, chosen: int = 0
    ) -> float | None:
        """Return the time of a logit where rows have `columns`; None: it was not measured.

        chosen: in a choice of so many most probable ids, not in a loss.
        """
        if chosen and precision in self.choice_ns:
            segmented = self.choice_ns[precision]
            is_narrow = columns < SEGMENTED_COLUMNS * chosen
            rates = self.narrow_choice_ns if is_narrow else self.choice_ns
            return rates.get(precision, segmented) * 1e-9
        found = self.logit_ns.get(precision)
        if columns % ALIASED_COLUMNS == 0:
            found = self.aliased_logit_ns.get(precision, found)
        return None if found is None else found * 1e-9

    def varied(self, precision: Precision, *, more_than: float) -> dict[str, float]:
        """Return the spreads above a share of the rates of this precision, largest first.

        Factors are those of the sharing of the cores that this device has.
        """
        foreign = {*get_args(Precision), *get_args(Sharing)} - {precision, self.sharing}
        found = {
            name: value
            for name, value in self.spread.items()
            if value > more_than and foreign.isdisjoint(name.split("."))
        }
        return dict(sorted(found.items(), key=lambda one: -one[1]))

    def link(self, span: int) -> Link:
        """Return the link of a group whose ranks lie within `span` consecutive ranks."""
        return self.node if span <= self.node.devices else self.network


def device_names() -> tuple[str, ...]:
    """Return the names of the shipped devices."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def load_device(name: str, *, option: str | None = None) -> DeviceProfile:
    """Return a device by the name of a shipped file, or by the path of a file.

    option: that names it, with its value, for messages; None: `--device`. Raises ConfigError: there
    is no such device, or a key of its file is wrong.
    """
    shipped, own = _FOLDER / f"{name}.yaml", Path(name)
    path = shipped if shipped.is_file() else own
    if not path.is_file() and own.name and own.suffix != ".yaml":
        path = own.with_name(f"{own.name}.yaml")
    if not path.is_file():
        hint = ", or run `megatron-distill calibrate`, which writes one"
        raise ConfigError(
            f"{option or f'--device {name}'}: there is no device {name}; the shipped ones are "
            f"{', '.join(device_names())}; give one of them, the path of a YAML file{hint}"
        )
    return read_device(path)


def read_device(path: Path) -> DeviceProfile:
    """Read a device's file. Raises ConfigError: it is not valid YAML, or a key is wrong."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        is_table = isinstance(tree, dict)
        if not is_table or not tree.keys() & DeviceProfile.model_fields.keys():
            shown = ", ".join(map(str, tree)) if is_table else str(tree)
            wanted = "key of a device" if is_table else "keys"
            problem = f"has no {wanted}, but {shown[:_SHOWN]!r}" if tree else "is empty"
            raise ConfigError(
                f"{path}: {problem}; a device has the keys of those in {_FOLDER}: copy one of "
                "them, or write the file with `megatron-distill calibrate`"
            )
        return DeviceProfile.model_validate(tree)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: no device, because it is not valid YAML: {error}") from error
    except ValidationError as error:
        found = "; ".join(map(_in_words, error.errors()))
        remedy = "correct these keys, or write the file again with `megatron-distill calibrate`"
        raise ConfigError(f"{path}: {found}; {remedy}") from error


def _in_words(problem: ErrorDetails) -> str:
    """Return a wrong key, what is wrong, and its value where that is short."""
    text = f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}".replace("Value error, ", "")
    value = problem["input"]
    is_short = isinstance(value, str | int | float) and len(str(value)) <= _SHOWN
    is_value = problem["type"] != "extra_forbidden"  # there the key is wrong
    return f"{text}, but is {value}" if is_short and is_value else text


def device_text(device: DeviceProfile) -> str:
    """Return the content of a device's file."""
    tree = device.model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=100)


def write_device(device: DeviceProfile, path: Path) -> None:
    """Write a device's file. Raises ConfigError: it cannot be written."""
    try:
        replace_file(path, device_text(device).encode())
    except OSError as error:
        raise ConfigError(
            f"--output {path}: cannot be written ({error.strerror}); name another file"
        ) from error


# Tokens per second: benchmarks/results/data.json. `load`: prepared conversations of the large file.
# Files of format megatron have no record, and hold their tokens as these do.
_LOADED: Final = 3.16e6
# `stream`: texts that are tokenised and packed while they are read. Tokenizers that use more cores
# are faster, so that this is the most that texts can take.
_TOKENISED: Final = 0.5e6
# Tokens of both sides, about two for each of the student, in a process that tokenises, finds their
# bytes and aligns: benchmarks/results/align.md, whole files.
_ALIGNED: Final = 0.69e6


def reading_seconds(*, texts: float, aligned_by: int | None) -> float:
    """Return the seconds in which the one rank that reads has a token of the student.

    texts: share of the tokens that are tokenised while they are read. aligned_by: processes that
    tokenise for two tokenizers, 0: the reading one; None: there is one tokenizer.
    """
    if aligned_by is not None:
        return 2 / (_ALIGNED * max(1, aligned_by))
    return texts / _TOKENISED + (1 - texts) / _LOADED
