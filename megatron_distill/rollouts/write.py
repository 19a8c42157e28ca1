"""Rollouts in parts: read on the first rank, written by all ranks, saved by the first."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final, cast

from megatron_distill import log
from megatron_distill.data.chat.conversations import Row
from megatron_distill.errors import counted
from megatron_distill.log import get_logger
from megatron_distill.models.generation import Ending, Sampling, Stops, WriteRow, Written
from megatron_distill.models.generation.model import CachedGPT
from megatron_distill.rollouts.check import LogProbCheck, TextSample, TextsToLogProbs
from megatron_distill.rollouts.folder import RolloutFolder, Totals
from megatron_distill.rollouts.prompts import Prompt, PromptFile, PromptTokens
from megatron_distill.runtime.collectives import (
    any_rank,
    from_first_rank,
    on_first_rank,
    together,
)
from megatron_distill.runtime.progress import ProgressFigure, ProgressReporter, short_count

__all__ = ["FirstRank", "RolloutWork", "write_parts"]

_LOGGER = get_logger(__name__)
_ENDINGS: Final[dict[Ending, str]] = {"id": "stop_token", "string": "stop_text", "length": "length"}


@dataclass(frozen=True, kw_only=True)
class RolloutWork:
    """The texts to write.

    Attributes:
        prompts: the file.
        rows: of the file that are used, the first ones.
        samples: texts of each prompt, which differ by their draws.
        most_tokens: of a text.
        part_rows: prompts of a part.
        strings: that end a text.
        keeps_truncated: whether texts that end at their length are saved.
        checked_texts: most texts of a start whose log-probabilities are computed again; 0: none.
    """

    prompts: PromptFile
    rows: int
    samples: int
    most_tokens: int
    sampling: Sampling
    part_rows: int
    strings: tuple[str, ...] = ()
    keeps_truncated: bool = True
    checked_texts: int = 0

    @property
    def parts(self) -> int:
        """The number of parts."""
        return math.ceil(self.rows / self.part_rows)


@dataclass(frozen=True)
class _Beginnings:
    """The encoded prompts of a part, by their rows."""

    rows: tuple[int, ...]
    ids: tuple[tuple[int, ...], ...]


@dataclass
class FirstRank:
    """The work of the first rank alone: it reads prompts, and saves parts.

    positions: of the model.
    """

    work: RolloutWork
    tokens: PromptTokens
    folder: RolloutFolder
    positions: int
    _rows: Iterator[Row] = field(init=False)
    _next: int = 0
    _prompts: dict[int, Prompt] = field(init=False, default_factory=dict)
    _progress: ProgressReporter = field(init=False)
    _written: Totals = Totals()  # of this start
    check: LogProbCheck | None = None  # of this start

    def begin(self) -> None:
        """Show the progress on standard error, with log lines above it."""
        work = self.work
        self._rows = islice(work.prompts.rows(), work.rows)
        missing = [
            min(work.part_rows, work.rows - number * work.part_rows)
            for number in self.folder.missing(work.parts)
        ]
        done = work.rows - sum(missing)
        self._progress = ProgressReporter(sys.stderr, label="prompt", total=work.rows, done=done)
        log.configure(0, stream=self._progress.stream)

    def read(self, number: int) -> _Beginnings:
        """Return the prompts of a part, in ascending order of parts; the rest is passed over.

        Prompts that cannot be encoded, or leave the model no position, are left out with a warning.
        """
        file, size = self.work.prompts, self.work.part_rows
        passed, self._next = (number - self._next) * size, number + 1
        prompts = [file.prompt(row) for row in islice(self._rows, passed, passed + size)]
        self._prompts = {prompt.row: prompt for prompt in prompts}
        kept: dict[int, tuple[int, ...]] = {}
        refused: dict[int, str] = {}
        for prompt, ids in zip(prompts, self.tokens(prompts), strict=True):
            if isinstance(ids, str):
                refused[prompt.row] = ids
            elif len(ids) >= self.positions:
                positions = counted(self.positions, "position")
                refused[prompt.row] = f"{counted(len(ids), 'token')}; the model has {positions}"
            else:
                kept[prompt.row] = ids
        if refused:
            row, reason = next(iter(refused.items()))
            count = counted(len(refused), "prompt")
            _LOGGER.warning("%s: %s left out, first row %d: %s", file.path, count, row, reason)
        return _Beginnings(tuple(kept), tuple(kept.values()))

    def save(self, number: int, rows: Sequence[WriteRow], written: Sequence[Written]) -> None:
        """Write a part's file. Raises ConfigError."""
        samples = self.work.samples
        answers, truncated, log_prob = [], 0, 0.0
        for begun, text in zip(rows, written, strict=True):
            row, sample = begun.sample // samples + 1, begun.sample % samples
            is_cut = text.ended == "length"
            truncated += is_cut
            if is_cut and not self.work.keeps_truncated:
                continue
            assert text.text is not None, "all ranks have the tokenizer"
            log_prob += (own := math.fsum(text.log_probs))
            answers.append(
                {
                    **self._prompts[row].answered(text.text),
                    "row": row,
                    "sample": sample,
                    "ended": _ENDINGS[text.ended],
                    "tokens": len(text.ids),
                    "log_prob": round(own, 4),
                }
            )
        totals = Totals(
            texts=len(answers),
            tokens=sum(answer["tokens"] for answer in answers),
            truncated=truncated,
            left_out=len(self._prompts) - len(rows) // samples,
            log_prob=log_prob,
        )
        self.folder.write(number, answers, totals)
        self._written += totals
        self._progress.update(self._progress.done + len(self._prompts), self._figures)

    def _figures(self) -> list[ProgressFigure]:
        tokens = self._written.tokens
        rate = tokens / max(self._progress.elapsed, 1e-9)
        return [
            ProgressFigure(counted(tokens, "token")),
            ProgressFigure(f"{short_count(rate)} tok/s"),
        ]

    def finish(self) -> tuple[Totals, LogProbCheck | None]:
        """Return the sums of all parts and the newest check, and record them; raises ConfigError.

        A start that wrote nothing has no check of its own.
        """
        return self.folder.finish(self.work.parts, self.check)

    def close(self) -> None:
        """Remove the progress bar."""
        self._progress.close()


