"""Everything that is claimed of GPUs, measured on one GPU in at most eight minutes.

    python benchmarks/gpu.py                     # all parts; PYTHONPATH=. where it is not installed
    python benchmarks/gpu.py --parts step,capture
    python benchmarks/gpu.py --quick             # small shapes, to test the harness on any machine

Each part runs in processes of its own and is written as soon as it ends, so that a part that fails
or runs out of time costs no other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.children import run_child
from benchmarks.harness.environment import ROOT, describe, installed
from benchmarks.harness.summary import compare, summarise
from benchmarks.steps.cases import Body, Case, Ranks, Workload

MIB = 2**20
# A Llama 3.2 1B beside a Llama 3.1 8B, random weights.
_STUDENT, _TEACHER = Body(16, 2048, 8192, 32, 8), Body(32, 4096, 14_336, 32, 8)
_LARGE = Workload("1B beside 8B", _STUDENT, _TEACHER, 128_256, 8192, 1, 2)
_SMALL = Workload("tiny", Body(2, 64, 160, 4, 2), Body(2, 96, 256, 4, 2), 512, 64, 1, 2)
_ONE = Ranks("TP1", 1)
_CHUNK = 2048
# ModelOpt keeps several fp32 copies of a micro-batch's logits: 8,192 tokens of them do not fit.
_PEER_LENGTH = 4096
# Lengths of documents: one, and those of a web corpus.
_ATTENTION = ((8192, "whole"), (8192, "packed"), (32_768, "packed"))


@dataclass(frozen=True)
class Settings:
    """Sizes of all parts."""

    workload: Workload
    precision: str
    losses: tuple[int, int]  # tokens and vocabulary
    attention: Sequence[tuple[int, str]]
    repeats: int
    steps: int
    profile: Path | None = None  # the file of the operators of a step


LARGE = Settings(_LARGE, "bf16", (8192, 128_256), _ATTENTION, repeats=5, steps=3)
SMALL = Settings(_SMALL, "fp32", (64, 512), ((512, "packed"),), repeats=1, steps=1)


@dataclass
class Report:
    """The parts that have ended; written anew after each."""

    path: Path
    environment: dict[str, str]
    lines: list[str] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def add(self, name: str, seconds: float, lines: Sequence[str], raw: Any) -> None:
        """Add a part that has ended."""
        self.lines += [f"## {name} ({seconds:.0f} s)", "", *lines, ""]
        self.raw[name] = raw
        self.write()

    def write(self) -> None:
        """Write the Markdown and the raw figures."""
        facts = [f"- {key}: {value}" for key, value in self.environment.items()]
        text = "\n".join(["# One GPU", "", *facts, "", *self.lines])
        self.path.with_suffix(".md").write_text(text, encoding="utf-8")
        kept = {"environment": self.environment, "parts": self.raw}
        self.path.with_suffix(".json").write_text(json.dumps(kept, indent=1), encoding="utf-8")


def main() -> int:
    """Run the chosen parts; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated, in this order")
    parser.add_argument("--quick", action="store_true", help="small shapes; figures mean nothing")
    parser.add_argument("--seconds", type=float, default=470, help="budget of the whole run")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--name", default="gpu", help="what the result files are called")
    arguments = parser.parse_args()
    if not arguments.quick and not torch.cuda.is_available():
        parser.error("no GPU is visible; --quick tests the harness without one")
    profile = arguments.output / f"{arguments.name}_profile.md"
    settings = replace(SMALL if arguments.quick else LARGE, profile=profile)
    arguments.output.mkdir(parents=True, exist_ok=True)
    report = Report(arguments.output / arguments.name, _environment(sys.argv[1:], arguments.quick))
    end = time.monotonic() + arguments.seconds
    for name in arguments.parts.split(","):
        _run_part(name, settings, report, end=end)
    if report.failed:
        print(f"failed: {', '.join(report.failed)}")
    return 1 if report.failed else 0


def _run_part(name: str, settings: Settings, report: Report, *, end: float) -> None:
    left, started = end - time.monotonic(), time.monotonic()
    if left <= 0:
        report.failed.append(name)
        report.add(name, 0, ["Not run: the time was over."], None)
        return
    try:
        lines, raw = PARTS[name](settings, left)
    except (SystemExit, subprocess.TimeoutExpired, OSError) as error:
        report.failed.append(name)
        lines, raw = ["Failed:", "", "```", str(error)[-2000:], "```"], None
    report.add(name, time.monotonic() - started, lines, raw)
    print("\n".join([f"## {name}", *lines]), flush=True)


def _environment(words: Sequence[str], quick: bool) -> dict[str, str]:
    found = describe("benchmarks/gpu.py", words)
    if not quick:
        device = torch.cuda.get_device_properties(0)
        found["GPU"] = f"{device.name}, {device.total_memory / 2**30:.0f} GiB"
        found["CUDA"] = str(torch.version.cuda)
    return found


