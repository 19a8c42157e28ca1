"""A student against its teacher on texts that the teacher writes.

The output of speculative decoding follows the teacher, so a draft's acceptance belongs on such
texts, and not on those of a corpus.

Shapes: N positions of some texts, b texts, S positions of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
import torch.distributed as dist

from megatron_distill.losses.comparison import compare_with_logits
from megatron_distill.models.generation.attend import reading
from megatron_distill.models.generation.batches import RowSize, batches_of
from megatron_distill.models.generation.cache import integers
from megatron_distill.models.generation.model import CachedGPT
from megatron_distill.models.gpt import vocab_shard
from megatron_distill.runtime.batch import Batch, StepBatches
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.segments import copied
from megatron_distill.train.calibration import token_figures
from megatron_distill.train.evaluation.reader import Reader
from megatron_distill.train.evaluation.scoring import Ids
from megatron_distill.train.evaluation.text_hash import hash_of_ids
from megatron_distill.train.evaluation.text_sums import (
    Measured,
    block_sums,
    figures_of,
    table_of,
    token_sums,
)

__all__ = ["Text", "compare_texts", "held_out_prompts"]


_POSITIONS = 2**13  # of one pass


@dataclass(frozen=True)
class Text:
    """A prompt, of one id at least, and its continuation."""

    prompt: Ids
    written: Ids


def held_out_prompts(steps: Sequence[StepBatches], groups: Groups, *, most: int) -> list[Ids]:
    """Return the first ids of each held-out sequence, at most `most`, of one document.

    In the order of the samples; the same in every layout and on every rank.

    Collective: data x context group, one all-gather of the held-out ids.
    """
    own = [part for step in steps for batch in step.micro_batches for part in _beginnings(batch)]
    shared: list[list[tuple[int, dict[int, int]]] | None]
    shared = [None] * groups.data_context.size()
    dist.all_gather_object(shared, own, group=groups.data_context)
    found: dict[int, dict[int, int]] = {}
    for sample, tokens in (one for part in shared if part for one in part):
        found.setdefault(sample, {}).update(tokens)
    return [
        tuple(tokens[place] for place in takewhile(tokens.__contains__, range(most)))
        for _, tokens in sorted(found.items())
        if tokens
    ]


def _beginnings(batch: Batch) -> list[tuple[int, dict[int, int]]]:
    """Return of each sequence its sample, and this rank's ids of its first document by position."""
    batch = batch.on_host
    places = batch.sequence_index_s.tolist()
    found = []
    for sample, tokens, weights, documents in zip(
        batch.sample_ids_b.tolist(),
        batch.tokens_bs.tolist(),
        batch.kd_weights_bs.tolist(),
        batch.document_ids_bS.tolist(),
        strict=True,
    ):
        first = documents[0]
        # Without isolated documents the padding that fills up a batch has a document's number.
        is_padding = first < 0 or (len(set(tokens)) == 1 and not any(weights))
        ends = (place for place, document in enumerate(documents) if document != first)
        end = 0 if is_padding else next(ends, len(documents))
        inside = {place: token for place, token in zip(places, tokens, strict=True) if place < end}
        found.append((sample, inside))
    return found


@reading
def compare_texts(
    teacher: CachedGPT, student: CachedGPT, texts: Sequence[Text]
) -> dict[str, object]:
    """Return the figures of `compare_held_out` on the continuations, the same on every rank.

    `text_hash` is the digest of prompts and continuations. Every token has the same weight. Both
    models have the same tokens and layout. The data and context ranks share the texts; where
    experts are spread over them, all read every text together.

    Collective: those of `Stage.run` and of `compare_with_logits`; at the end those of
    `figures_of`.
    """
    groups, ranks = student.groups, student.groups.data_context
    in_step = groups.layout.expert > 1
    shard = vocab_shard(student.architecture, groups, tokens=student.vocab_size)
    readers = Reader.of(teacher, shard), Reader.of(student, shard)
    chosen = [number for number, text in enumerate(texts) if text.written]
    own = set(chosen[ranks.rank() :: ranks.size()])
    rows = sorted(chosen if in_step else own, key=lambda number: (-_length(texts[number]), number))
    measured: list[Measured] = []
    batches = batches_of(
        [RowSize(_length(text), 0) for text in texts],
        rows,
        row_bytes=lambda *_: 0,
        cache_bytes=0,
        positions=_POSITIONS,
    )
    for numbers in batches:
        measured += _measured(readers, texts, numbers, own)
    for reader in readers:
        reader.stage.finish()
    figures = figures_of(measured, groups)
    if figures:
        figures["text_hash"] = hash_of_ids([(text.prompt, text.written) for text in texts])
    return figures


def _measured(
    readers: tuple[Reader, Reader], texts: Sequence[Text], numbers: Sequence[int], own: set[int]
) -> list[Measured]:
    """Return the figures of a batch of texts, zero for those that are not own, on the last stage.

    numbers: of the batch's texts.
    """
    teacher, student = readers
    texts = [texts[number] for number in numbers]
    ids = [(*text.prompt, *text.written) for text in texts]
    given, states = (reader.begin([row[:-1] for row in ids], 0) for reader in readers)
    if given is None or states is None:
        return []
    device, shard = student.stage.device, student.stage.shard
    places: list[range] = []
    start = 0
    for text, row in zip(texts, ids, strict=True):
        places.append(range(start + len(text.prompt) - 1, start + len(row) - 1))
        start += len(row) - 1
    found = compare_with_logits(
        student.stage.states(states),
        teacher.stage.states(given),
        integers([token for row in ids for token in row[1:]], device),
        integers([index for place in places for index in place], device),
        shard=shard,
        group=student.stage.groups.tensor,
    )
    assert found.overlap is not None
    # Where each counted token is, known on the host: nothing waits for the device.
    row_n = integers([row for row, place in enumerate(places) for _ in place], device)
    column_n = integers([column for place in places for column in range(len(place))], device)
    sizes = [len(place) for place in places]
    counts = copied(
        torch.tensor([number in own for number in numbers], dtype=torch.float64), device
    )
    inside_bS = torch.arange(max(sizes), device=device) < integers(sizes, device)[:, None]
    overlap_bS = torch.zeros(inside_bS.shape, dtype=torch.float64, device=device)
    overlap_bS[row_n, column_n] = found.overlap
    valid_bS = inside_bS & (counts > 0)[:, None]
    documents_bS = torch.zeros_like(valid_bS, dtype=torch.int64)
    weights = counts[row_n]
    sums = token_sums(found, weights, row_n, len(texts))
    sums |= block_sums(valid_bS, valid_bS, documents_bS, overlap_bS, overlap_bS)
    return [Measured(numbers, table_of(sums), token_figures(found, weights))]


def _length(text: Text) -> int:
    return len(text.prompt) + len(text.written) - 1
