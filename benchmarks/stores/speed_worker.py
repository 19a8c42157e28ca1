"""Writing and reading of one layout after another on one core; started by benchmarks/store.py."""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.stores.data import VOCAB_SIZE, MadeUpSample, made_up_sample, record_of, top_k_of
from benchmarks.stores.peers import (
    EXAMPLE_KEYS,
    ExampleParser,
    example_features,
    example_parsers,
    write_example,
    write_examples,
)
from benchmarks.stores.sizes import write_store
from megatron_distill.store import CaptureSettings, SampleRecord, StoreReader

_BATCH: Final = 4
_BLOCK_BYTES: Final = 1 << 20
_OWN_CODECS: Final = ("u8", "f16")
_READ_OPTIONS: Final = "readahead_buffer_size:0"


@dataclass(frozen=True)
class Subject:
    """A layout with its setting at one k, over so many tokens."""

    name: str
    k: int
    tokens: int


@dataclass
class Timings:
    """Seconds of each subject's work in each round, by the clock and of the processor.

    Attributes:
        seconds: of each counted round.
        cpu_seconds: likewise, over all threads.
        sizes: bytes of a subject's files.
        keeps: whether rounds count; the first warms everything up.
    """

    seconds: dict[tuple[Subject, str], list[float]] = field(default_factory=dict)
    cpu_seconds: dict[tuple[Subject, str], list[float]] = field(default_factory=dict)
    sizes: dict[Subject, int] = field(default_factory=dict)
    keeps: bool = False

    def run(self, subject: Subject, action: str, work: Callable[[], object]) -> None:
        """Time `work()` once."""
        gc.collect()
        started, cpu_started = time.perf_counter(), time.process_time()
        work()
        cpu, seconds = time.process_time() - cpu_started, time.perf_counter() - started
        if self.keeps:
            self.seconds.setdefault((subject, action), []).append(seconds)
            self.cpu_seconds.setdefault((subject, action), []).append(cpu)

    def as_json(self) -> list[dict[str, Any]]:
        """Plain values, one row per subject and action."""
        return [
            vars(subject)
            | {
                "action": action,
                "seconds": seconds,
                "cpu_seconds": self.cpu_seconds[subject, action],
                "file_bytes": self.sizes.get(subject),
            }
            for (subject, action), seconds in self.seconds.items()
        ]


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--positions", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--k", type=int, nargs="+", required=True)
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    # One core for everything, ArrayRecord's threads included.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    samples = [made_up_sample(number, given.positions) for number in range(given.samples)]
    records = {
        k: [record_of(sample, k, sample_id=number) for number, sample in enumerate(samples)]
        for k in given.k
    }
    timings = Timings()
    with tempfile.TemporaryDirectory(dir=given.folder) as place:
        for number in range(given.rounds + 1):
            timings.keeps = number > 0
            for k in given.k:
                for codec in _OWN_CODECS:
                    _own(timings, Path(place), records[k], codec)
                _maxtext(timings, Path(place), samples, k)
    given.result.write_text(json.dumps(timings.as_json()), encoding="utf-8")


def _own(timings: Timings, place: Path, records: Sequence[SampleRecord], codec: str) -> None:
    folder, count = place / "store", len(records)
    positions, k = top_k_of(records[0]).ids_SK.shape
    settings = CaptureSettings(k=k, vocab_size=VOCAB_SIZE, sequence_length=positions, codec=codec)
    subject = Subject(f"ours, {codec}", k, count * positions)
    os.sync()
    timings.run(subject, "write", lambda: write_store(folder, records, settings, count=count))
    files = sorted(folder.rglob("*.array_record"))
    _beside_plain_files(timings, subject, place, files)
    with StoreReader.open(folder) as reader:

        def read() -> None:
            for at in range(0, count, _BATCH):
                reader.read(range(at, min(at + _BATCH, count)))

        def read_packed() -> None:
            for sample_id in range(count):
                reader.packed(sample_id)

        timings.run(subject, "read", read)
        timings.run(subject, "packed", read_packed)
    shutil.rmtree(folder)


def _maxtext(timings: Timings, place: Path, samples: Sequence[MadeUpSample], k: int) -> None:
    """MaxText's layout; its files hold exactly the entries that its reader takes."""
    from array_record.python import array_record_module

    path, tokens = place / "part", len(samples) * len(samples[0].logits_SK)
    features = [
        {name: values for name, values in all_features.items() if name in EXAMPLE_KEYS}
        for all_features in (example_features(sample, k, is_bf16=False) for sample in samples)
    ]
    subject = Subject("MaxText", k, tokens)
    os.sync()
    timings.run(
        subject, "write", lambda: write_examples(path, [write_example(one) for one in features])
    )
    _beside_plain_files(timings, subject, place, [path])
    file = array_record_module.ArrayRecordReader(str(path), _READ_OPTIONS)
    for parser in example_parsers():

        def read(parser: ExampleParser = parser) -> None:
            for at in range(0, len(samples), _BATCH):
                for content in file.read(list(range(at, min(at + _BATCH, len(samples))))):
                    parser.parse(content)

        timings.run(replace(subject, name=f"MaxText, {parser.name}"), "read", read)
    file.close()
    path.unlink()


def _beside_plain_files(
    timings: Timings, subject: Subject, place: Path, files: Sequence[Path]
) -> None:
    """The same bytes read and written as they are, to and from the page cache, flushed as ours."""
    content = [path.read_bytes() for path in files]
    timings.sizes[subject] = sum(map(len, content))
    copy = place / "copy"
    os.sync()
    timings.run(subject, "plain write", lambda: _write_plainly(copy, content))
    copy.unlink()
    timings.run(subject, "plain read", lambda: _read_plainly(files))


def _read_plainly(files: Sequence[Path]) -> None:
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    for path in files:
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def _write_plainly(path: Path, contents: Sequence[bytes]) -> None:
    with path.open("wb", buffering=0) as stream:
        for content in contents:
            view = memoryview(content)
            while view:
                view = view[stream.write(view) :]
        os.fsync(stream.fileno())


if __name__ == "__main__":
    main()
