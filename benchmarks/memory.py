"""The losses' peak memory beside the formulas of their docstrings, up to 32,768 tokens.

python benchmarks/memory.py                   # some ten minutes on two cores, 16 GiB
python benchmarks/memory.py --tokens 4096     # at most that many tokens
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.harness.environment import ROOT, describe
from benchmarks.harness.peak import LiveStorages
from megatron_distill.losses import Term, fused_linear_objective, token_divergence
from megatron_distill.ops.workspace import chunk_tokens_for, row_blocks
from megatron_distill.runtime.launch import PRECISIONS
from megatron_distill.signals import DenseLogits, HiddenState

_HIDDEN = 256
_TOKENS = (1024, 4096, 8192, 32_768)
# More tokens of the larger ones need the same memory and take only longer.
_MOST_TOKENS = {32_768: 32_768, 128_256: 8192, 151_936: 8192, 262_144: 4096}
# Three matrices of logits in memory.
_MOST_LOGITS = {"fp32": 2**29, "bf16": 2**30}
_ROUNDED = 2**21
# Bytes of statistics and factors that forward KL from given logits has per token.
_PER_TOKEN = 92
_MIB = 2**20
_CPU = torch.device("cpu")
_NOTE = """\
`fused` is `fused_linear_objective` with cross-entropy and forward KL from hidden states of width
256, forward and backward; its chunks hold 2^25 logits of each model. `into a buffer` adds the
weight's gradient to an fp32 matrix that is there already, as training does to Megatron's. `logits`
is `token_divergence` of forward KL from given logits, `over the logits` lets the gradient take
their place. `peak` is the most bytes of tensors alive at once above the inputs; `formula` follows
the docstrings of `ops.fused_linear` and `ops.logit_divergence`, and `without gradients` is the peak
less those on hidden states and weight, or on logits, which are what was asked for. Of `fused` the
formula leaves out the numbers per token of a chunk.
"""


@dataclass(frozen=True)
class Measured:
    """One line: bytes of tensors above the inputs, measured and by formula."""

    loss: str
    precision: str
    vocab: int
    tokens: int
    peak: int
    formula: int
    gradients: int

    @property
    def line(self) -> str:
        """As a row of a Markdown table, in MiB."""
        return (
            f"| {self.loss} | {self.precision} | {self.vocab:,} | {self.tokens:,} | "
            f"{self.peak / _MIB:.1f} | {self.formula / _MIB:.1f} | "
            f"{self.peak / self.formula:.3f} | {(self.peak - self.gradients) / _MIB:.1f} |"
        )


def main() -> int:
    """Measure, print, and save the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=max(_TOKENS), help="most tokens")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    console = Console(width=120)
    environment = describe("benchmarks/memory.py", sys.argv[1:])
    head = ["| loss | dtype | vocabulary | tokens | peak MiB | formula MiB | ratio | "
            "without gradients |", "|---|---|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    console.print("\n".join(head), markup=False)
    lines = []
    for measured in _all(arguments.tokens):
        lines.append(measured.line)
        console.print(measured.line, markup=False)
    described = [f"- {key}: {value}" for key, value in environment.items()]
    text = "\n".join(["# Memory of the losses\n", *described, "", _NOTE, *head, *lines, ""])
    (arguments.output / "memory.md").write_text(text, encoding="utf-8")
    return 0


def _all(most: int) -> Iterator[Measured]:
    for precision in ("fp32", "bf16"):
        for vocab, most_tokens in _MOST_TOKENS.items():
            for tokens in _TOKENS:
                if tokens <= min(most, most_tokens):
                    yield _fused(precision, vocab, tokens, has_buffer=False)
                    yield _fused(precision, vocab, tokens, has_buffer=True)
        for tokens in _TOKENS:
            if tokens <= most and tokens * 32_768 <= _MOST_LOGITS[precision]:
                yield _logits(precision, 32_768, tokens, overwrites=False)
                yield _logits(precision, 32_768, tokens, overwrites=True)


def _normal(rows: int, columns: int, precision: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.empty(rows, columns, dtype=PRECISIONS[precision])
    return drawn.normal_(generator=generator)


def _peak(run: Callable[[], object]) -> int:
    gc.collect()
    with LiveStorages() as live:
        run()
        gc.collect()
    return live.peak


def _fused(precision: str, vocab: int, tokens: int, *, has_buffer: bool) -> Measured:
    hidden, weight, teacher, head = (
        _normal(rows, _HIDDEN, precision, seed) / _HIDDEN**0.25
        for seed, rows in enumerate((tokens, vocab, tokens, vocab))
    )
    hidden.requires_grad_()
    weight.requires_grad_()
    labels, weights = torch.arange(tokens) % vocab, torch.full((tokens,), 1 / tokens)
    buffer = torch.zeros(vocab, _HIDDEN) if has_buffer else None

    def run() -> object:
        total, _ = fused_linear_objective(
            hidden,
            weight,
            HiddenState(teacher, head),
            labels,
            ce_weights=weights,
            kd_weights=weights,
            terms=[Term()],
            weight_gradient_sum=buffer,
        )
        return torch.autograd.grad(total, (hidden, weight), allow_unused=has_buffer)

    width = PRECISIONS[precision].itemsize
    gradients = (tokens + (0 if has_buffer else vocab)) * _HIDDEN * width
    formula = _fused_formula(width, vocab, tokens, has_buffer=has_buffer)
    name = "fused, into a buffer" if has_buffer else "fused"
    return Measured(name, precision, vocab, tokens, _peak(run), formula, gradients)


def _fused_formula(width: int, vocab: int, tokens: int, *, has_buffer: bool) -> int:
    chunks = -(-tokens // chunk_tokens_for(vocab, _CPU))
    size = -(-tokens // chunks)
    logits, of_hidden = 2 * size * vocab * width, tokens * _HIDDEN * width
    is_wider = width < torch.float32.itemsize and (chunks > 1 or has_buffer)
    total = vocab * _HIDDEN * (torch.float32.itemsize if is_wider else width)
    if has_buffer:
        total = 0
    product = min(_ROUNDED, vocab * _HIDDEN) * width if is_wider else 0
    narrow = 0 if width == torch.float32.itemsize else 2
    forward = logits + of_hidden + total + product + (3 + narrow) * _block(size, vocab)
    rounded = vocab * _HIDDEN * width if is_wider and not has_buffer else 0
    backward = of_hidden + total + rounded
    return max(forward, backward)


def _logits(precision: str, vocab: int, tokens: int, *, overwrites: bool) -> Measured:
    student = _normal(tokens, vocab, precision, 5).requires_grad_() + 0
    teacher = _normal(tokens, vocab, precision, 6)

    def run() -> object:
        values = token_divergence(
            student, DenseLogits(teacher), divergence="forward_kl", overwrite_logits=overwrites
        )
        return torch.autograd.grad(values.sum(), student)

    width = PRECISIONS[precision].itemsize
    gradient = 0 if overwrites else tokens * vocab * width
    narrow = 0 if width == torch.float32.itemsize else 2
    formula = gradient + (3 + narrow) * _block(tokens, vocab) + _PER_TOKEN * tokens
    name = "logits, over the logits" if overwrites else "logits"
    return Measured(name, precision, vocab, tokens, _peak(run), formula, gradient)


def _block(rows: int, columns: int) -> int:
    """Bytes of one row block."""
    first = next(iter(row_blocks(rows, columns, _CPU)))
    return (first.stop - first.start) * columns * torch.float32.itemsize


if __name__ == "__main__":
    sys.exit(main())
