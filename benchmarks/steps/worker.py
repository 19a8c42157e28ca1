"""One measurement in separate processes, started by `benchmarks/step.py`, or several in turn.

Reads a case, builds one subject, warms it up, times steps, then takes two more for memory, and
writes one JSON object from rank 0; of several cases a list of them. A profile of a further step of
the first one is written after its figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.harness.quiet import busy_seconds
from benchmarks.steps.cases import Case, Subject
from megatron_distill.runtime.launch import joined_world
from megatron_distill.runtime.torchrun import threads_per_process

if TYPE_CHECKING:
    from megatron_distill.runtime.groups import Groups

_TIMEOUT_SECONDS = 600


def main() -> None:
    """Measure the case given by the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True, type=Path, nargs="+", help="all on equal ranks")
    parser.add_argument("--subject", required=True, nargs="+", help="of each case")
    parser.add_argument("--result", required=True, type=Path)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--profile", type=Path)
    arguments = parser.parse_args()
    cases = [Case.from_dict(json.loads(one.read_text(encoding="utf-8"))) for one in arguments.case]
    with joined_world(
        device="auto",
        backend="auto",
        threads=threads_per_process(cases[0].ranks.processes),
        timeout_seconds=_TIMEOUT_SECONDS,
    ) as device:
        groups = _groups(cases[0])
        results: list[dict[str, Any]] = []
        for case, subject in zip(cases, arguments.subject, strict=True):
            _measure_and_write(case, subject, results, arguments, groups, device.torch_device)
            gc.collect()  # models refer to themselves
            if device.kind == "cuda":
                torch.cuda.empty_cache()


def _measure_and_write(
    case: Case,
    subject: Subject,
    results: list[dict[str, Any]],
    arguments: argparse.Namespace,
    groups: Groups,
    device: torch.device,
) -> None:
    """Add a case's figures to the results, and write these."""
    result, step = _measure(case, subject, arguments, groups, device)
    results.append(result)
    if dist.get_rank() == 0:
        written = result if len(arguments.case) == 1 else results
        arguments.result.write_text(json.dumps(written), encoding="utf-8")
    if arguments.profile is not None and len(results) == 1:
        from benchmarks.harness.op_profile import write_profile

        write_profile(step, arguments.profile, device)


def _measure(
    case: Case,
    name: Subject,
    arguments: argparse.Namespace,
    groups: Groups,
    device: torch.device,
) -> tuple[dict[str, Any], Callable[[], object]]:
    """Return the figures, and what takes one more step."""
    # Imported late: these import Megatron-Core, which must be prepared first.
    from benchmarks.harness.peak import persistent_bytes, step_peak
    from benchmarks.steps.subject import random_batches

    subject = _build(name, case, groups=groups, device=device)
    count = arguments.warmup + arguments.steps
    batches = [random_batches(case, step, groups=groups, device=device) for step in range(count)]
    figures, seconds, cpu_seconds, machine_seconds = [], [], [], []
    for batch in batches:
        dist.barrier()
        started, cpu_started, machine_started = (
            time.perf_counter(),
            time.process_time(),
            busy_seconds(),
        )
        figures.append(subject.step(batch))
        _wait_for(device)
        dist.barrier()
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu_started)
        machine_seconds.append(busy_seconds() - machine_started)
    one_more = partial(subject.step, batches[-1])
    peak = step_peak(one_more, device)
    own = {
        "peak": asdict(peak),
        "persistent": asdict(persistent_bytes(subject)),
        "cpu_seconds": cpu_seconds[arguments.warmup :],
        "phases": [figure.phases for figure in figures[arguments.warmup :]],
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    result = {
        "subject": name,
        "sequence_length": case.workload.sequence_length,
        "seconds": seconds[arguments.warmup :],
        "machine_seconds": machine_seconds[arguments.warmup :],
        "losses": [{"ce": figure.ce, "kd": figure.kd} for figure in figures],
        "ranks": ranks,
    }
    return result, one_more


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _groups(case: Case) -> Groups:
    from megatron_distill.runtime.groups import Layout, create_groups, seed_everything

    ranks = case.ranks
    layout = Layout(
        tensor=ranks.tensor,
        pipeline=ranks.pipeline,
        virtual_pipeline=ranks.virtual_pipeline,
        context=ranks.context,
        expert=ranks.expert,
        sequence=ranks.sequence,
    )
    groups = create_groups(layout, timeout_minutes=_TIMEOUT_SECONDS // 60)
    seed_everything(1, groups)
    return groups


def _build(subject: Subject, case: Case, *, groups: Groups, device: torch.device) -> Any:
    if subject == "ours":
        from benchmarks.steps.own_step import build_own_step

        return build_own_step(case, groups=groups, device=device)
    from benchmarks.steps.peer_modelopt import PEERS, build_peer_step

    return build_peer_step(case, peer=PEERS[subject], groups=groups, device=device)


if __name__ == "__main__":
    main()
