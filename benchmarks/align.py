"""Aligning two tokenizations, beside the dynamic programme of NeMo-RL, and reading cached ones.

    python benchmarks/align.py                    # two minutes, one core

The texts are files of Python's standard library. Each subject is timed on one core, best of several
rounds; tokens are those of both sides.
"""

from __future__ import annotations

import argparse
import io
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from benchmarks.harness.environment import ROOT, describe, installed
from megatron_distill.align import align_spans, coverage, token_spans
from megatron_distill.data.aligned.cache import DocumentCache, document_key
from megatron_distill.data.aligned.documents import PairEncoder
from megatron_distill.data.text.documents import Cursor, Document
from megatron_distill.data.tokenizers.hugging_face import train_bpe
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.data.tokenizers.sentencepiece_model import SentencePieceTokenizer

Spans = NDArray[np.int64]

_TRAINED_CHARACTERS: Final = 2_000_000
_STUDENT_TOKENS: Final = 8_000
_TEACHER_TOKENS: Final = 4_000
_PROGRAMME_CHARACTERS: Final = 1_600  # of each text that the dynamic programme aligns
_MOST: Final = 4  # tokens that it joins
_SUBJECTS: Final = (
    "tokenize", "token_spans", "align_spans", "documents encoded", "documents cached",
)  # fmt: skip
_PACKAGES: Final = ("tokenizers", "sentencepiece")
_NOTE = """\
Alignment takes byte ranges to chunks. `token_spans` takes token ids and the text to byte ranges.
The dynamic programme is that of NeMo-RL's token aligner, written from its recurrence (scores 3 and
-3 for one token each, -1.5 for a token alone, 1.5 k for one token and k of the other side, k up to
4) in plain Python, without its anchors, its padding and its repairs. Its time grows with the
product of both lengths, so it has short texts, on which our functions are timed beside it.
`documents encoded` is all that a run does with a text in its first epoch, `documents cached` what
it does in the next ones: find the document by its text, and read its tokens and chunks.
"""


