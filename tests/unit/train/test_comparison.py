"""Expected tokens of drafted blocks, against a loop over positions."""

from __future__ import annotations

import torch

from megatron_distill.train.comparison import LONGEST_DRAFT, block_sums


def test_blocks_stay_within_documents_and_trained_labels() -> None:
    generator = torch.Generator().manual_seed(3)
    least = torch.rand(2, 12, generator=generator, dtype=torch.float64)
    most = least + (1 - least) / 2
    valid = torch.rand(2, 12, generator=generator) > 0.15
    begins = torch.rand(2, 12, generator=generator) > 0.3
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    found = block_sums(valid, begins, documents, least, most)
    for length in range(1, LONGEST_DRAFT + 1):
        count, sums = 0, {"overlap": 0.0, "overlap_most": 0.0}
        for row in range(2):
            for start in range(12 - length + 1):
                block = slice(start, start + length)
                of_one = documents[row, block].unique().numel() == 1
                if not (begins[row, start] and valid[row, block].all() and of_one):
                    continue
                count += 1
                for name, acceptance in {"overlap": least, "overlap_most": most}.items():
                    sums[name] += float(1 + acceptance[row, block].cumprod(0).sum())
        assert int(found[f"blocks@{length}"]) == count
        for name, value in sums.items():
            assert abs(float(found[f"{name}@{length}"]) - value) < 1e-12
    assert found["blocks@5"] > 0, "the case is not empty"
