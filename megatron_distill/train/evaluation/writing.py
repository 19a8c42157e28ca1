"""Texts of an evaluated model, from a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import commonprefix

import torch

from megatron_distill.evaluation.requests import GREEDY, Interrupted, WrittenText
from megatron_distill.models.generation.model import CachedGPT
from megatron_distill.models.generation.request import Sampling, Stops, WriteRow
from megatron_distill.runtime.collectives import any_rank

__all__ = ["ModelWriter"]


@dataclass(frozen=True)
class ModelWriter:
    """Continues prompts with a model in any layout; see `Writer`.

    Attributes:
        model: with the text of ids, which stop strings need.
        rows: prompts of one call of the model.
        stop_requested: whether this rank has been asked to stop; once true, it stays so.
    """

    model: CachedGPT
    rows: int = 256
    stop_requested: Callable[[], bool] = lambda: False

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        stop_ids: tuple[int, ...],
        stops: tuple[str, ...],
        limit: int,
        sampling: Sampling = GREEDY,
        samples: Sequence[int] | None = None,
        advanced: Callable[[int], None] | None = None,
    ) -> list[WrittenText]:
        """Return the texts; see `Writer`. A beginning that all prompts share is computed once.

        Collective: those of `CachedGPT.write`, and per `rows` one all-reduce of 8 bytes.
        """
        found: list[WrittenText] = []
        ends = Stops(ids=stop_ids, strings=stops)
        numbers = range(len(prompts)) if samples is None else samples
        self._raise_if_stopped()
        for first in range(0, len(prompts), self.rows):
            part = [tuple(prompt) for prompt in prompts[first : first + self.rows]]
            # Each row has a token of its own.
            shared = commonprefix([prompt[:-1] for prompt in part]) if len(part) > 1 else ()
            rows = [
                WriteRow(prompt[len(shared) :], numbers[first + place], limit)
                for place, prompt in enumerate(part)
            ]
            written = self.model.write(
                rows,
                sampling=sampling,
                stops=ends,
                prefix=shared,
                stop_requested=self.stop_requested,
            )
            self._raise_if_stopped()  # the texts of some ranks may have ended early
            found += [WrittenText(one.text or "", one.ended == "length") for one in written]
            if advanced is not None:
                advanced(len(found))
        return found

    def _raise_if_stopped(self) -> None:
        device: torch.device = self.model.device
        if any_rank(self.stop_requested(), device=device, group=self.model.groups.world):
            raise Interrupted
