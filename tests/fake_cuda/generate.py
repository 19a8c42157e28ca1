"""A model that writes and scores text, watched in each request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from megatron_distill.evaluation.requests import Request
from megatron_distill.runtime.batch import Batch
from megatron_distill.runtime.layout import Layout
from tests.distributed.megatron_world import SMALL
from tests.fake_cuda.host_side import as_first_rank, fake
from tests.fake_cuda.opened import CUDA, Opened, open_world
from tests.fake_cuda.watching_mode import Seen, WatchingMode

if TYPE_CHECKING:
    from megatron_distill.train.evaluation.pass_scoring import PassScorer

TOKENS = 190
PREFIX = (4, 9, 16)
PROMPTS = ((5, 17, 40), (7,), (8, 8, 60, 2, 33), (9, 1))
LIMITS = (24, 12, 9, 20)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "whole": {"temperature": 0.9, "seed": 3},
    "cut": {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "seed": 4},
}


def main(rank: int, world: int, layout: str, overrides: Sequence[str]) -> None:
    """Answer each kind of request, and print what was seen of it.

    layout: as JSON; overrides: the changes of the architecture as JSON, and names of `SAMPLINGS`.
    """
    opened = open_world(rank, world)
    patch.object(dist, "all_gather_object", _with_rows_of_others).start()
    from megatron_distill.models.architecture import Architecture
    from megatron_distill.models.execution import Execution
    from megatron_distill.models.generation import model as generation
    from megatron_distill.models.gpt import build_gpt
    from megatron_distill.runtime.groups import create_groups, seed_everything

    _keep_own_numbers(generation)
    changes = json.loads(overrides[0])
    architecture = Architecture.from_dict({**SMALL, "max_position_embeddings": 64, **changes})
    execution = Execution(torch.bfloat16, CUDA.torch_device)
    with opened.mode() as mode:
        groups = create_groups(Layout(**json.loads(layout)), timeout_minutes=5)
        seed_everything(1, groups)
        chunks = list(build_gpt(architecture, groups=groups, execution=execution, seed=11))
        for chunk in chunks:
            chunk.eval()
        found = _answered(opened, mode, architecture, chunks, groups, overrides[1:])
    opened.print_seen(requests=found)


def _with_rows_of_others(answers: list[Any], own: Any, **_: Any) -> None:
    """Every rank has what this one has; the rows of others, by their number, are None."""
    if isinstance(own, dict):
        own = {**dict.fromkeys(range(len(PROMPTS))), **own}
    answers[:] = [own] * len(answers)


def _keep_own_numbers(module: Any) -> None:
    """Let a module wait for the largest numbers of all ranks, and find those of this one."""
    highest = module.highest

    def own(*values: int, **named: Any) -> tuple[int, ...]:
        highest(*values, **named)
        return values

    patch.object(module, "highest", own).start()


def _letters(ids: Sequence[int]) -> str:
    return "".join(chr(97 + token % 26) for token in ids)


def _untrained_on_host(mode: WatchingMode) -> Any:
    """Return `Batch.untrained` whose batch is on the device and knows its copy on the host."""
    untrained = Batch.untrained

    def on_host(*given: Any, **named: Any) -> Batch:
        with as_first_rank():
            batch = untrained(*given, **named)
        return replace(fake(batch, mode), copied_from=batch)

    return on_host


def _answered(
    opened: Opened,
    mode: WatchingMode,
    architecture: Any,
    chunks: list[Any],
    groups: Any,
    samplings: Sequence[str],
) -> dict[str, dict[str, Any]]:
    from megatron_distill.models.generation import Sampling, ScoreRow, Stops, WriteRow
    from megatron_distill.models.generation.model import CachedGPT

    model = CachedGPT(
        chunks, architecture, groups, CUDA.torch_device, vocab_size=TOKENS, decode=_letters
    )
    rows = [
        WriteRow(ids, number, limit)
        for number, (ids, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True))
    ]
    # Fake tensors are none of inference mode.
    write, score = (
        torch.no_grad()(function.__wrapped__) for function in (CachedGPT.write, CachedGPT.score)
    )
    found: dict[str, dict[str, Any]] = {}

    def asked(name: str, work: Any) -> Any:
        opened.seen.__dict__.update(vars(Seen()))
        answer = opened.watched(work)()
        found[name] = dict(opened.seen.counts)
        return answer

    for name in samplings:
        values = SAMPLINGS[name]
        texts = asked(
            f"write {name}",
            lambda values=values: write(
                model, rows, sampling=Sampling(**values), stops=Stops(ids=(3,), strings=("zz",))
            ),
        )
        found[f"write {name}"]["lengths"] = [len(text.ids) for text in texts if text is not None]
    stoppable: Any = {"prefix": PREFIX, "stop_requested": lambda: False}
    asked(
        "write until asked to stop",
        lambda: write(model, rows, sampling=Sampling(), stops=Stops(), **stoppable),
    )
    answers = ((5,), (9, 8, 7), (6, 5))
    asked("score", lambda: score(model, [ScoreRow(ids, answers) for ids in PROMPTS]))
    asked("score after", lambda: score(model, [ScoreRow((2,), answers)], prefix=PREFIX))
    # Upstream's exchange of tokens is as long as counts that no fake tensor has.
    if len(chunks) == 1 and groups.layout.expert == 1:
        scorer, requests = _pass_scorer(architecture, chunks[0], groups), _requests(answers[1])
        with patch.object(Batch, "untrained", _untrained_on_host(mode)):
            asked("score by passes", lambda: scorer.score(requests))
    return found


def _pass_scorer(architecture: Any, chunk: Any, groups: Any) -> PassScorer:
    from megatron_distill.models.gpt import vocab_shard
    from megatron_distill.train.evaluation.pass_scoring import PassScorer

    shard = vocab_shard(architecture, groups, tokens=TOKENS)
    return PassScorer(chunk, architecture, shard, groups, CUDA.torch_device, 32, 64)


def _requests(answer: Sequence[int]) -> list[Request]:
    return [Request(np.array(ids, np.int32), np.array(answer, np.int32)) for ids in PROMPTS]