def _tests(_: Settings, seconds: float) -> tuple[list[str], Any]:
    """The tests that need a device."""
    command = [sys.executable, "-m", "pytest", "tests", "-m", "gpu", "-q", "--no-header"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    last = done.stdout.strip().splitlines()[-12:]
    # Status 5: no test was selected, as on a machine whose tests are all skipped.
    if done.returncode not in (0, 5):
        raise SystemExit("\n".join(last))
    return last[-1:], {"status": done.returncode, "last": last}


def _losses(settings: Settings, seconds: float) -> tuple[list[str], Any]:
    """Each loss beside its peers' and beside a copy of the bytes that it must move."""
    tokens, vocab = settings.losses
    words = [f"--tokens={tokens}", f"--vocab={vocab}", f"--precision={settings.precision}"]
    words += ["--tensor=1", f"--repeats={settings.repeats}"]
    rows = run_child("objectives/worker.py", words, processes=1, name="losses", seconds=seconds)
    first: dict[str, Any] = {}
    lines = [
        "| loss | subject | ms | against ours | memory (logit tensors) |",
        "|---|---|---:|---:|---:|",
    ]
    for row in sorted(rows, key=lambda row: str(row["family"])):
        ours = first.setdefault(row["family"], row)
        lines.append(
            f"| {row['family']} | {row['subject']} | {row['seconds'] * 1e3:.2f} | "
            f"{row['seconds'] / ours['seconds']:.2f}x | "
            f"{row['extra_bytes'] / row['logit_bytes']:.2f} |"
        )
    return lines, rows


def _attention(settings: Settings, seconds: float) -> tuple[list[str], Any]:
    """Attention over documents beside the masked form."""
    lines = ["| case | subject | tokens/s | peak (MiB) |", "|---|---|---:|---:|"]
    raw: dict[str, Any] = {}
    end = time.monotonic() + seconds
    for length, documents in settings.attention:
        for subject in ("ours", "masked"):
            words = ["--part", "attention", "--length", str(length), "--documents", documents]
            words += ["--subject", subject, "--device", "auto"]
            words += ["--precision", settings.precision]
            case = f"{length:,} {documents}"
            found = run_child(
                "workers/attention.py",
                words,
                processes=1,
                name=f"attention {case}, {subject}",
                seconds=end - time.monotonic(),
            )
            raw[f"{case}, {subject}"] = found
            lines.append(
                f"| {case} | {subject} | {found['tokens_per_second']:,.0f} | "
                f"{found['peak'] / MIB:,.0f} |"
            )
    return lines, raw


def _step(settings: Settings, seconds: float) -> tuple[list[str], Any]:
    """A training step, and the same beside ModelOpt's at a length that fits it."""
    end = time.monotonic() + seconds
    workload = settings.workload
    peer_length = min(_PEER_LENGTH, workload.sequence_length)
    shorter = replace(workload, sequence_length=peer_length)
    runs = [("ours", workload)]
    if installed("nvidia-modelopt") is not None:
        runs += [("ours", shorter), ("peer", shorter)]
    lines = [
        "| tokens a step, sequence | subject | tokens/s | TFLOP/s | MFU | teacher | peak (MiB) |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    raw: dict[str, Any] = {}
    rows = []
    for subject, work in runs:
        case = Case(work, _ONE, settings.precision, chunk_tokens=_CHUNK)
        profile = None if raw else settings.profile
        found = _child_step(
            case, subject, settings, seconds=end - time.monotonic(), profile=profile
        )
        row = summarise(case, subject, [found])
        rows.append(row)
        raw[f"{subject} {work.sequence_length}"] = found
        flops, share = _utilisation(case, row.tokens_per_second)
        teacher = "" if row.teacher_share is None else f"{row.teacher_share:.0%}"
        lines.append(
            f"| {case.tokens_per_step:,}, {work.sequence_length:,} | {subject} | "
            f"{row.tokens_per_second:,.0f} | {flops / 1e12:.0f} | {share} | {teacher} | "
            f"{row.step_peak_mib:,.0f} |"
        )
    if len(rows) == len(("ours", "ours", "peer")):
        ratio = compare(rows[1], rows[2])
        lines += ["", f"Against ModelOpt: {ratio.tokens_per_second:.2f}x the tokens/s, "]
        lines[-1] += f"1/{ratio.step_peak:.1f} of the peak memory."
        raw["ratio"] = asdict(ratio)
    return lines, raw


def _child_step(
    case: Case, subject: str, settings: Settings, *, seconds: float, profile: Path | None
) -> Any:
    words = ["--subject", subject, "--warmup", "2", "--steps", str(settings.steps)]
    if profile is not None:
        words += ["--profile", str(profile)]
    return _run_case("steps/worker.py", case, words, name=f"step {subject}", seconds=seconds)


def _run_case(worker: str, case: Case, words: Sequence[str], *, name: str, seconds: float) -> Any:
    """Run a worker on a case, which it reads from a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.json"
        path.write_text(json.dumps(case.as_dict()), encoding="utf-8")
        told = ["--case", str(path), *words]
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


def _capture(settings: Settings, seconds: float) -> tuple[list[str], Any]:
    """A top-64 capture beside the teacher's forward pass alone."""
    case = Case(settings.workload, _ONE, settings.precision, chunk_tokens=_CHUNK)
    words = ["--repeats", str(settings.repeats)]
    found = _run_case("workers/capture.py", case, words, name="capture", seconds=seconds)
    rate = {name: found["tokens"] / found[name] for name in ("forward", "capture")}
    return [
        "| work | tokens/s |",
        "|---|---:|",
        f"| teacher's forward pass | {rate['forward']:,.0f} |",
        f"| with top-64, log-sum-exp, entropy on the host | {rate['capture']:,.0f} |",
        "",
        f"The capture is {found['capture'] / found['forward'] - 1:.1%} slower.",
    ], found


PARTS: dict[str, Callable[[Settings, float], tuple[list[str], Any]]] = {
    "losses": _losses,
    "attention": _attention,
    "step": _step,
    "capture": _capture,
    "tests": _tests,
}


if __name__ == "__main__":
    sys.exit(main())
