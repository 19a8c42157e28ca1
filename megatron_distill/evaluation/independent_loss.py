"""The held-out loss of an exported model by `transformers` alone, to compare with a run's own.

Neither the models nor the losses of this package take part. An exported folder is read and run by
`transformers`, one document after another, and the cross-entropy is torch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_distill.data.samples import PADDING_DOCUMENT, Sample
from megatron_distill.errors import CheckpointError, DataError

__all__ = ["IndependentLoss", "independent_loss", "require_equal"]

# In fp32 both differ by rounding, 1e-6 of the loss. A wrong mask, shift or weight changes far more.
_DIFFERENCE: Final = 1e-4


@dataclass(frozen=True)
class IndependentLoss:
    """Mean cross-entropy in nats per label, and the number of labels."""

    nats_per_label: float
    labels: int


@torch.no_grad()
def independent_loss(folder: Path, samples: Iterable[Sample]) -> IndependentLoss:
    """The cross-entropy of a Hugging Face folder's model on all documents of samples.

    Documents are isolated: each part of one in a sample is a sequence of its own, and all its
    tokens but the first are labels. The model runs in fp32 on the CPU.

    Raises CheckpointError: `transformers` cannot load the folder; DataError: there is no label.
    """
    model = _model(folder)
    total, labels = 0.0, 0
    for ids_n in _documents(samples):
        tokens = torch.from_numpy(ids_n.astype(np.int64))
        logits_nV = model(input_ids=tokens[None, :-1]).logits[0].double()
        total += float(torch.nn.functional.cross_entropy(logits_nV, tokens[1:], reduction="sum"))
        labels += len(tokens) - 1
    if labels == 0:
        raise DataError("the held-out samples have no label; raise data.validation_fraction")
    return IndependentLoss(total / labels, labels)


def _documents(samples: Iterable[Sample]) -> Iterator[NDArray[np.int32]]:
    """The tokens of each part of a document that has a label."""
    for sample in samples:
        ids_S1 = sample.document_ids_S1
        edges = np.flatnonzero(np.diff(ids_S1)) + 1
        for start, stop in zip([0, *edges], [*edges, len(ids_S1)], strict=True):
            if ids_S1[start] != PADDING_DOCUMENT and stop - start > 1:
                yield sample.tokens_S1[start:stop]


def _model(folder: Path) -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder}: transformers cannot load it ({error})") from error
    return model.eval()


def require_equal(found: IndependentLoss, *, nats_per_label: float, labels: int, run: str) -> None:
    """Raise DataError unless a run's held-out loss is that of `transformers`, on the same labels.

    run: the run's name in the message.
    """
    difference = abs(found.nats_per_label - nats_per_label)
    # The negation also catches a loss that is not a number.
    if found.labels != labels or not difference <= _DIFFERENCE * nats_per_label:
        raise DataError(
            f"{run}: the held-out loss is {nats_per_label:.6f} nats of {labels:,} labels in the "
            f"run and {found.nats_per_label:.6f} of {found.labels:,} by transformers alone; both "
            "must agree. Start over with --fresh; report a difference that stays"
        )
