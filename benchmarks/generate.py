"""Tokens per second of text written with a cache, beside recomputation and `transformers`.

python benchmarks/generate.py                       # all sizes, a quarter of an hour on one core
python benchmarks/generate.py --batches 1 16 --widths 128          # some sizes

Random models of the Llama family in fp32 on one thread, greedy, prompts of unequal length. The
peers are `transformers.generate` with its cache, and a forward pass over the whole text per token.
Where the latter would take minutes for a long text, some of its passes are measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console

from benchmarks.harness.environment import ROOT, describe
from megatron_distill.models.generation.request import Sampling, Stops, WriteRow
from megatron_distill.runtime.groups import Groups, Layout, create_groups
from megatron_distill.runtime.launch import joined_world

BATCHES = (1, 4, 16, 64)  # rows
TOKENS = 512
SHORT = 64
PROMPTS = (17, 32, 24, 9)
RECOMPUTED = 75.0  # seconds of recomputing a long text, as estimated, for which it is whole
PASSES = 9  # of a longer one
EARLY, LATE = slice(56, 73), slice(184, 201)  # of the new tokens, around 64 and 192
PROFILED = 16  # rows
PARTS = {  # of a step, and the operators of each
    "products with weights": ("aten::mm", "aten::addmm_", "mkldnn::_linear_pointwise"),
    "attention over the cache": ("aten::baddbmm", "aten::bmm", "aten::_softmax"),
    "choice of the id": ("aten::_log_softmax", "aten::amax", "aten::max", "aten::argmax"),
}
WIDTHS = {  # of the models: layers, query heads, key-value heads, inner width
    96: (2, 6, 3, 256),
    128: (4, 8, 4, 352),
    512: (8, 8, 4, 1408),
}
VOCABULARY = 4096
_NOTE = """\
tokens/s are new tokens of all rows over the CPU time of one thread, which other work on the machine
disturbs less than the clock; the shorter of two runs. Prompts have 9 to 32 tokens. All write the
same tokens in the first row. The models have 2, 4 and 8 layers and 4,096 ids. With a wider one more
of the time is that of products: of one row they are the same in both, of four and more ours are
oneDNN's.

`growth` is the time per token around the 192nd new token over that around the 64th, the lower of
two runs, of ours and of `transformers`: the cache that a step reads grows in both. Recomputation of
{tokens} tokens is one run. With `~` it would take over {limit:.0f} s, by the time of {short} tokens
and the positions that its passes read: then {passes} of its passes at equal distances are measured,
and the others are interpolated.
"""
_PARTS_NOTE = """\
us of a step of {rows} rows, a mean over {tokens} new tokens: of torch's operators as its profiler
counts them, and of the whole step without the profiler. Both libraries must read the weights and
the cache, so `bound` is the ratio to `transformers` of a step that had nothing else to do.
"""


@dataclass(frozen=True)
class Subject:
    """A way to write: prompts and a number of new tokens to the ids of the first row."""

    name: str
    write: Callable[[Sequence[tuple[int, ...]], int], list[int]]


def prompts(batch: int) -> list[tuple[int, ...]]:
    """Return the prompts of a batch."""
    generator = torch.Generator().manual_seed(5)
    lengths = [PROMPTS[row % len(PROMPTS)] for row in range(batch)]
    return [
        tuple(torch.randint(3, VOCABULARY, (size,), generator=generator).tolist())
        for size in lengths
    ]


def main() -> int:
    """Measure, print, and save the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--widths", type=int, nargs="*", default=WIDTHS, choices=WIDTHS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    with (
        joined_world(device="cpu", backend="gloo", threads=1, timeout_seconds=600.0),
    ):
        torch.set_num_threads(1)
        groups = create_groups(Layout(), timeout_minutes=10)
        lines, parts = [], []
        for width in arguments.widths:
            found, profiled = _measured(width, arguments.batches, arguments.tokens, groups)
            lines += found
            parts += profiled
    environment = describe("benchmarks/generate.py", sys.argv[1:])
    text = "\n".join(
        [
            f"# Text with a cache, {SHORT} and {arguments.tokens} new tokens\n",
            _NOTE.format(tokens=arguments.tokens, limit=RECOMPUTED, short=SHORT, passes=PASSES),
            *(f"* {name}: {value}" for name, value in environment.items()),
            "",
            f"| width | rows | ours, {SHORT} tokens | transformers | ratio | recompute | ratio "
            f"| ours, {arguments.tokens} tokens | transformers | ratio | recompute | ratio "
            "| growth | growth of transformers |",
            "|---" * 14 + "|",
            *lines,
            "",
            *_parts_table(parts, arguments.tokens),
        ]
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "generate.md").write_text(text, encoding="utf-8")
    return 0


