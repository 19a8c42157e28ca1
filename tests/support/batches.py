"""Batches of counted tokens."""

import torch

from megatron_distill.runtime.batch import Batch


def batch_of(rows: int, length: int) -> Batch:
    """Rows of tokens that count up, in documents of four tokens; some labels are masked."""
    cells = torch.arange(rows * length).view(rows, length)
    return Batch(
        tokens_bs=cells,
        labels_bs=cells + 1,
        ce_mask_bs=cells % 3 == 0,
        kd_mask_bs=cells % 5 == 0,
        position_ids_bs=cells % length,
        document_ids_bS=cells // 4,
        sequence_index_s=torch.arange(length),
        sample_ids_b=torch.arange(rows),
        isolate_documents=True,
    )
