"""Everything that is claimed of GPUs, measured on one GPU in at most eight minutes.

    python benchmarks/gpu.py                     # all parts; PYTHONPATH=. where it is not installed
    python benchmarks/gpu.py --parts step,capture
    python benchmarks/gpu.py --quick             # small shapes, to test the harness on any machine

Each case runs in a process of its own and is written as soon as it ends. A case that fails costs no
other, and a part has its share of the time: what it does not use is for the parts after it.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.harness.children import ChildFailed, run_child, run_to_end
from benchmarks.harness.environment import ROOT, describe, installed
from benchmarks.harness.summary import Row, compare, summarise
from benchmarks.steps.cases import Body, Case, Ranks, Workload
from benchmarks.workers.row_kernels import KERNELS
from megatron_distill.runtime.torchrun import available_cores

MIB = 2**20
# A Llama 3.2 1B beside a Llama 3.1 8B, random weights.
_STUDENT, _TEACHER = Body(16, 2048, 8192, 32, 8), Body(32, 4096, 14_336, 32, 8)
_LARGE = Workload("1B beside 8B", _STUDENT, _TEACHER, 128_256, 8192, 1, 2)
_SMALL = Workload("tiny", Body(2, 64, 160, 4, 2), Body(2, 96, 256, 4, 2), 512, 64, 1, 2)
_ONE = Ranks("TP1", 1)
_CHUNK = 2048
# ModelOpt keeps several fp32 copies of a micro-batch's logits: 8,192 tokens of them do not fit.
_PEER_LENGTH = 4096
_RUN_STEPS, _RUN_WARMUP = 20, 4
_TEST_PROCESSES = 8
_TEST_LINES = 60  # of the output of tests that failed
# As pytest writes it in processes and in its summary, and as it does in one process.
_ENDED = "PASSED|FAILED|ERROR"
_OUTCOME = re.compile(rf"(?:^| )({_ENDED}) (\S+::.*)|^(\S+::.*) ({_ENDED})\b")
# Lengths of documents: one, and those of a web corpus.
_ATTENTION = ((8192, "whole"), (8192, "packed"), (32_768, "packed"))


@dataclass(frozen=True)
class Settings:
    """Sizes of all parts."""

    workload: Workload
    precision: str
    losses: tuple[int, int, int]  # tokens, vocabulary, and an odd vocabulary, as Qwen2.5 has
    attention: Sequence[tuple[int, str]]
    repeats: int
    steps: int
    profile: Path | None = None  # the file of the operators of a step


LARGE = Settings(_LARGE, "bf16", (8192, 128_256, 151_665), _ATTENTION, repeats=3, steps=3)
SMALL = Settings(_SMALL, "fp32", (64, 512, 499), ((512, "packed"),), repeats=1, steps=1)


@dataclass
class Part:
    """One part: the cases that have ended, and the table of those that succeeded."""

    name: str
    end: float
    write: Callable[[], None]
    lines: list[str] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    seconds: float | None = None  # None: it is running

    @property
    def left(self) -> float:
        """Seconds that are left to it."""
        return self.end - time.monotonic()

    def measure(self, case: str, run: Callable[[float], Any]) -> Any:
        """Run a case in the seconds that are left; return its figures, None if it has none.

        A case that failed late has those that it had written.
        """
        found = None
        if self.left <= 0:
            self.failures.append(f"{case}: not run, the time was over")
        else:
            try:
                found = self.raw[case] = run(self.left)
            except ChildFailed as error:
                self.failures.append(f"{case}: {str(error)[-2000:]}")
                if error.result is not None:
                    found = self.raw[case] = error.result
            except (OSError, ValueError) as error:
                self.failures.append(f"{case}: {str(error)[-2000:]}")
        self.write()
        return found

    def text(self) -> list[str]:
        """Return the part as Markdown."""
        ended = "running" if self.seconds is None else f"{self.seconds:.0f} s"
        failed = [line for one in self.failures for line in ("Failed:", "", "```", one, "```", "")]
        return [f"## {self.name} ({ended})", "", *self.lines, "", *failed]


@dataclass
class Report:
    """All parts so far; written anew after each case."""

    path: Path
    environment: dict[str, str]
    parts: list[Part] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        """The parts in which a case failed."""
        return [part.name for part in self.parts if part.failures]

    def run(self, name: str, settings: Settings, *, end: float) -> None:
        """Run a part until it ends or its time does."""
        started = time.monotonic()
        part = Part(name, end, self.write)
        self.parts.append(part)
        PARTS[name].run(settings, part)
        part.seconds = time.monotonic() - started
        self.write()
        print("\n".join(part.text()), flush=True)

    def write(self) -> None:
        """Write the Markdown and the raw figures."""
        facts = [f"- {key}: {value}" for key, value in self.environment.items()]
        lines = [line for part in self.parts for line in part.text()]
        text = "\n".join(["# One GPU", "", *facts, "", *lines])
        self.path.with_suffix(".md").write_text(text, encoding="utf-8")
        raw = {part.name: part.raw for part in self.parts}
        kept = {"environment": self.environment, "parts": raw}
        self.path.with_suffix(".json").write_text(json.dumps(kept, indent=1), encoding="utf-8")


def main() -> int:
    """Run the chosen parts; return 1 if a case failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated, in this order")
    parser.add_argument("--quick", action="store_true", help="small shapes; figures mean nothing")
    parser.add_argument("--seconds", type=float, default=470, help="budget of the whole run")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--name", default="gpu", help="what the result files are called")
    arguments = parser.parse_args()
    names = arguments.parts.split(",")
    if not set(names) <= set(PARTS):
        parser.error(f"--parts {arguments.parts}: the parts are {', '.join(PARTS)}")
    if not arguments.quick and not torch.cuda.is_available():
        parser.error("no GPU is visible; --quick tests the harness without one")
    profile = arguments.output / f"{arguments.name}_profile.md"
    settings = replace(SMALL if arguments.quick else LARGE, profile=profile)
    arguments.output.mkdir(parents=True, exist_ok=True)
    report = Report(arguments.output / arguments.name, _environment(sys.argv[1:], arguments.quick))
    end = time.monotonic() + arguments.seconds
    while names:
        left = max(0.0, end - time.monotonic())
        share = PARTS[names[0]].share / sum(PARTS[name].share for name in names)
        report.run(names.pop(0), settings, end=time.monotonic() + left * share)
    if report.failed:
        print(f"failed: {', '.join(report.failed)}")
    return 1 if report.failed else 0


