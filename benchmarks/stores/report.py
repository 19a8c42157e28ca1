"""The files of the store's results: Markdown to read, JSON with every round."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from benchmarks.harness.calibrated import PLANNED_COLUMNS, loaded, plan_cells
from benchmarks.harness.environment import ROOT
from benchmarks.stores.planned import planned_training

__all__ = ["PARTS", "earlier_parts", "part_text", "write_store_report"]

_MEGA: Final = 1e6
_MIN_TOKENS: Final = 2e6
_MIN_BANDWIDTH: Final = 0.8
_MAX_BYTES: Final = 220.0
_MAX_SLOWDOWN: Final = 1.03
_K: Final = 64
# Each part may be measured at a different time.
_OWN: Final = ("command", "date", "commit", "load average at the start")
_QUICKSTART: Final = ROOT / "benchmarks" / "results" / "quickstart.json"

_SIZES_NOTE = """\
The same made-up positions in every layout: a vocabulary of 128,256, Zipf's law with an exponent
drawn per position between 0.9 and 4, noise of 0.3 on the logits, ids of which the low ones are more
frequent; sequences of 4,096 tokens of some ten documents. `record` is what a layout keeps of a
token before its container and compression, `disk` all files of 64 sequences (DistillKit: 16) over
their tokens. Ours holds tokens, documents, masks, tail, log-sum-exp, entropy and label
log-probability as well (14 bytes); the 128 KiB of an empty ArrayRecord are 0.5 bytes here, and less
in a shard of usual size; `were it compressed` is what zstd at level 3 would make of its records,
which the store does not offer. MaxText's is one `tf.train.Example` per sequence with its four
optional arrays (tokens, documents), zstd at level 3; logits that were computed in bf16 and widened
compress better, so both are given. Megatron-LM's is a tar of one member per iteration of 8
sequences, zstd at level 3, values and ids alone. DistillKit's record is its two byte strings, on
disk Parquet with the tokens; `Errors of the codecs` has what its curves cost. `ratio` is a layout's
disk over that of ours with the default codec, u8.
"""
_ERRORS_NOTE = """\
KL divergence of the decoded from the exact distributions of a really trained teacher on held-out
text, in nats, on average and at the 99th percentile of the positions. `with tail`: over the k ids
and all others together; where a layout keeps no tail, it is 1 minus the others, at least 1e-8, as
those who use it do. `kept ids`: both normalised over the k ids. `above 0.01` is the share of
positions that lose more than 0.01 nats, with the tail. `bytes` are those of the values of a token;
ids take 2 k + k / 8 more at a vocabulary of 128,256, in ours as in DistillKit's. `bf16 logits` are
what MaxText keeps of a teacher that gives its logits in bf16: they know no tail. DistillKit's
settings work on the log-probabilities in fp32, as they are captured, and fit by torch's SVD in
fp32; `as printed` is the setting of its documentation, `normalize_t` the same with the option that
it leaves out.
"""
_SPEED_NOTE = """\
One process on one core, everything in turns, the first round thrown away; medians over the rounds.
`M tokens/s` counts processor time, because others use the machine too: it is what a core does; `by
the clock` includes what they took. `read` gives fp32 log-probabilities, int32 ids, tail and scalars
of every position, every checksum compared; `packed` checks and hands on the bytes, as a rank does
that reads for others; both from the page cache. `write` checks values, packs, writes, hashes,
flushes to disk and commits a shard. `plain` reads the same files in blocks of 1 MiB, or writes and
flushes the same bytes, and nothing else. `of plain` is the median over the rounds of the time of
plain reading or writing over the subject's (writing: by the clock). MaxText's files are written by
our vectorised encoder and hold the three features that its reader takes; they are read by
ArrayRecord and parsed by numpy or by protobuf's own parser, not by TensorFlow's.
"""
_TRAINING_NOTE = """\
Optimizer steps of one student, cross-entropy and forward KL on a top-64 with its tail, from a store
with u8 on disk (read, checked, compared with the batch's tokens and decoded by a thread up to two
steps ahead, as in training) beside the same steps whose signals were decoded before the clock. Both
take turns in one process, some steps in a row, in changing order; a row's first step finds nothing
read ahead. `ratio` is the median over the rounds of the store's time over that from memory, above
one if the store is slower, and in brackets its quartiles; `processor time` the same of all
threads' seconds, which others on the machine disturb less. `alone` is the processor time that the
records of a step take when nothing else runs, and its share of a step from memory: what the store
can cost at most if nothing of it is hidden. `v32k` is a student of 4 layers, width 256 and 32,768
tokens with one sample of 512 positions per step, `quickstart` that of
`configs/quickstart_student.yaml` with eight samples of 128, the student for which a store is
hardest to hide. `planned` is the planner's time of a step from the store on this machine, which was
calibrated before and after: the median of both plans, with the extremes in parentheses. `others`
are the cores that other processes used meanwhile.
"""


def earlier_parts(folder: Path, name: str) -> dict[str, Any]:
    """The content of `name`.json from an earlier measurement."""
    path = folder / f"{name}.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def write_store_report(folder: Path, name: str, measured: Mapping[str, Any]) -> None:
    """Write `name`.md and `name`.json."""
    folder.mkdir(parents=True, exist_ok=True)
    ordered = {part: measured[part] for part in PARTS if part in measured}
    content = json.dumps(ordered, indent=1) + "\n"
    (folder / f"{name}.json").write_text(content, encoding="utf-8")
    environments = [part["environment"] for part in ordered.values()]
    shared = {
        key: value
        for key, value in environments[0].items()
        if key not in _OWN and all(other.get(key) == value for other in environments)
    }
    described = "\n".join(f"- {key}: {value}" for key, value in shared.items())
    # A part on another machine names it.
    differs = [key for key in environments[0] if key not in shared and key not in _OWN]
    texts = [part_text(part, ordered[part], own=(*_OWN, *differs)) for part in ordered]
    (folder / f"{name}.md").write_text(
        "\n".join(["# The teacher store\n", f"{described}\n", *texts]), encoding="utf-8"
    )


def part_text(part: str, measured: Mapping[str, Any], *, own: Sequence[str] = _OWN) -> str:
    """One part as Markdown; `own`: facts of its environment that others do not share."""
    title, note, table = _TEXTS[part]
    environment = measured["environment"]
    facts = "\n".join(f"- {key}: {environment.get(key, 'unknown')}" for key in own)
    return "\n".join([f"## {title}\n", f"{facts}\n", note, *table(measured["found"]), ""])


def _sizes_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    ours = {row["k"]: row["disk"] for row in rows if row["layout"] == "ours, u8"}
    lines = ["| layout | k | record | disk | ratio |", "|---|---:|---:|---:|---:|"]
    for row in rows:
        ratio = "-"
        if row["disk"] is not None and row["k"] in ours:
            ratio = f"{row['disk'] / ours[row['k']]:.2f}x"
        disk = "-" if row["disk"] is None else f"{row['disk']:.1f}"
        lines.append(f"| {row['layout']} | {row['k']} | {row['record']:.1f} | {disk} | {ratio} |")
    verdict = "met" if ours[64] <= _MAX_BYTES else "MISSED"
    lines.append(
        f"\nAsked: at most {_MAX_BYTES:.0f} bytes per token at k = 64 with u8. On disk "
        f"{ours[64]:.1f}: {verdict}."
    )
    return lines


def _errors_table(found: Mapping[str, Any]) -> list[str]:
    teacher = found["teacher"]
    lines = [
        f"The teacher is the quickstart's after {teacher['steps']} steps "
        f"(`configs/quickstart_teacher.yaml`): {teacher['positions']:,} held-out positions, "
        f"vocabulary {teacher['vocab_size']:,}, cross-entropy {teacher['cross_entropy']:.3f}, "
        f"entropy {teacher['entropy']:.3f}, mean probability of the first id "
        f"{teacher['top_1']:.2f}.\n",
        "| codec | k | bytes | with tail: mean | p99 | kept ids: mean | p99 | above 0.01 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["codecs"]:
        figures = " | ".join(_nats(row[name]) for name in ("mean", "p99", "mean_kept", "p99_kept"))
        large = "-" if row["large"] is None else f"{row['large']:.1%}"
        lines.append(
            f"| {row['codec']} | {row['k']} | {row['value_bytes']} | {figures} | {large} |"
        )
    return [*lines, _default_codec(found["codecs"])]


def _default_codec(rows: Sequence[Mapping[str, Any]]) -> str:
    """Why u8 is the default."""
    u8, f16 = (
        next(row for row in rows if row["codec"] == f"ours, {codec}" and row["k"] == _K)
        for codec in ("u8", "f16")
    )
    left = min(
        run["held_out_kd"]
        for seed in json.loads(_QUICKSTART.read_text(encoding="utf-8"))["seeds"]
        for run in seed["runs"]
        if run["held_out_kd"] > 0
    )
    return (
        f"\nThe default is u8: at k = {_K} it loses {u8['mean']:.1e} nats on average and "
        f"{u8['p99']:.1e} at the 99th percentile. The quickstart's distilled students end "
        f"{left:.2f} nats or more from their teacher (`quickstart.json`), {left / u8['p99']:,.0f} "
        f"times the latter, so that the {f16['value_bytes'] - u8['value_bytes']} bytes per token "
        "that f16 takes more buy nothing that a student could show."
    )


def _nats(value: float | None) -> str:
    """A divergence, which rounding may put a little below zero."""
    if value is None:
        return "-"
    return f"{value:.1e}" if value > 0 else "0"


def _speed_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    by_key = {(row["name"], row["k"], row["action"]): row for row in rows}
    lines = [
        "| layout | k | work | M tokens/s | by the clock | MB/s | of plain |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        plain, size = _plain_of(row, by_key)
        clock = row["action"].endswith("write")
        kind = "seconds" if clock else "cpu_seconds"
        share = "-"
        if plain is not row:
            pairs = zip(plain[kind], row[kind], strict=True)
            share = f"{median(one / other for one, other in pairs):.0%}"
        cpu, seconds = median(row["cpu_seconds"]), median(row["seconds"])
        lines.append(
            f"| {row['name']} | {row['k']} | {row['action']} | {row['tokens'] / cpu / _MEGA:.2f} | "
            f"{row['tokens'] / seconds / _MEGA:.2f} | {size / cpu / _MEGA:.0f} | {share} |"
        )
    return lines + _speed_verdicts(by_key)


def _plain_of(
    row: Mapping[str, Any], by_key: Mapping[tuple[str, int, str], Mapping[str, Any]]
) -> tuple[Mapping[str, Any], int]:
    """The row of the same files without a layout, and the bytes of these files."""
    name = "MaxText" if row["name"].startswith("MaxText") else row["name"]
    action = "plain write" if row["action"].endswith("write") else "plain read"
    plain = by_key[name, row["k"], action]
    return plain, plain["file_bytes"]


def _speed_verdicts(by_key: Mapping[tuple[str, int, str], Mapping[str, Any]]) -> list[str]:
    ours = by_key["ours, u8", 64, "read"]
    plain = by_key["ours, u8", 64, "plain read"]
    tokens = ours["tokens"] / median(ours["cpu_seconds"])
    share = median(
        one / other for one, other in zip(plain["cpu_seconds"], ours["cpu_seconds"], strict=True)
    )
    verdict = "met" if tokens >= _MIN_TOKENS or share >= _MIN_BANDWIDTH else "MISSED"
    lines = [
        f"\nAsked: reading k = 64 at {_MIN_TOKENS / _MEGA:.0f} million tokens/s per core, or at "
        f"{_MIN_BANDWIDTH:.0%} of plain reading. With u8 {tokens / _MEGA:.2f} million "
        f"({tokens / _MIN_TOKENS:.2f} of it), {share:.0%} of plain reading: {verdict}."
    ]
    for k in sorted({k for _, k, _ in by_key}):
        own = by_key["ours, u8", k, "read"]["cpu_seconds"]
        peers = {
            name: median(other / one for one, other in zip(own, row["cpu_seconds"], strict=True))
            for (name, row_k, action), row in by_key.items()
            if row_k == k and action == "read" and name.startswith("MaxText")
        }
        ratios = ", ".join(f"{ratio:.1f} times {name}" for name, ratio in peers.items())
        lines.append(f"Reading k = {k}, u8: {ratios}.")
    return lines


def _training_table(found: Any) -> list[str]:
    # Records from before the calibrations have the rows alone.
    content = found if isinstance(found, Mapping) else {"rows": found, "devices": []}
    rows, devices = content["rows"], loaded(content["devices"])
    heads = ["memory, ms", "store, ms", "ratio", "processor time", "alone, ms"]
    heads += [name.replace("(s)", "(ms)") for name in PLANNED_COLUMNS] + ["threads", "others"]
    lines = [f"| student | tokens/step | {' | '.join(heads)} |"]
    lines.append("|---|" + "---:|" * (len(heads) + 1))
    for row in rows:
        ms = {name: median(row["seconds"][name]) / row["steps"] * 1e3 for name in row["seconds"]}
        alone = median(row["cpu_seconds"]["reading alone"])
        share = alone / median(row["cpu_seconds"]["memory"])
        cells = [f"{ms['memory']:.1f}", f"{ms['store']:.1f}", _spread(row["seconds"])]
        cells += [_spread(row["cpu_seconds"]), f"{alone / row['steps'] * 1e3:.2f} ({share:.1%})"]
        plans = planned_training(
            row["workload"], devices, ids=row["k"], threads=row.get("threads", 1)
        )
        cells += plan_cells(plans, ms["store"] / 1e3, unit=1e-3)
        cells += [str(row.get("threads", "")), _others(row)]
        lines.append(f"| {row['workload']} | {row['tokens_per_step']:,} | {' | '.join(cells)} |")
    slowdowns = {row["workload"]: _slowdown(row["cpu_seconds"])[1] for row in rows}
    verdicts = ", ".join(
        f"{name} {'met' if slowdown <= _MAX_SLOWDOWN else 'MISSED'}"
        for name, slowdown in slowdowns.items()
    )
    return [*lines, f"\nAsked: a ratio of at most {_MAX_SLOWDOWN}. In processor time: {verdicts}."]


def _others(row: Mapping[str, Any]) -> str:
    """Cores that other processes used during the steps from the store."""
    if "machine_seconds" not in row:
        return ""
    kinds = (row[kind]["store"] for kind in ("machine_seconds", "cpu_seconds", "seconds"))
    cores = [max(0.0, busy - own) / seconds for busy, own, seconds in zip(*kinds, strict=True)]
    return f"{median(cores):.2f}"


def _slowdown(seconds: Mapping[str, Sequence[float]]) -> list[float]:
    """Quartiles of the ratio over the rounds; the second is the median."""
    pairs = zip(seconds["store"], seconds["memory"], strict=True)
    return quantiles([store / memory for store, memory in pairs], n=4)


def _spread(seconds: Mapping[str, Sequence[float]]) -> str:
    low, middle, high = _slowdown(seconds)
    return f"{middle:.3f} ({low:.2f} to {high:.2f})"


_TEXTS: Final[dict[str, tuple[str, str, Callable[[Any], list[str]]]]] = {
    "sizes": ("Bytes per token", _SIZES_NOTE, _sizes_table),
    "errors": ("Errors of the codecs", _ERRORS_NOTE, _errors_table),
    "speed": ("Writing and reading", _SPEED_NOTE, _speed_table),
    "training": ("Training from a store", _TRAINING_NOTE, _training_table),
}
PARTS: Final = tuple(_TEXTS)
