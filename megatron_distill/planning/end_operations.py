"""Seconds of a model's ends on one rank: the embedding, the heads, and the losses between them.

One micro-batch, one rank; rates as of `operations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Final

from megatron_distill.planning.losses.aligned import band_count
from megatron_distill.planning.losses.token_losses import chunk_rows
from megatron_distill.planning.operations import Passes, Rank

if TYPE_CHECKING:
    from megatron_distill.models.architecture import Architecture
    from megatron_distill.planning.device import DeviceProfile
    from megatron_distill.planning.run import Choice, LossTerm, PlannedRun

__all__ = [
    "CALLS_OF_PASSES",
    "embedding_passes",
    "head_messages",
    "head_passes",
    "loss_chunks",
    "measuring_messages",
    "measuring_passes",
]

# Passes over a matrix of logits besides the products: the student's are read for their statistics,
# read and written for the gradient; the teacher's are read for both.
_STUDENT_LOGIT_PASSES: Final = 3
_TEACHER_LOGIT_PASSES: Final = 2
# On a CPU, logits in the losses over those of a whole vocabulary: shards exchange their statistics
# before the gradient, which reads each logit and takes its exponential again (ops/chunk.py).
_SHARDED_LOGITS: Final = 4 / 3
# The share of a logit's time there that values without a gradient take, of 2,048 to 20,480 columns.
_VALUES_OF_LOGITS: Final = 0.85
# A choice of ids (ops/topk.py) reads the logits for statistics and for maxima of segments, copies
# them without the chosen ones, and reads that. A sort has 16 passes over 8 bytes of each number.
_CHOICE_PASSES: Final = 5
_SEGMENT, _SORT_BYTES = 32, 16 * 8
# Bytes that the mathematics of a term on few ids moves for each of them, in fp64; and with all
# further ids as one more, for which the student's logits are also read once more.
_ID_BYTES, _TAIL_ID_BYTES = 600, 1200
# Calls of torch on a CPU outside of layers, forward and backward: embedding, positions, last norm.
CALLS_OF_PASSES: Final = 95, 105
# Calls of torch in a chunk of the losses on a CPU, as additions of few numbers that take as long.
# Those of the labels, of divergences between whole logits, of a choice of ids, of a term on ids:
_CALLS_OF_LABELS, _CALLS_OF_LOGITS, _CALLS_OF_CHOICE, _CALLS_OF_IDS = 300, 370, 200, 350


def loss_chunks(run: PlannedRun, choice: Choice, device: DeviceProfile) -> int:
    """Return the chunks of logits in a micro-batch."""
    split = choice.layout.tensor
    tokens = choice.micro_batch_size * run.sequence_length // choice.layout.context
    if run.is_aligned:
        theirs = choice.teacher_tokens(run) if choice.keeps_head(run) else 0
        return band_count(run, device, tokens=tokens, teacher_tokens=theirs, split=split)
    columns = run.student.padded_vocab_size(split) // split
    return ceil(tokens / chunk_rows(run, device, columns))


def embedding_passes(shape: Architecture, rank: Rank, *, trains: bool = True) -> Passes:
    """Return the time of the embedding of a micro-batch on the first stage.

    With the calls outside of layers on a CPU. Its gradient is a matrix like it, zeroed and written,
    then added to the fp32 sum. Tensor ranks sum the rows of their tokens, or scatter the sum and
    gather its gradient.
    """
    split, sequence = rank.layout.tensor, rank.layout.sequence
    link, message = rank.device.link(split), rank.tokens * shape.hidden_size * rank.width
    ahead_calls, back_calls = map(rank.calls, CALLS_OF_PASSES)
    ahead = (link.scattered if sequence else link.summed)(message, ranks=split)
    if not trains:
        return Passes(ahead_calls, forward_messages=ahead, tensor=ahead)
    back = link.gathered(message, ranks=split) if sequence else 0.0
    numbers = shape.padded_vocab_size(split) / split * shape.hidden_size
    gradient = rank.streamed(numbers * (2 * rank.element_width + 2 * 4), kernels=2)
    return Passes(ahead_calls, back_calls + gradient, ahead, back, ahead + back)


def head_passes(
    student: Architecture | None,
    teacher: Architecture | None,
    rank: Rank,
    *,
    chunks: int,
    chosen: int = 0,
    terms: Sequence[LossTerm] = (),
) -> Passes:
    """Return the time of the heads and the losses of a micro-batch on the last stage.

    teacher: its head runs here too; None: there is none, or its answers are ready. student None:
    the teacher's head alone. chunks: of the logits, each with one exchange of statistics. chosen:
    so many most probable ids, for a store or a message; there is no loss then. terms: of the loss;
    empty: one between whole logits.
    """
    forward, backward = (
        rank.calls_of_losses(chunks * _calls(terms, student, teacher, chosen=chosen)),
        0.0,
    )
    if student is not None:
        forward += _id_seconds(student, rank, chunks=chunks, terms=terms)
    split, rows = rank.layout.tensor, rank.tokens / chunks
    if student is not None:
        columns = student.padded_vocab_size(split) / split
        product = rank.product(rows, student.hidden_size, columns, count=chunks)
        forward, backward = forward + product, 2 * product
        forward += _logit_seconds(rank, columns, passes=_STUDENT_LOGIT_PASSES, chunks=chunks)
    if teacher is not None:
        columns = teacher.padded_vocab_size(split) / split
        forward += rank.product(rows, teacher.hidden_size, columns, count=chunks)
        # Teachers whose logits are only chosen from have no other pass over these.
        passes, most = _TEACHER_LOGIT_PASSES, chosen or _most_ids(terms)
        if not chosen and _has_whole(terms):
            forward += _logit_seconds(rank, columns, passes=passes, chunks=chunks)
        if most:
            forward += _logit_seconds(rank, columns, passes=passes, chunks=chunks, chosen=most)
    whole = teacher if chosen else student
    statistics, edge, back = _head_messages(
        whole, rank, chunks=chunks, chosen=chosen, work=forward / chunks
    )
    if not chosen:
        statistics += _id_messages(
            rank, chunks=chunks, terms=terms, has=(student is not None, teacher is not None)
        )
    return Passes(forward, backward, statistics + edge, back, statistics + edge + back)


def _has_whole(terms: Sequence[LossTerm]) -> bool:
    """Return whether a term is between whole logits of both models."""
    return not terms or any(term.top_k is None for term in terms)


def _most_ids(terms: Sequence[LossTerm]) -> int:
    """Return the ids of the term that has most; 0: all terms are between whole logits."""
    return max((term.top_k or 0 for term in terms), default=0)


def _id_seconds(
    student: Architecture, rank: Rank, *, chunks: int, terms: Sequence[LossTerm]
) -> float:
    """Return the time of the terms on few ids of a micro-batch, beside the labels' losses.

    With a tail the student's logits are read once more.
    """
    split = rank.layout.tensor
    columns = student.padded_vocab_size(split) / split
    found = 0.0
    for term in terms:
        if term.top_k is None:
            continue
        ids = rank.tokens * term.top_k
        # Of a core's plain rate, at which these bytes were measured.
        byte_count = ids * (_TAIL_ID_BYTES if term.has_tail else _ID_BYTES)
        found += byte_count / (rank.device.memory_gb_per_s * 1e9)
        if term.has_tail:
            logits = _logit_seconds(
                rank, columns, passes=_STUDENT_LOGIT_PASSES, chunks=chunks, has_gradient=False
            )
            found += logits / _STUDENT_LOGIT_PASSES
    return found


def _id_messages(
    rank: Rank, *, chunks: int, terms: Sequence[LossTerm], has: tuple[bool, bool]
) -> float:
    """Return the time in which tensor ranks gather the student's values of few ids.

    has: the student, and a live teacher, whose ids are chosen among the logits of all ranks.
    """
    split, most = rank.layout.tensor, _most_ids(terms)
    link, rows = rank.device.link(split), rank.tokens / chunks
    has_student, has_teacher = has
    numbers = [4.0 * term.top_k + 8.0 for term in terms if term.top_k and has_student]
    if most and has_teacher:
        numbers.append(8.0 * most + 8.0)
    return sum(chunks * link.gathered(each * rows * split, ranks=split) for each in numbers)


def _calls(
    terms: Sequence[LossTerm],
    student: Architecture | None,
    teacher: Architecture | None,
    *,
    chosen: int,
) -> int:
    """Return the calls of torch in a chunk of the losses, as of `head_passes`."""
    if chosen:
        return _CALLS_OF_CHOICE
    found = 0 if student is None else _CALLS_OF_LABELS
    if student is not None:
        found += _CALLS_OF_IDS * sum(term.top_k is not None for term in terms)
    if teacher is not None:
        found += _CALLS_OF_LOGITS * _has_whole(terms)
        found += _CALLS_OF_CHOICE * bool(_most_ids(terms))
    return found


def head_messages(student: Architecture, rank: Rank, *, chunks: int) -> Passes:
    """Return the messages of `head_passes` with losses alone."""
    statistics, edge, back = _head_messages(student, rank, chunks=chunks)
    return Passes(0.0, 0.0, statistics + edge, back, statistics + edge + back)


def measuring_passes(
    student: Architecture | None,
    teacher: Architecture | None,
    rank: Rank,
    *,
    chunks: int,
    of_gradients: bool,
    terms: Sequence[LossTerm] = (),
) -> Passes:
    """Return the time of the heads in a pass that measures losses, or norms of their gradients.

    Arguments as of `head_passes`. Losses take each head's product and the values of its logits.
    Gradients on the hidden states take the student's head once for the labels and once for the
    divergences, and as many products back. The head's own gradient is not formed. Terms on few ids
    and calls of torch are those of the losses: without a gradient there are about as many.
    """
    forward = rank.calls_of_losses(chunks * _calls(terms, student, teacher, chosen=0))
    if student is not None:
        forward += _id_seconds(student, rank, chunks=chunks, terms=terms)
    split = rank.layout.tensor
    times = 2 if of_gradients else 1
    shapes = (
        (student, _STUDENT_LOGIT_PASSES, times, 2 * times if of_gradients else 1),
        (teacher, _TEACHER_LOGIT_PASSES, 1, 1),
    )
    for shape, passes, count, products in shapes:
        if shape is None:
            continue
        columns = shape.padded_vocab_size(split) / split
        rows = rank.tokens / chunks
        forward += rank.product(rows, shape.hidden_size, columns, count=products * chunks)
        if shape is student or _has_whole(terms):
            logits = _logit_seconds(
                rank, columns, passes=passes, chunks=chunks, has_gradient=of_gradients
            )
            is_measured = rank.device.logit_seconds(rank.precision, columns) is not None
            values = _VALUES_OF_LOGITS if is_measured else 1 / passes
            forward += count * logits * (1.0 if of_gradients else values)
        if shape is teacher and (most := _most_ids(terms)):
            forward += _logit_seconds(rank, columns, passes=passes, chunks=chunks, chosen=most)
    messages = measuring_messages(
        student, rank, chunks=chunks, of_gradients=of_gradients, work=forward / chunks
    )
    of_ids = _id_messages(
        rank, chunks=chunks, terms=terms, has=(student is not None, teacher is not None)
    )
    return Passes(forward, forward_messages=of_ids, tensor=of_ids) + messages


def measuring_messages(
    student: Architecture | None,
    rank: Rank,
    *,
    chunks: int,
    of_gradients: bool,
    work: float | None = None,
) -> Passes:
    """Return the messages of `measuring_passes`; work: seconds before those of a chunk."""
    statistics, edge, back = _head_messages(student, rank, chunks=chunks, work=work)
    messages = 2 * (statistics + back) + edge if of_gradients else statistics + edge
    return Passes(forward_messages=messages, tensor=messages)


def _logit_seconds(
    rank: Rank,
    columns: float,
    *,
    passes: int,
    chunks: int,
    chosen: int = 0,
    has_gradient: bool = True,
) -> float:
    """Return the time of a micro-batch's logits of one model, without products.

    In the losses, or in a choice of so many most probable ids.
    """
    logits = rank.tokens * columns
    measured = rank.device.logit_seconds(rank.precision, columns, chosen=chosen)
    if measured is not None:
        is_read_twice = has_gradient and rank.layout.tensor > 1 and not chosen
        return logits * measured * (_SHARDED_LOGITS if is_read_twice else 1.0)
    sorted_numbers = rank.tokens * (columns / _SEGMENT + _SEGMENT * chosen) if chosen else 0.0
    passes = _CHOICE_PASSES if chosen else passes
    byte_count = logits * rank.width * passes + sorted_numbers * _SORT_BYTES
    return rank.passes(byte_count, kernels=chunks)


def _head_messages(
    shape: Architecture | None,
    rank: Rank,
    *,
    chunks: int,
    chosen: int = 0,
    work: float | None = None,
) -> tuple[float, float, float]:
    """Return the time of statistics, of whole hidden states of a model, and of their gradients.

    chosen: there are no gradients. So many ids and their logits are gathered from each tensor rank.
    work: seconds before the statistics of a chunk; None: as before the link's usual message.
    """
    split = rank.layout.tensor
    link = rank.device.link(split)
    after = work if rank.device.core_share == 1.0 else None
    statistics = chunks * link.gathered(
        80.0 * rank.tokens / chunks * split, ranks=split, after=after
    )
    if chosen:
        numbers = (8.0 * chosen + 8.0) * rank.tokens / chunks
        statistics += chunks * link.gathered(numbers * split, ranks=split)
    hidden = 0.0 if shape is None else rank.tokens * shape.hidden_size * rank.width
    # The hidden states are whole, but for the sum of their gradients, or gathered and scattered.
    sequence = rank.layout.sequence
    edge = link.gathered(hidden, ranks=split) if sequence else 0.0
    back = 0.0 if chosen else (link.scattered if sequence else link.summed)(hidden, ranks=split)
    return statistics, edge, back
