"""Preview of the training data: samples with their loss masks, lengths and totals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from megatron_distill.data.collation import label_masks, label_units, pack_samples
from megatron_distill.data.samples import PADDING_DOCUMENT, WEIGHT_UNITS, Sample
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.errors import counted

BOTH, KD_ONLY, CE_ONLY, PROMPT, PADDING = "both", "kd", "ce", "prompt", "padding"
STYLES: Final = {
    BOTH: "bold green",
    KD_ONLY: "cyan",
    CE_ONLY: "bold yellow",
    PROMPT: "dim",
    PADDING: "dim red",
}
MEANING: Final = {
    BOTH: "trained by cross-entropy and distillation",
    KD_ONLY: "distillation only",
    CE_ONLY: "cross-entropy only",
    PROMPT: "read, not trained",
    PADDING: "padding",
}
# Marks around text on a terminal without colour.
MARKS: Final = {BOTH: ("[[", "]]"), KD_ONLY: ("((", "))"), CE_ONLY: ("{{", "}}")}
_BAR: Final = "#"


@dataclass
class PreviewTotals:
    """Token, label and document counts of the samples added so far."""

    positions: int = 0
    padding: int = 0
    ce_labels: int = 0
    kd_labels: int = 0
    lengths: list[int] = field(default_factory=list)  # tokens of documents' segments in samples

    def add(self, sample: Sample, kinds_S1: Sequence[str]) -> None:
        """Count a sample."""
        documents = sample.document_ids_S1
        self.positions += len(documents)
        self.padding += int((documents == PADDING_DOCUMENT).sum())
        self.ce_labels += sum(kind in (BOTH, CE_ONLY) for kind in kinds_S1)
        self.kd_labels += sum(kind in (BOTH, KD_ONLY) for kind in kinds_S1)
        real = documents[documents != PADDING_DOCUMENT]
        self.lengths += np.bincount(real).tolist() if len(real) else []

    def lines(self) -> Iterable[str]:
        """The totals as lines of text."""
        tokens = max(1, self.positions - self.padding)
        share = 100 / tokens
        yield (
            f"tokens {tokens:,}, documents {len(self.lengths):,}, padding "
            f"{100 * self.padding / max(1, self.positions):.1f}% of the samples"
        )
        yield (
            f"labels of cross-entropy {self.ce_labels:,} ({share * self.ce_labels:.1f}% of tokens)"
            f", of distillation {self.kd_labels:,} ({share * self.kd_labels:.1f}%)"
        )


def token_kinds(sample: Sample, *, isolate_documents: bool) -> list[str]:
    """Kind of each of the S + 1 tokens as a label; the first token is not a label."""
    marks = pack_samples([sample]).marks_GS1
    ce_mask, kd_mask = label_masks(marks, isolate_documents=isolate_documents)
    names = {(True, True): BOTH, (False, True): KD_ONLY, (True, False): CE_ONLY}
    pairs = zip(ce_mask[0].tolist(), kd_mask[0].tolist(), strict=True)
    kinds = [PROMPT, *(names.get(pair, PROMPT) for pair in pairs)]
    return [
        PADDING if document == PADDING_DOCUMENT else kind
        for kind, document in zip(kinds, sample.document_ids_S1.tolist(), strict=True)
    ]


def sample_text(
    sample: Sample, tokenizer: Tokenizer, *, isolate_documents: bool, has_colour: bool
) -> Text:
    """A sample's text, a line per document, coloured by mask or with marks around trained tokens.

    Padding is a count. A weight other than one is written before its tokens.
    """
    kinds = token_kinds(sample, isolate_documents=isolate_documents)
    units = label_units(pack_samples([sample]).marks_GS1)
    weights = [1.0] * len(kinds)
    if units is not None:
        weights[1:] = (units[0] / WEIGHT_UNITS).tolist()
    documents = sample.document_ids_S1.tolist()
    keys = list(zip(documents, kinds, weights, strict=True))
    found = Text()
    start = 0
    for stop in range(1, len(keys) + 1):
        if stop < len(keys) and keys[stop] == keys[start]:
            continue
        document, kind, weight = keys[start]
        if start == 0 or document != documents[start - 1]:
            label = f"\n-- document {document} --\n" if kind != PADDING else "\n"
            found.append(label, style="bold")
        _append(found, sample.tokens_S1[start:stop], tokenizer, kind, weight, has_colour)
        start = stop
    return found


def _append(
    found: Text,
    tokens_n: NDArray[np.int32],
    tokenizer: Tokenizer,
    kind: str,
    weight: float,
    has_colour: bool,
) -> None:
    if kind == PADDING:
        found.append(f"... {counted(len(tokens_n), 'token')} of padding", style=STYLES[kind])
        return
    before, after = ("", "") if has_colour else MARKS.get(kind, ("", ""))
    if kind != PROMPT and weight != 1.0:
        before += f"(x{weight:g}) "
    found.append(before + tokenizer.decode(tokens_n.tolist()) + after, style=STYLES[kind])


def legend(*, has_colour: bool) -> Text:
    """Legend of the colours or marks."""
    found = Text()
    for kind, meaning in MEANING.items():
        before, after = ("", "") if has_colour else MARKS.get(kind, ("", ""))
        found.append(f"{before}{meaning}{after}", style=STYLES[kind])
        found.append("  ")
    return found


def histogram(lengths: Sequence[int], *, width: int, bins: int = 10) -> list[str]:
    """Lines of a histogram of lengths, `width` characters at most."""
    if not lengths:
        return ["no documents"]
    edges = np.unique(np.linspace(min(lengths), max(lengths) + 1, bins + 1).astype(int))
    counts, _ = np.histogram(lengths, bins=edges)
    names = [f"{low}-{high - 1}" for low, high in zip(edges[:-1], edges[1:], strict=True)]
    longest = max(map(len, names))
    room = max(1, width - longest - 14)
    return [
        f"{name:>{longest}} tokens {_BAR * round(room * count / max(counts))} {count:,}"
        for name, count in zip(names, counts, strict=True)
    ]
