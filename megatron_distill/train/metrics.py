"""The metrics of a run: one JSON object per line, and the sinks that receive each record.

Metrics of each source of a blend travel in a report and become means here. The trackers
TensorBoard and Weights & Biases are optional, and imported when a sink is made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import astuple, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.errors import ConfigError
from megatron_distill.log import get_logger
from megatron_distill.runtime.batch import LabelCounts, StepBatches
from megatron_distill.runtime.collectives import together
from megatron_distill.train.reports.log_file import drop_after

__all__ = [
    "BY_SOURCE",
    "PUBLIC_NAMES",
    "JsonLinesSink",
    "LabelTotals",
    "MetricsLog",
    "MetricsRecord",
    "MetricsSink",
    "OnChunks",
    "SourceFigures",
    "TensorBoardSink",
    "WandbSink",
    "flat_scalars",
    "name_of",
    "open_metrics",
    "part_of",
    "public_names",
    "require_installed",
    "source_keys",
    "split_report",
    "step_figures",
    "to_json",
]

logger = get_logger(__name__)

MetricsRecord = Mapping[str, object]

# Public names in files and on screens of figures that have a shorter name in a report.
PUBLIC_NAMES: Final = {
    "ce": "ce_loss",
    "kd": "kd_loss",
    "total": "total_loss",
    "teacher_ce": "teacher_ce_loss",
}


def public_names(values: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of a report under their public names."""
    return {PUBLIC_NAMES.get(name, name): value for name, value in values.items()}


class MetricsSink(Protocol):
    """A receiver of the records of a run, in order."""

    def write(self, record: MetricsRecord) -> None:
        """Take one record; `record["step"]` is the number of optimizer steps done."""

    def close(self, *, failed: bool = False) -> None:
        """Flush buffered records; no record follows. `failed`: an error ended the run."""


class MetricsLog:
    """Writes every record to every sink; rank 0 has the sinks, any other rank has none."""

    def __init__(self, sinks: Sequence[MetricsSink] = ()) -> None:
        self._sinks = tuple(sinks)

    def write(self, record: MetricsRecord) -> None:
        """Write `record` to every sink."""
        for sink in self._sinks:
            sink.write(record)

    def close(self, *, failed: bool = False) -> None:
        """Close every sink, also when closing one of them fails."""
        sinks, self._sinks = self._sinks, ()
        with ExitStack() as stack:
            for sink in reversed(sinks):
                stack.callback(sink.close, failed=failed)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)


def open_metrics(
    output: Path,
    *,
    resume_step: int,
    tensorboard: bool,
    wandb: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
    screen: Callable[[], MetricsSink] | None,
) -> MetricsLog:
    """Open the log of a run folder on the first rank; raises ConfigError on all ranks.

    `wandb`: arguments of `WandbSink`, which records the `settings`. `screen` is opened last.

    Collective: world, one all-gather of a short object per rank.
    """
    with together():
        if dist.get_rank() != 0:
            return MetricsLog()
        file = JsonLinesSink(output / "metrics.jsonl", resume_step=resume_step)
        sinks: list[MetricsSink] = [file]
        if tensorboard:
            sinks.append(TensorBoardSink(output / "tensorboard", resume_step=resume_step))
        if wandb is not None:
            sinks.append(WandbSink(output, **wandb, settings=settings, resume_step=resume_step))
        if screen is not None:
            sinks.append(screen())
        return MetricsLog(sinks)


class JsonLinesSink:
    """Appends records to a file of JSON lines, which has each step of the run once.

    Opening the file drops lines that a killed run wrote after the resumed checkpoint: steps after
    `resume_step`, and a torn last line. The shortened file is written under a different name and
    then renamed. Every line is passed to the operating system at once. A log of a run without a
    checkpoint to resume from is set aside.

    Raises ConfigError when the file cannot be written.
    """

    def __init__(self, path: Path, *, resume_step: int) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                drop_after(path, resume_step)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._unwritable(error) from error

    def write(self, record: MetricsRecord) -> None:
        """Append one line."""
        try:
            self._file.write(to_json(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self, *, failed: bool = False) -> None:
        """Close the file; bytes that a full disk refused are lost, and raised an error before.

        Without saves, nothing else finds that the folder was removed.
        """
        with suppress(OSError):
            self._file.close()
        if not failed and not self._path.exists():
            logger.warning(
                "%s is gone, removed or renamed since the start of this run, and its figures with "
                "it; start it again, and leave the folder in place",
                self._path,
            )

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"output: cannot write {self._path}: {error.strerror}; free space or set `output` to"
            " a folder that can be written"
        )


def to_json(record: MetricsRecord) -> str:
    """Return `record` as one line of JSON.

    JSON has neither NaN nor infinity. Such a value becomes null, and `not_finite` maps its name
    (`validation.ce_loss` for a nested one) to "NaN", "Infinity" or "-Infinity".
    """
    not_finite: dict[str, str] = {}
    plain = _finite(record, "", not_finite)
    if not_finite:
        plain["not_finite"] = not_finite
    return json.dumps(plain, allow_nan=False)