def _environment(words: Sequence[str], quick: bool) -> dict[str, str]:
    found = describe("benchmarks/gpu.py", words)
    if not quick:
        device = torch.cuda.get_device_properties(0)
        found["GPU"] = f"{device.name}, {device.total_memory / 2**30:.0f} GiB"
        found["CUDA"] = str(torch.version.cuda)
    return found


def _tests(_: Settings, part: Part) -> None:
    """The tests that need a device."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    # Those that start whole runs take longest.
    files.sort(key=lambda path: ("e2e" in path.parts, path))
    part.measure("tests", lambda seconds: _run_tests(files, part, seconds))


def _run_tests(files: Sequence[Path], part: Part, seconds: float) -> dict[str, Any]:
    """Run the files' tests on a device; those that ended count, also if the time was over."""
    words = ["-m", "gpu", "-v", "--no-header", "--continue-on-collection-errors"]
    if find_spec("xdist") is not None:
        words += ["-n", str(min(_TEST_PROCESSES, available_cores()))]
    command = [sys.executable, "-m", "pytest", *map(str, files), *words]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        status = run_to_end(
            command, environment={}, output=output, errors=subprocess.STDOUT, seconds=seconds
        )
        output.seek(0)
        lines = output.read().splitlines()
    ended = _outcomes(lines)
    passed = sum(outcome == "PASSED" for outcome in ended.values())
    part.lines += [f"{passed} of {len(ended)} tests that ended have passed."]
    if status is None:
        part.failures.append(f"tests: not ended after {seconds:.0f} s")
    # Status 5: no test was selected, as on a machine whose tests are all skipped.
    elif status not in (0, 5):
        part.failures.append("\n".join(["tests:", *lines[-_TEST_LINES:]]))
    return {"status": status, "ended": ended, "last": lines[-_TEST_LINES:]}


def _outcomes(lines: Sequence[str]) -> dict[str, str]:
    """Return the outcome of each test by its name; one that failed is named in the summary too."""
    found: dict[str, str] = {}
    for line in lines:
        if (match := _OUTCOME.search(line.partition(" - ")[0])) is not None:
            before, own, name, after = match.groups()
            found[(name or own).strip()] = before or after
    return found


