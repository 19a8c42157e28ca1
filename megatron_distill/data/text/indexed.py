"""Samples of a corpus that was tokenised beforehand, in Megatron-Core's `.bin/.idx` format."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_distill.data.samples import FULLY_TRAINED, Sample, State, derived_seed
from megatron_distill.errors import DataError

__all__ = ["IndexedSource"]


class IndexedSource:
    """Samples of one prefix by position: position = epoch * samples per epoch + index.

    Raises DataError for missing or damaged files, too few tokens for one sample, and documents
    that do not end with `eos_id`. Reading a sample raises it for an id outside the vocabulary.
    """

    def __init__(
        self,
        prefix: str,
        *,
        sequence_length: int,
        vocab_size: int,
        eos_id: int,
        seed: int,
        held_out_fraction: float,
        is_held_out: bool,
        cache: Path | None,
    ) -> None:
        # Imported here, because only this format needs Megatron-Core.
        from megatron_distill.runtime.indexed_dataset import IndexedSamples

        self._samples = IndexedSamples(
            prefix,
            sequence_length=sequence_length,
            vocab_size=vocab_size,
            eos_id=eos_id,
            held_out_fraction=held_out_fraction,
            is_held_out=is_held_out,
            cache=cache,
        )
        self._prefix = prefix
        self._identity: State = {
            "samples_per_epoch": len(self._samples),
            "seed": seed,
            "validation_fraction": held_out_fraction,
        }
        self._seed = seed
        self._eos_id = eos_id
        self._position = 0
        if not is_held_out and len(self._samples) == 0:
            raise DataError(
                f"{prefix}: not enough tokens to train on one sequence of {sequence_length}; add "
                "data, or lower data.sequence_length or data.validation_fraction"
            )
        if len(self._samples) and not self._samples.documents_end_with(eos_id):
            raise DataError(
                f"{prefix}: its documents do not end with token {eos_id}, the tokenizer's "
                "end-of-document token; preprocess with --append-eod and with this run's tokenizer"
            )

    @property
    def samples_per_epoch(self) -> int:
        """Samples of one pass over the documents."""
        return len(self._samples)

    def next_sample(self) -> Sample:
        """The next sample. Raises DataError."""
        epoch, index = divmod(self._position, len(self._samples))
        seed = derived_seed(self._seed, epoch)
        tokens = self._samples.tokens(index, epoch=epoch, seed=seed)
        self._position += 1
        is_end = tokens[:-1] == self._eos_id
        documents = np.concatenate([[0], np.cumsum(is_end)]).astype(np.int32)
        flags = np.full(len(tokens), FULLY_TRAINED, np.uint8)
        return Sample(tokens, documents, flags, self._position - 1)

    def next_or_none(self) -> Sample | None:
        """The next sample of the first epoch; None after its end."""
        return self.next_sample() if self._position < len(self._samples) else None

    def state_dict(self) -> State:
        """The position, and the identity of the files and settings that it refers to."""
        return {**self._identity, "position": self._position}

    def load_state_dict(self, state: State) -> None:
        """Continue from a state. Raises DataError if the files are not the same."""
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise DataError(
                    f"data source {self._prefix}: {key} differs from the checkpoint ({value}, was "
                    f"{state.get(key)}); restore files, seed, data.sequence_length and "
                    "data.validation_fraction, or start a new run with another output"
                )
        self._position = state["position"]
