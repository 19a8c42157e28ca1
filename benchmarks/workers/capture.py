"""A capture's work per step beside the teacher's forward pass; started by benchmarks/gpu.py."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from benchmarks.steps.cases import Case
from megatron_distill.runtime.launch import joined_world
from megatron_distill.runtime.torchrun import threads_per_process

_TIMEOUT_SECONDS = 600
_K = 64


def main() -> None:
    """Measure the case given by the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True, type=Path)
    parser.add_argument("--repeats", required=True, type=int)
    parser.add_argument("--result", required=True, type=Path)
    arguments = parser.parse_args()
    case = Case.from_dict(json.loads(arguments.case.read_text(encoding="utf-8")))
    with joined_world(
        device="auto",
        backend="auto",
        threads=threads_per_process(1),
        timeout_seconds=_TIMEOUT_SECONDS,
    ) as device:
        found = _measure(case, arguments.repeats, device.torch_device)
    arguments.result.write_text(json.dumps(found), encoding="utf-8")


def _measure(case: Case, repeats: int, device: torch.device) -> dict[str, float]:
    # Imported late: these import Megatron-Core, which must be prepared first.
    from benchmarks.steps.own_step import build_teacher
    from benchmarks.steps.subject import random_batches
    from megatron_distill.models.gpt import vocab_shard
    from megatron_distill.ops.frozen_head import output_chunks
    from megatron_distill.runtime.groups import Layout, create_groups, seed_everything
    from megatron_distill.signals import HiddenState
    from megatron_distill.store import CaptureSettings
    from megatron_distill.train.capture.positions import PositionCapture

    groups = create_groups(Layout(), timeout_minutes=_TIMEOUT_SECONDS // 60)
    seed_everything(1, groups)
    teacher = build_teacher(case, groups=groups, device=device)
    work = case.workload
    settings = CaptureSettings(
        k=_K, vocab_size=work.vocab_size, sequence_length=work.sequence_length
    )
    positions = PositionCapture(
        settings, vocab_shard(teacher.architecture, groups), groups.tensor, case.chunk_tokens
    )
    batches = random_batches(case, 0, groups=groups, device=device).micro_batches

    def forward() -> None:
        for _ in teacher.signals(batches):
            pass

    def logits() -> None:
        for batch, signal in zip(batches, teacher.signals(batches), strict=True):
            assert signal is not None, "one stage"
            state = signal.logit_source()
            assert isinstance(state, HiddenState)
            assert batch.trained_rows_n is not None
            for _ in output_chunks(
                state,
                batch.trained_rows_n,
                chunk_tokens=case.chunk_tokens,
                columns=positions.shard.real_width,
            ):
                pass

    def capture() -> None:
        for batch, signal in zip(batches, teacher.signals(batches), strict=True):
            assert signal is not None, "one stage"
            state = signal.logit_source()
            assert isinstance(state, HiddenState)
            positions(state, batch).whole(batch, groups.context).begin_copy()()

    return {
        "tokens": float(case.tokens_per_step),
        "forward": _seconds(forward, repeats, device),
        "logits": _seconds(logits, repeats, device),
        "capture": _seconds(capture, repeats, device),
    }


def _seconds(run: Callable[[], None], repeats: int, device: torch.device) -> float:
    """Median seconds of a run after one unrecorded, the device's work included."""
    taken = []
    for _ in range(1 + repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - started)
    return median(taken[1:])


if __name__ == "__main__":
    main()