def _kernels(settings: Settings, part: Part) -> None:
    """The row kernels of losses from given logits, and a copy of ten bytes per logit."""
    tokens, vocab, _ = settings.losses
    words = [f"--tokens={tokens}", f"--vocab={vocab}", f"--precision={settings.precision}"]
    words.append(f"--repeats={settings.repeats}")
    found = part.measure(
        "kernels",
        lambda seconds: run_child(
            "workers/row_kernels.py", words, processes=1, name="kernels", seconds=seconds
        ),
    )
    if found is None:
        return
    columns = [*KERNELS, "all"]
    part.lines += [f"| work, ms | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for name, seconds in found.items():
        cells = [f"{seconds[one] * 1e3:.2f}" if one in seconds else "" for one in columns]
        part.lines.append(f"| {name} | {' | '.join(cells)} |")


def _losses(settings: Settings, part: Part) -> None:
    """Each loss beside its peers' and beside a copy of the bytes that it must move.

    Those from hidden states once more with a vocabulary whose rows of logits would not be aligned.
    """
    tokens, vocab, odd = settings.losses
    words = [f"--tokens={tokens}", f"--precision={settings.precision}", "--tensor=1"]
    part.lines += [
        "| loss | subject | ms | against ours | memory (logit tensors) |",
        "|---|---|---:|---:|---:|",
    ]
    cases = (
        ("logits", vocab, settings.repeats, ""),
        ("hidden", vocab, settings.repeats, ""),
        ("hidden", odd, min(2, settings.repeats), f", {odd:,} ids"),
    )
    for inputs, ids, repeats, suffix in cases:
        told = [*words, f"--vocab={ids}", f"--inputs={inputs}", f"--repeats={repeats}"]
        name = inputs + suffix

        def run(seconds: float, told: list[str] = told, name: str = name) -> Any:
            return run_child("objectives/worker.py", told, processes=1, name=name, seconds=seconds)

        rows = part.measure(name, run) or []
        rows = [row | {"family": f"{row['family']}{suffix}"} for row in rows]
        ended = [row for row in rows if row["seconds"] < math.inf]
        missing = [row for row in rows if row not in ended]
        part.lines += _loss_rows(ended)
        part.failures += [f"{row['family']}: {row['subject']}" for row in missing]


def _loss_rows(rows: Sequence[dict[str, Any]]) -> list[str]:
    first: dict[str, Any] = {}
    lines = []
    for row in sorted(rows, key=lambda row: str(row["family"])):
        ours = first.setdefault(row["family"], row)
        lines.append(
            f"| {row['family']} | {row['subject']} | {row['seconds'] * 1e3:.2f} | "
            f"{row['seconds'] / ours['seconds']:.2f}x | "
            f"{row['extra_bytes'] / row['logit_bytes']:.2f} |"
        )
    return lines


def _attention(settings: Settings, part: Part) -> None:
    """Attention over documents beside the masked form, all in one process."""
    part.lines += ["| case | subject | tokens/s | peak (MiB) |", "|---|---|---:|---:|"]
    cases = [
        (length, documents, subject)
        for length, documents in settings.attention
        for subject in ("ours", "masked")
    ]
    words = ["--part=attention", f"--cases={json.dumps(cases)}", "--device=auto"]
    words.append(f"--precision={settings.precision}")
    found = part.measure(
        "attention",
        lambda seconds: run_child(
            "workers/attention.py", words, processes=1, name="attention", seconds=seconds
        ),
    )
    for case in (found or {}).values():
        figures = case["figures"]
        cells = ["out of memory", ""]
        if figures is not None:
            cells = [f"{figures['tokens_per_second']:,.0f}", f"{figures['peak'] / MIB:,.0f}"]
        name = f"{case['length']:,} {case['documents']} | {case['subject']}"
        part.lines.append(f"| {name} | {' | '.join(cells)} |")


def _step(settings: Settings, part: Part) -> None:
    """A training step, and the same beside ModelOpt's at a length that fits it."""
    workload = settings.workload
    peer_length = min(_PEER_LENGTH, workload.sequence_length)
    shorter = replace(workload, sequence_length=peer_length)
    runs = [("ours", workload)]
    if installed("nvidia-modelopt") is not None:
        runs += [("ours", shorter)] if shorter != workload else []
        runs += [("peer", shorter)]
    part.lines += [
        "| tokens a step, sequence | subject | tokens/s | TFLOP/s | MFU | teacher | peak (MiB) |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    cases = [Case(work, _ONE, settings.precision, chunk_tokens=_CHUNK) for _, work in runs]
    words = ["--subject", *(subject for subject, _ in runs)]
    words += ["--warmup", "2", "--steps", str(settings.steps)]
    if settings.profile is not None:
        words += ["--profile", str(settings.profile)]
    found = part.measure(
        "steps",
        lambda seconds: _run_cases("steps/worker.py", cases, words, name="steps", seconds=seconds),
    )
    found = found if isinstance(found, list) or found is None else [found]
    rows: dict[tuple[str, int], Row] = {}
    for case, measured in zip(cases, found or [], strict=False):  # fewer if the time was over
        subject, length = measured["subject"], case.workload.sequence_length
        row = rows[subject, length] = summarise(case, subject, [measured])
        flops, share = _utilisation(case, row.tokens_per_second)
        teacher = "" if row.teacher_share is None else f"{row.teacher_share:.0%}"
        part.lines.append(
            f"| {case.tokens_per_step:,}, {length:,} | {subject} | "
            f"{row.tokens_per_second:,.0f} | {flops / 1e12:.0f} | {share} | {teacher} | "
            f"{row.step_peak_mib:,.0f} |"
        )
    ours, peer = (rows.get((subject, peer_length)) for subject in ("ours", "peer"))
    if ours is not None and peer is not None:
        ratio = compare(ours, peer)
        part.lines += ["", f"Against ModelOpt: {ratio.tokens_per_second:.2f}x the tokens/s, "]
        part.lines[-1] += f"1/{ratio.step_peak:.1f} of the peak memory."
        part.raw["ratio"] = asdict(ratio)


def _run_cases(
    worker: str, cases: Sequence[Case], words: Sequence[str], *, name: str, seconds: float
) -> Any:
    """Run a worker on cases, which it reads from files."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"case_{number}.json" for number in range(len(cases))]
        for path, case in zip(paths, cases, strict=True):
            path.write_text(json.dumps(case.as_dict()), encoding="utf-8")
        told = ["--case", *map(str, paths), *words]
        return run_child(worker, told, processes=1, name=name, seconds=seconds)


def _utilisation(case: Case, tokens_per_second: float) -> tuple[float, str]:
    """Return FLOP/s of the models' products, and their share of the device's peak."""
    from megatron_distill.runtime.mcore_patches import prepare_megatron_core

    prepare_megatron_core(on_cuda=torch.cuda.is_available())
    from benchmarks.steps.subject import architecture
    from megatron_distill.models.flops import step_flops_per_token
    from megatron_distill.train.throughput import mfu

    shapes = [architecture(body, case) for body in (case.workload.student, case.workload.teacher)]
    flops = step_flops_per_token(*shapes, sequence_length=case.workload.sequence_length).total
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    share = mfu(
        flops,
        tokens_per_second=tokens_per_second,
        num_devices=1,
        device_name=name,
        precision="bf16" if case.precision == "bf16" else "fp32",
    )
    return flops * tokens_per_second, "" if share is None else f"{share:.0%}"


def _run(settings: Settings, part: Part) -> None:
    """Steps of `train` with its loader, vote, timers and log, beside the same steps alone.

    Both models have the student's shape: a run draws its weights on the host.
    """
    work = settings.workload
    shape = {name: value for name, value in asdict(work.student).items() if value is not None}
    words = [f"{role}.architecture={json.dumps(shape)}" for role in ("student", "teacher")]
    words += [f"data.sequence_length={work.sequence_length}", "validation.interval=0"]
    words += [f"train.steps={_RUN_STEPS}", f"train.precision={settings.precision}"]
    words += [f"train.global_batch_size={work.micro_batches}", "checkpoint.save=false"]
    with tempfile.TemporaryDirectory() as folder:
        words.append(f"output={folder}/run")
        found = part.measure(
            "run",
            lambda seconds: run_child(
                "workers/loop.py", words, processes=1, name="run", seconds=seconds
            ),
        )
    if found is None:
        return
    loop, alone = (1e3 * median(found[name][_RUN_WARMUP:]) for name in ("loop", "alone"))
    part.lines += [
        "| work | ms a step |",
        "|---|---:|",
        f"| `train` | {loop:.1f} |",
        f"| its step alone | {alone:.1f} |",
    ]


def _capture(settings: Settings, part: Part) -> None:
    """A top-64 capture beside the teacher's forward pass alone."""
    case = Case(settings.workload, _ONE, settings.precision, chunk_tokens=_CHUNK)
    words = ["--repeats", str(settings.repeats)]
    found = part.measure(
        "capture",
        lambda seconds: _run_cases(
            "workers/capture.py", [case], words, name="capture", seconds=seconds
        ),
    )
    if found is None:
        return
    rate = {name: found["tokens"] / found[name] for name in ("forward", "logits", "capture")}
    part.lines += [
        "| work | tokens/s |",
        "|---|---:|",
        f"| teacher's hidden states | {rate['forward']:,.0f} |",
        f"| its logits, chunk by chunk | {rate['logits']:,.0f} |",
        f"| with top-64, log-sum-exp, entropy on the host | {rate['capture']:,.0f} |",
        "",
        f"The capture is {found['capture'] / found['logits'] - 1:.1%} slower than the logits.",
    ]


@dataclass(frozen=True)
class Kind:
    """A part's work, and its share of the time."""

    run: Callable[[Settings, Part], None]
    share: float


PARTS: dict[str, Kind] = {
    "step": Kind(_step, 7),
    "run": Kind(_run, 3),
    "capture": Kind(_capture, 2),
    "attention": Kind(_attention, 2),
    "kernels": Kind(_kernels, 1),
    "losses": Kind(_losses, 4),
    "tests": Kind(_tests, 4),
}


if __name__ == "__main__":
    sys.exit(main())
