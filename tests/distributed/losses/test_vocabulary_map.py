"""A run's vocabulary map: the first rank builds it, and every rank has it or the error."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from megatron_distill.align.map_file import load_map, map_bytes
from megatron_distill.errors import DataError
from megatron_distill.train.assemble.alignment import open_vocabulary_map
from tests.distributed.pool import Pool
from tests.support.tokenizer_kinds import byte_level, tiktoken_of_bpe

DEVICE = torch.device("cpu")


def _open(rank: int, world: int, folder: Path) -> tuple[bytes, str]:
    student, teacher = (byte_level(), tiktoken_of_bpe()) if rank == 0 else (None, None)
    own = folder / str(rank)  # the ranks share no disk
    found = open_vocabulary_map(student, teacher, folder=own, device=DEVICE)
    try:
        open_vocabulary_map(student, student, folder=own, device=DEVICE)
    except DataError as error:
        dist.barrier()  # still in step with each other
        return map_bytes(found), str(error)
    return map_bytes(found), "no error"


def test_every_rank_has_the_first_rank_s_map(pool: Pool, tmp_path: Path) -> None:
    (content, error), *more = pool.run(2, _open, tmp_path)
    assert more == [(content, error)]
    assert "are one tokenizer" in error
    (path,) = (tmp_path / "0").iterdir()
    assert map_bytes(load_map(path)) == content
    assert not (tmp_path / "1").exists()