def flat_scalars(record: MetricsRecord) -> Iterator[tuple[str, float]]:
    """Yield the numbers of `record` under names such as `train/ce_loss`, `validation/ce_loss`.

    Deeper nesting gives a longer name: `train/sources/wiki/ce_loss`. Bytes of answers have none,
    nor has a `step`: of the record, or the newest one of a teacher's ranks.
    """
    own = {one: one.replace("_", "/") for one in ("validation", "evaluation", "validation_seconds")}
    for name, value in record.items():
        if name != "answer_bytes":
            yield from _numbers(own.get(name, f"train/{name}"), value)


def _numbers(name: str, value: object) -> Iterator[tuple[str, float]]:
    is_left_out = isinstance(value, bool) or name.endswith("/step")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(f"{name}/{key}", {} if key == "groups" else inner)
    elif isinstance(value, (int, float)) and not is_left_out:
        yield name, float(value)


def _finite(record: MetricsRecord, prefix: str, not_finite: dict[str, str]) -> dict[str, object]:
    plain: dict[str, object] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            plain[name] = _finite(value, f"{prefix}{name}.", not_finite)
        elif isinstance(value, float) and not math.isfinite(value):
            plain[name] = None
            not_finite[prefix + name] = json.dumps(value)
        else:
            plain[name] = value
    return plain


_NO_TENSORBOARD = (
    "logging.tensorboard=true: the package tensorboard is not installed; run `pip install"
    " tensorboard` or set logging.tensorboard=false"
)
_NO_WANDB = (
    "logging.wandb: the package wandb is not installed; run `pip install wandb` or remove"
    " logging.wandb"
)


def require_installed(*, tensorboard: bool, wandb: bool) -> None:
    """Raise ConfigError unless the packages of the requested trackers are installed."""
    for is_wanted, package, message in (
        (tensorboard, "tensorboard", _NO_TENSORBOARD),
        (wandb, "wandb", _NO_WANDB),
    ):
        if is_wanted and find_spec(package) is None:
            raise ConfigError(message)


class TensorBoardSink:
    """Writes every number of a record as a scalar into TensorBoard event files.

    On resuming, scalars of steps after `resume_step` are marked as superseded.

    Raises ConfigError when tensorboard is not installed.
    """

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(_NO_TENSORBOARD) from error
        purge_step = resume_step + 1 if resume_step > 0 else None
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10)

    def write(self, record: MetricsRecord) -> None:
        """Add the scalars of one record."""
        for name, number in flat_scalars(record):
            self._writer.add_scalar(name, number, global_step=record["step"])

    def close(self, **_: object) -> None:
        """Write out the event file."""
        self._writer.close()


class WandbSink:
    """Writes every number of a record to a Weights & Biases run; offline needs no network.

    The run's id is stored in `output`, so that a resumed run continues under the same id. A resumed
    offline run adds a folder under `output/wandb`: upload them in order, the later ones with
    `wandb sync --append`.

    Raises ConfigError when wandb is not installed, or when an online run cannot be started.
    """

    def __init__(
        self,
        output: Path,
        *,
        project: str,
        name: str | None,
        mode: Literal["offline", "online"],
        settings: Mapping[str, object],
        resume_step: int,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(_NO_WANDB) from error
        output.mkdir(parents=True, exist_ok=True)
        id_file = output / "wandb_run_id"
        resumed = resume_step > 0 and id_file.exists()
        run_id = id_file.read_text(encoding="ascii").strip() if resumed else None
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                id=run_id,
                mode=mode,
                resume="allow" if resumed and mode == "online" else None,
                dir=str(output),
                config=dict(settings),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"logging.wandb.mode={mode}: cannot start a run of project {project!r}: {error};"
                " log in with `wandb login`, or set logging.wandb.mode=offline"
            ) from error
        id_file.write_text(self._run.id + "\n", encoding="ascii")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        place = self._run.url if mode == "online" else self._run.dir
        logger.info("wandb run %s: %s", self._run.id, place)

    def write(self, record: MetricsRecord) -> None:
        """Log the numbers of one record, with `step` as their x axis."""
        self._run.log({"step": record["step"], **dict(flat_scalars(record))})

    def close(self, **_: object) -> None:
        """Finish the run."""
        self._run.finish()


BY_SOURCE: Final = "by_source"
_AT: Final = "@"
_BY_LABEL: Final = frozenset({"ce", "teacher_ce"})  # means over labels, not distilled positions
_COUNTED: Final = ("ce", "kd")  # these also report the label count of their means

SourceFigures = dict[str, dict[str, float]]


