"""One part of `benchmarks/cross_tokenizer.py`: all subjects in turns in one process."""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from benchmarks.harness.quiet import busy_seconds
from megatron_distill.runtime.launch import joined_world
from megatron_distill.runtime.torchrun import threads_per_process

_TIMEOUT_SECONDS: Final = 600
_LARGEST_DIFFERENCE: Final = 1e-4  # fp32 rounds to 1e-5 of logits, and to 1e-6 of a loss
_HIDDEN_SCALE: Final = 1.5
_LOGIT_SCALE: Final = 2.0


def main() -> None:
    """Measure the part given by the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", required=True)
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--rounds", required=True, type=int)
    parser.add_argument("--profile", default="")
    parser.add_argument("--peers", default="")
    parser.add_argument("--result", required=True, type=Path)
    arguments = parser.parse_args()
    with joined_world(
        device="cpu",
        backend="gloo",
        threads=threads_per_process(1),
        timeout_seconds=_TIMEOUT_SECONDS,
    ) as device:
        result = _measure(arguments, device.torch_device)
    arguments.result.write_text(json.dumps(result), encoding="utf-8")


def _measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    # Imported late: these import Megatron-Core, which must be prepared first.
    from benchmarks.cross_tokenizers.ours import build_ours
    from benchmarks.cross_tokenizers.peer import build_peer
    from benchmarks.harness.peak import persistent_bytes
    from megatron_distill.runtime.groups import Layout, create_groups, seed_everything

    groups = create_groups(Layout(), timeout_minutes=_TIMEOUT_SECONDS // 60)
    seed_everything(1, groups)
    ours: Any = build_ours(arguments.folder, groups, device)
    if arguments.profile:
        return {"profile": _profile(ours.steps[arguments.profile])}
    with tempfile.TemporaryDirectory() as output:
        chosen = arguments.peers.split(",") if arguments.peers else None
        peer = build_peer(arguments.folder, Path(output), chosen)
        facts = dict(ours.facts)
        baselines = _checked_baselines(ours, peer)
        if arguments.part == "step":
            runs = {**ours.steps, **peer.steps}
            buffers = persistent_bytes(ours.step).gradient_buffers
        else:
            scale = _HIDDEN_SCALE if arguments.part == "hidden" else _LOGIT_SCALE
            made = [getattr(one, f"from_{arguments.part}")(scale) for one in (ours, peer)]
            runs, buffers = {**made[0], **made[1]}, 0
        rows = _in_turns(runs, arguments.rounds)
    for name, row in rows.items():
        # Ours adds to buffers that live on between steps, the peer's gradients are of the step.
        row["buffers"] = buffers if name in ours.steps else 0
    return {
        "rows": rows,
        "facts": facts,
        "prepare_seconds": ours.prepare_seconds,
        "baselines": baselines,
    }


def _in_turns(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, dict[str, Any]]:
    """Times and peaks of each; the order is reversed from round to round."""
    from benchmarks.harness.peak import LiveStorages

    rows: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        gc.collect()
        with LiveStorages() as live:
            value = run()
        rows[name] = {"value": value, "peak": live.peak, "seconds": [], "others": []}
    for number in range(rounds):
        for name in list(runs) if number % 2 == 0 else list(runs)[::-1]:
            gc.collect()
            busy, own = busy_seconds(), time.process_time()
            started = time.perf_counter()
            runs[name]()
            seconds = time.perf_counter() - started
            others = busy_seconds() - busy - (time.process_time() - own)
            rows[name]["seconds"].append(seconds)
            rows[name]["others"].append(max(0.0, others) / seconds)
    for row in rows.values():
        row["median"], row["best"] = median(row["seconds"]), min(row["seconds"])
    return rows


def _checked_baselines(ours: Any, peer: Any) -> dict[str, dict[str, float]]:
    """Teacher and untrained student on all texts: ours, and `transformers` alone.

    Cross-entropies in nats per label, and the largest difference of a logit. Raises SystemExit
    where both differ: then nothing is measured, since the two sides train other models.
    """
    found = {}
    for role, (side, logits) in ours.baseline_logits().items():
        model = peer.models[role]
        differences, sums, count = [], [0.0, 0.0], 0
        for row, ids in enumerate(side.document_ids_bS):
            tokens, length = side.tokens_bs[row], int((ids >= 0).sum())
            with torch.no_grad():
                theirs = model(input_ids=tokens[None, :length]).logits[0]
            own = logits[row, :length, : theirs.shape[1]]
            differences.append(float((own - theirs).abs().max()))
            # Each row is one document: the next token is the label of each but the last position.
            for at, values in enumerate((own, theirs)):
                log_probs = values[:-1].double().log_softmax(1)
                sums[at] -= float(log_probs.gather(1, tokens[1:length, None]).sum())
            count += length - 1
        means = [one / count for one in sums]
        largest = max(differences)
        # Each on its own: a number that is none fails too.
        if not all(one <= _LARGEST_DIFFERENCE for one in (*differences, abs(means[0] - means[1]))):
            raise SystemExit(
                f"the {role} is not the same model on both sides: cross-entropy {means[0]:.6f} "
                f"here and {means[1]:.6f} by transformers, logits differ by up to {largest:.1e}"
            )
        found[role] = {"ours": means[0], "transformers": means[1], "logit_difference": largest}
    return found


def _profile(run: Callable[[], float]) -> str:
    for _ in range(2):
        run()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as found:
        run()
    return str(
        found.key_averages(group_by_input_shape=True).table(
            sort_by="self_cpu_time_total", row_limit=45, max_name_column_width=40
        )
    )


if __name__ == "__main__":
    main()
