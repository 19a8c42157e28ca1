"""A model's held-out loss without this package: the labels of packed samples, and its refusals."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_distill.data.samples import FULLY_TRAINED, Sample
from megatron_distill.errors import CheckpointError, DataError
from megatron_distill.evaluation.bits_per_byte import measure_text
from megatron_distill.evaluation.independent_loss import independent_loss
from tests.distributed.hugging_face_models import VOCABULARY, reference, save_model

# Documents of a sample: three, one of them a single token, and padding.
DOCUMENTS = [0, 0, 0, 0, 1, 2, 2, 2, 2, 2, -1, -1]


def samples() -> list[Sample]:
    rng = np.random.default_rng(4)
    return [
        Sample(
            tokens_S1=rng.integers(0, VOCABULARY, len(DOCUMENTS)).astype(np.int32),
            document_ids_S1=np.array(DOCUMENTS, np.int32),
            flags_S1=np.full(len(DOCUMENTS), FULLY_TRAINED, np.uint8),
            sample_id=number,
        )
        for number in range(3)
    ]


def test_each_document_is_a_sequence_whose_first_token_is_no_label(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "llama3.1")
    found = independent_loss(folder, samples())
    measured = measure_text(samples(), [b"a"] * VOCABULARY, isolate_documents=True)
    assert found.labels == measured.labels == 3 * (3 + 4)
    # Label by label, the context alone given.
    model, losses = reference(folder), []
    for sample in samples():
        for start, stop in ((0, 4), (5, 10)):
            for label in range(start + 1, stop):
                context = torch.from_numpy(sample.tokens_S1[start:label].astype(np.int64))
                with torch.no_grad():
                    logits = model(input_ids=context[None]).logits[0, -1].double()
                losses.append(-float(logits.log_softmax(0)[int(sample.tokens_S1[label])]))
    assert found.nats_per_label == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert found.nats_per_label > 0.5 * math.log(VOCABULARY)


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none: transformers cannot load it"):
        independent_loss(tmp_path / "none", samples())
    folder = save_model(tmp_path / "model", "llama3.1")
    with pytest.raises(DataError, match="no label; raise data.validation_fraction"):
        independent_loss(folder, [])