def source_keys(names: Sequence[str], sources: Sequence[str]) -> tuple[str, ...]:
    """Return the reduced report's keys of figure `name`: `name@source`, source by source."""
    return tuple(f"{name}{_AT}{source}" for name in names for source in sources)


def split_report(report: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Take the scalars out of a report whose entries are ``[1 + sources]``.

    The entries per source go under `BY_SOURCE` as one vector, in the order of `source_keys`.
    """
    columns = torch.stack([report[name] for name in names])
    scalars = dict(zip(names, columns[:, 0].unbind(), strict=True))
    return {**scalars, BY_SOURCE: columns[:, 1:].reshape(-1)}


def name_of(key: str) -> str:
    """The figure's name in a key, with or without a source."""
    return key.partition(_AT)[0]


def step_figures(
    values: dict[str, float],
    step: StepBatches,
    sources: Sequence[str],
    *,
    terms: Sequence[str] = (),
    on_chunks: OnChunks | None = None,
) -> SourceFigures:
    """Take the sources' figures out of a step's values: losses and their label counts.

    A loss is the mean over the source's trained labels in the global batch: cross-entropy, all
    distillation, and each of these terms. Values of other names are dropped.
    """
    losses = {*_COUNTED, *terms}
    whole = LabelTotals.of([step], (), on_chunks)
    by_source = LabelTotals.of([step], sources, on_chunks)
    shares = {key: values.pop(key) for key in list(values) if _AT in key}
    means = {
        key: share * part_of(whole.behind(name_of(key)), by_source.behind(key))
        for key, share in shares.items()
        if name_of(key) in losses
    }
    return by_source.nested(means)[1]


@dataclass(frozen=True)
class OnChunks:
    """Terms between two tokenizers: means over chunks, or over chunks of one token on each side.

    Attributes:
        weights: of all terms in the distillation loss.
        of_chunks, of_pairs: names of the terms on chunks, and of those on pairs of tokens alone.
        of_ends: names of the losses between layers, at the chunks' ends.
    """

    weights: Mapping[str, float]
    of_chunks: frozenset[str]
    of_pairs: frozenset[str]
    of_ends: frozenset[str] = frozenset()

    def with_sums(self, means: Mapping[str, float]) -> dict[str, float]:
        """The means with `kd`, also of a source, as the weighted sum of its terms' means.

        The terms' counts differ, so that a mean of sums over several batches is none of them.
        """
        sums = {
            key: sum(weight * means[f"{term}{key[2:]}"] for term, weight in self.weights.items())
            for key in means
            if name_of(key) == "kd"
        }
        return {**means, **sums}


@dataclass(frozen=True)
class LabelTotals:
    """Counts of trained labels of some steps, in total and per source."""

    whole: LabelCounts
    by_source: Mapping[str, LabelCounts]
    on_chunks: OnChunks | None = None

    @classmethod
    def of(
        cls,
        steps: Sequence[StepBatches],
        sources: Sequence[str],
        on_chunks: OnChunks | None = None,
    ) -> LabelTotals:
        """Sum the steps' counts."""
        whole = _added(step.counts for step in steps)
        by_source = {
            source: _added(step.by_source[index] for step in steps)
            for index, source in enumerate(sources)
        }
        return cls(whole, by_source, on_chunks)

    def behind(self, key: str) -> float:
        """The weighted count of labels, or the count of chunks, in the mean under that key."""
        name, at, source = key.partition(_AT)
        counts = self.by_source[source] if at else self.whole
        if self.on_chunks is not None and name in self.on_chunks.of_ends:
            return counts.chunk_ends
        if self.on_chunks is not None and name in self.on_chunks.of_chunks:
            return counts.pairs if name in self.on_chunks.of_pairs else counts.chunks
        return counts.ce if name in _BY_LABEL else counts.kd

    def nested(self, means: Mapping[str, float]) -> tuple[dict[str, float], SourceFigures]:
        """Split the means of all labels from those per source, which get public names.

        Each source also reports its label count; a mean over no label is left out.
        """
        if self.on_chunks is not None:
            means = self.on_chunks.with_sums(means)
        overall: dict[str, float] = {}
        sources: SourceFigures = {}
        for key, mean in means.items():
            name, at, source = key.partition(_AT)
            if not at:
                overall[name] = mean
                continue
            figures = sources.setdefault(source, {})
            if name in _COUNTED:
                figures[f"{name}_tokens"] = self.behind(key)
            if self.behind(key):
                figures[PUBLIC_NAMES.get(name, name)] = mean
        return overall, sources


def part_of(count: float, whole: float) -> float:
    """The quotient of two counts of labels; zero where the divisor is zero."""
    return count / whole if whole else 0.0


def _added(counts: Iterable[LabelCounts]) -> LabelCounts:
    rows = [astuple(one) for one in counts]
    return LabelCounts(*map(sum, zip(*rows, strict=True))) if rows else LabelCounts(0, 0)