def documents() -> list[str]:
    """The files of the standard library, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(folder.glob("*.py")):
        found.append(path.read_text(encoding="utf-8"))
    return found


def tokenizers(texts: Sequence[str]) -> tuple[Tokenizer, Tokenizer]:
    """A byte-level BPE, and a SentencePiece BPE with byte fallback."""
    written = io.BytesIO()
    some = "".join(texts)[:_TRAINED_CHARACTERS]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for line in some.splitlines() if line.strip()),
        model_writer=written, model_type="bpe", vocab_size=_TEACHER_TOKENS, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        max_sentence_length=10**6, num_threads=1,
    )  # fmt: skip
    teacher = SentencePieceTokenizer(written.getvalue(), name="SentencePiece BPE")
    return train_bpe([some], vocab_size=_STUDENT_TOKENS), teacher


def programme(
    student: Sequence[bytes], teacher: Sequence[bytes]
) -> tuple[float, list[tuple[int, int]]]:
    """Align by the best score; that score, and the ends of the groups on its path, backwards."""
    rows, columns = len(student), len(teacher)
    best = [[-1.5 * j for j in range(columns + 1)]]
    moves = [[(0, 1)] * (columns + 1)]
    for i in range(1, rows + 1):
        own, above = student[i - 1], best[i - 1]
        row, steps = [-1.5 * i], [(1, 0)]
        for j in range(1, columns + 1):
            score, step = above[j - 1] + (3.0 if own == teacher[j - 1] else -3.0), (1, 1)
            if above[j] - 1.5 > score:
                score, step = above[j] - 1.5, (1, 0)
            if row[j - 1] - 1.5 > score:
                score, step = row[j - 1] - 1.5, (0, 1)
            for k in range(2, min(_MOST, j) + 1):
                if above[j - k] + 1.5 * k > score and own == b"".join(teacher[j - k : j]):
                    score, step = above[j - k] + 1.5 * k, (1, k)
            for k in range(2, min(_MOST, i) + 1):
                other = best[i - k][j - 1] + 1.5 * k
                if other > score and teacher[j - 1] == b"".join(student[i - k : i]):
                    score, step = other, (k, 1)
            row.append(score)
            steps.append(step)
        best.append(row)
        moves.append(steps)
    ends, i, j = [], rows, columns
    while i or j:
        ends.append((i, j))
        step = moves[i][j]
        i, j = i - step[0], j - step[1]
    return best[rows][columns], ends


def seconds(work: Callable[[], Any], rounds: int) -> float:
    """The shortest of several runs."""
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return min(found)


def measure(texts: Sequence[str], sides: Sequence[Tokenizer], rounds: int) -> dict[str, float]:
    """Seconds of every part over all texts, and figures of the chunks."""
    ids = [[side.encode_batch([text])[0] for text in texts] for side in sides]

    def ranges() -> list[list[Spans]]:
        return [
            [token_spans(side, own, text) for own, text in zip(of_side, texts, strict=True)]
            for side, of_side in zip(sides, ids, strict=True)
        ]

    spans = ranges()
    pairs = list(zip(*spans, strict=True))
    figures = [coverage(align_spans(*pair), *pair) for pair in pairs]
    total = figures[0]
    for one in figures[1:]:
        total = total.merge(one)
    return {
        "tokens": total.student.tokens + total.teacher.tokens,
        "aligned": total.student.aligned_tokens + total.teacher.aligned_tokens,
        "bytes": total.student.aligned_bytes / total.student.bytes,
        "chunks": total.chunks,
        "one to one": total.one_to_one,
        "tokenize": sum(
            seconds(lambda side=side: [side.encode_batch([text]) for text in texts], rounds)  # type: ignore[misc]
            for side in sides
        ),
        "token_spans": seconds(ranges, rounds),
        "align_spans": seconds(lambda: [align_spans(*pair) for pair in pairs], rounds),
    }


def measure_documents(
    texts: Sequence[str], sides: tuple[Tokenizer, Tokenizer], rounds: int
) -> dict[str, float]:
    """Seconds of the documents of all texts, encoded and out of a cache."""
    encoder = PairEncoder(*sides)
    documents = [Document(text, b"", True, Cursor(), Path()) for text in texts]
    ends = [True] * len(texts)
    with tempfile.TemporaryDirectory() as folder:
        cache = DocumentCache(Path(folder) / "documents", 1 << 40)
        for document, found in zip(documents, encoder(texts, ends), strict=True):
            cache.add(document_key(document), found)
        cache.flush()

        def read() -> None:
            for one in cache.find([document_key(document) for document in documents]):
                assert one is not None, "it was written"
                one.found(is_end=True)

        return {
            "documents encoded": seconds(lambda: encoder(texts, ends), rounds),
            "documents cached": seconds(read, rounds),
        }


def measure_programme(texts: Sequence[str], sides: Sequence[Tokenizer]) -> float:
    """Seconds of the dynamic programme over the texts."""
    tables = [side.token_bytes() for side in sides]
    rows = [
        [[table[number] or b"" for number in side.encode_batch([text])[0]] for text in texts]
        for side, table in zip(sides, tables, strict=True)
    ]
    return seconds(lambda: [programme(*pair) for pair in zip(*rows, strict=True)], 1)


def table(found: dict[str, dict[str, float]], programme_seconds: float) -> str:
    """The result as Markdown."""
    lines = ["| texts | subject | seconds | million tokens / s |", "|---|---|---|---|"]
    for name, one in found.items():
        for subject in _SUBJECTS:
            speed = one["tokens"] / one[subject] / 1e6
            lines.append(f"| {name} | {subject} | {one[subject]:.4f} | {speed:.2f} |")
        if name == "short":
            speed = one["tokens"] / programme_seconds / 1e6
            lines.append(f"| {name} | dynamic programme | {programme_seconds:.2f} | {speed:.4f} |")
    short = found["short"]
    ratio = programme_seconds / short["align_spans"]
    lines += ["", f"On the short texts `align_spans` is {ratio:,.0f} times as fast as the dynamic "
              "programme.", ""]  # fmt: skip
    whole = found["whole files"]
    ratio = whole["documents encoded"] / whole["documents cached"]
    lines += [f"Whole files are read out of the cache {ratio:.1f} times as fast as encoded.", ""]
    lines += [
        f"- {name}: {one['tokens']:,.0f} tokens, of which {one['aligned']:,.0f} in "
        f"{one['chunks']:,.0f} chunks ({one['one to one']:,.0f} of one token on each side); "
        f"{one['bytes']:.2%} of the bytes."
        for name, one in found.items()
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure, print and save the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--short-texts", type=int, default=6, help="for the dynamic programme")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    environment = describe("benchmarks/align.py", sys.argv[1:])
    environment |= {name: installed(name) or "not installed" for name in _PACKAGES}
    texts = documents()
    sides = tokenizers(texts)
    step = len(texts) // arguments.short_texts
    short = [text[:_PROGRAMME_CHARACTERS] for text in texts[::step]]
    found = {
        name: measure(some, sides, arguments.rounds)
        | measure_documents(some, sides, arguments.rounds)
        for name, some in (("whole files", texts), ("short", short))
    }
    result = table(found, measure_programme(short, sides))
    facts = "\n".join(f"- {key}: {value}" for key, value in environment.items())
    page = f"# Alignment of two tokenizations\n\n{_NOTE}\n{facts}\n\n{result}"
    (arguments.output / "align.md").write_text(page, encoding="utf-8")
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