def write_parts(
    work: RolloutWork,
    *,
    build: Callable[[], CachedGPT],
    log_probs: TextsToLogProbs,
    first: FirstRank | None,
    stop_requested: Callable[[], bool],
) -> bool:
    """Write the missing parts; return whether all are written, False after a request to stop.

    The model is built where parts are missing.

    The part that a stop interrupts is left to the next start, with the same draws: they depend on
    the seed, the row, the sample and the position alone. first: on the first rank. log_probs:
    compared with those of the first texts that were written, once all are.

    Raises a MegatronDistillError on all ranks together.

    Collective: world, a broadcast of the missing parts; per part those of `on_first_rank`, the
    prompts from the first rank, a vote, an all-gather of a short object per rank, and those of
    `CachedGPT.write`. At the end those of `log_probs`.
    """
    missing, stop_ids = from_first_rank(partial(_missing, first))
    stops = Stops(ids=stop_ids, strings=work.strings)
    if not missing:
        return True
    model, sample = build(), TextSample(work.checked_texts)
    if first is not None:
        first.begin()
    with nullcontext() if first is None else closing(first):
        write = partial(_write_part, model=model, first=first, stop_requested=stop_requested)
        if not all(write(number, work, stops, sample) for number in missing):
            return False
    if sample.texts:
        check = sample.compared(log_probs(model, sample.texts))
        if first is not None:
            first.check = check
    return True


def _write_part(
    number: int,
    work: RolloutWork,
    stops: Stops,
    sample: TextSample,
    *,
    model: CachedGPT,
    first: FirstRank | None,
    stop_requested: Callable[[], bool],
) -> bool:
    """Write a part; return whether it is written, False after a request to stop."""
    # It passes over all rows before the part.
    read = on_first_rank(partial(_read, first, number), device=model.device)
    part = cast(_Beginnings, from_first_rank(lambda: read))
    rows = [
        WriteRow(ids, (row - 1) * work.samples + sample, work.most_tokens)
        for row, ids in zip(part.rows, part.ids, strict=True)
        for sample in range(work.samples)
    ]
    written = model.write(rows, sampling=work.sampling, stops=stops, stop_requested=stop_requested)
    if any_rank(stop_requested(), device=model.device):
        return False
    with together():
        if first is not None:
            first.save(number, rows, written)
    sample.take(rows, written)
    return True


def _missing(first: FirstRank | None) -> tuple[list[int], tuple[int, ...]]:
    assert first is not None
    return first.folder.missing(first.work.parts), first.tokens.stop_ids


def _read(first: FirstRank | None, number: int) -> _Beginnings:
    assert first is not None
    return first.read(number)