def _parts_table(parts: Sequence[str], tokens: int) -> list[str]:
    if not parts:
        return []
    return [
        "## Parts of a step\n",
        _PARTS_NOTE.format(rows=PROFILED, tokens=tokens),
        f"| width | {' | '.join(PARTS)} | whole step | transformers | ratio | bound |",
        "|---:" * (len(PARTS) + 5) + "|",
        *parts,
        "",
    ]


def _measured(
    width: int, batches: Sequence[int], tokens: int, groups: Groups
) -> tuple[list[str], list[str]]:
    """Return the rows of both tables for a width: of the second one, if `PROFILED` is asked for."""
    with tempfile.TemporaryDirectory() as place:
        reference = _save(Path(place), width)
        ours, recompute, model = _ours(Path(place), groups)
    peer = Subject("transformers", lambda rows, count: _by_transformers(reference, rows, count))
    lines, parts = [], []
    for batch in batches:
        rows = prompts(batch)
        short, near, recomputed = _rates((ours, peer, recompute), rows, SHORT)
        own, other = _rates((ours, peer), rows, tokens)
        whole, about = _recomputed(ours, recompute, rows, tokens, short_rate=recomputed)
        cells = [
            str(width), str(batch),
            f"{short:,.0f}", f"{near:,.0f}", f"{short / near:.2f}x",
            f"{recomputed:,.0f}", f"{short / recomputed:.1f}x",
            f"{own:,.0f}", f"{other:,.0f}", f"{own / other:.2f}x",
            f"{about}{whole:,.0f}", f"{own / whole:.1f}x",
            f"{_growth(rows, partial(_timed, model)):.2f}x",
            f"{_growth(rows, partial(_peer_timed, reference)):.2f}x",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
        Console().print(lines[-1])
        if batch == PROFILED:
            steps = (1e6 * batch / own, 1e6 * batch / other)
            parts.append(_parts(width, ours, rows, tokens, steps=steps))
    return lines, parts


def _parts(
    width: int,
    ours: Subject,
    rows: Sequence[tuple[int, ...]],
    tokens: int,
    *,
    steps: tuple[float, float],
) -> str:
    """Return a row of the second table; steps: us of ours and of the peer."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ours.write(rows, tokens)
    spent = {event.key: event.self_cpu_time_total / tokens for event in profile.key_averages()}
    found = [sum(spent.get(name, 0.0) for name in names) for names in PARTS.values()]
    step, other = steps
    needed = found[0] + found[1]
    cells = [
        str(width), *(f"{us:,.0f}" for us in found), f"{step:,.0f}", f"{other:,.0f}",
        f"{other / step:.2f}x", f"{other / needed:.2f}x",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _recomputed(
    ours: Subject,
    recompute: Subject,
    rows: Sequence[tuple[int, ...]],
    tokens: int,
    *,
    short_rate: float,
) -> tuple[float, str]:
    """Return tokens per second of recomputing a text, and `~` where passes are interpolated.

    short_rate: of a short text, from which the time is estimated.
    """
    given = len(rows[0])
    positions, short = (sum(range(given, given + count)) for count in (tokens, SHORT))
    alone = Subject("ours", lambda rows, count: ours.write(rows[:1], count))
    if len(rows) * SHORT / short_rate * positions / short <= RECOMPUTED:
        return _rates((alone, recompute), rows, tokens, runs=1)[1], ""
    ids = tuple(alone.write(rows, tokens))
    step = (tokens - 1) / (PASSES - 1)
    written = [round(number * step) for number in range(PASSES)]
    seconds = []
    for count in written:
        began = time.process_time()
        found = recompute.write([rows[0] + ids[:count]] * len(rows), 1)
        seconds.append(time.process_time() - began)
        assert found == [ids[count]], "they write different texts"
    pairs = zip(pairwise(written), pairwise(seconds), strict=True)
    between = sum((last - first) * mean(times) for (first, last), times in pairs)
    # Between the middles of the first and of the last pass, half of each of which is left.
    return len(rows) * tokens / (between + (seconds[0] + seconds[-1]) / 2), "~"


def _rates(
    subjects: Sequence[Subject], rows: Sequence[tuple[int, ...]], tokens: int, *, runs: int = 2
) -> list[float]:
    """Return tokens per second of each subject; they take turns, and write the same ids."""
    seconds: dict[str, float] = {}
    found: dict[str, list[int]] = {}
    for subject in subjects:
        subject.write(rows, 4)
    for _ in range(runs):
        for subject in subjects:
            began = time.process_time()
            found[subject.name] = subject.write(rows, tokens)
            took = time.process_time() - began
            seconds[subject.name] = min(took, seconds.get(subject.name, took))
    first, *others = found.values()
    assert all(other == first for other in others), "they write different texts"
    return [len(rows) * tokens / seconds[subject.name] for subject in subjects]


def _save(place: Path, width: int) -> Any:
    import transformers

    torch.manual_seed(3)
    layers, heads, key_value_heads, inner = WIDTHS[width]
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_value_heads, vocab_size=VOCABULARY,
        max_position_embeddings=1024, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(place)
    return model.eval()


def _by_transformers(
    model: Any, rows: Sequence[tuple[int, ...]], count: int, **more: Any
) -> list[int]:
    longest = max(map(len, rows))
    ids = torch.tensor([(0,) * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    found = model.generate(
        ids, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None, **more
    )
    return found[0, longest:].tolist()


def _ours(place: Path, groups: Groups) -> tuple[Subject, Subject, Any]:
    from megatron_distill.models.execution import Execution
    from megatron_distill.models.generation.model import CachedGPT
    from megatron_distill.models.gpt import build_gpt
    from megatron_distill.models.hugging_face.description import describe as read
    from megatron_distill.models.hugging_face.model import HuggingFaceWeights
    from megatron_distill.models.weights import fill
    from megatron_distill.runtime.groups import seed_everything
    from megatron_distill.train.next_token import logits_after

    seed_everything(1, groups)
    device = torch.device("cpu")
    shape = read(place).architecture
    chunks = build_gpt(shape, groups=groups, execution=Execution(torch.float32, device), seed=None)
    fill(chunks, HuggingFaceWeights(place, read(place)), groups=groups)
    model = CachedGPT(chunks, shape, groups, device)

    def write(rows: Sequence[tuple[int, ...]], count: int) -> list[int]:
        asked = [WriteRow(row, number, count) for number, row in enumerate(rows)]
        return list(model.write(asked, sampling=Sampling(), stops=Stops())[0].ids)

    def recompute(rows: Sequence[tuple[int, ...]], count: int) -> list[int]:
        longest = max(map(len, rows))
        # Rows of one length: without a cache, rows of unequal length need a pass each.
        tokens_bs = torch.tensor([rows[0] + (3,) * (longest - len(rows[0]))] * len(rows))
        tokens_bs = tokens_bs[:, : len(rows[0])]
        chunks[0].eval()
        for _ in range(count):
            last = tokens_bs.shape[1] - 1
            logits = logits_after(
                chunks[0], tokens_bs, positions=slice(last, last + 1),
                architecture=shape, groups=groups, device=device,
            )  # fmt: skip
            tokens_bs = torch.cat([tokens_bs, logits[:, 0].argmax(-1)[:, None]], 1)
        return tokens_bs[0, len(rows[0]) :].tolist()

    return Subject("ours", write), Subject("recompute", recompute), model


def _growth(
    rows: Sequence[tuple[int, ...]], timed: Callable[[Sequence[tuple[int, ...]]], list[float]]
) -> float:
    """Return the time of a token around the 192nd over that around the 64th.

    timed: writes `LATE.stop` tokens and returns the CPU time at each.
    """
    ratios = []
    for _ in range(2):
        steps = torch.tensor(timed(rows), dtype=torch.float64).diff()
        ratios.append(float(steps[LATE].median() / steps[EARLY].median()))
    return min(ratios)


def _timed(model: Any, rows: Sequence[tuple[int, ...]]) -> list[float]:
    times: list[float] = []

    def noted(row: int, _: object) -> None:
        if row == 0:
            times.append(time.process_time())

    asked = [WriteRow(row, number, LATE.stop) for number, row in enumerate(rows)]
    model.write(asked, sampling=Sampling(), stops=Stops(), on_tokens=noted)
    return times


def _peer_timed(model: Any, rows: Sequence[tuple[int, ...]]) -> list[float]:
    times: list[float] = []

    def noted(ids: torch.Tensor, _: object, **__: object) -> torch.Tensor:
        """Stop no row."""
        times.append(time.process_time())
        return torch.zeros(len(ids), dtype=torch.bool)

    _by_transformers(model, rows, LATE.stop, stopping_criteria=[noted])
    return times


if __name__ == "__main__":
    sys.exit(main())
