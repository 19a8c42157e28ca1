"""A mean of one teacher's recorded ids and of live teachers, as a target on the recorded ids.

With the recorded ids S of a token and its remaining ids as one class, the arithmetic mean

    m_j = sum_i w_i p_i(j) for j in S,    m_tail = sum_i w_i (1 - sum_S p_i(j))

is that of whole distributions: a live teacher has its probabilities at S too. Two records have
different ids, and neither has its probabilities of the ids of the other. The geometric mean over
the whole vocabulary needs a normaliser, which S does not give; renormalised over S it cancels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.losses.terms import Term, TermTeachers
from megatron_distill.ops.target_scores import log_probs_at
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.signals import Recorded, Signal, TopK

__all__ = ["MeanOnRecords"]


@dataclass(frozen=True)
class MeanOnRecords:
    """Forms means of teachers, one of them recorded, for some tokens of a micro-batch.

    Attributes:
        signals: of the teachers, of all N tokens.
        rows: ``[n]`` int64, the tokens.
        shard: this rank's columns.
        group: the ranks that share the vocabulary; None if this rank holds all of it.
        chunk_tokens: tokens whose logits exist at a time.
        shares: ``[N, M]`` of the teachers of each target that has a score.
    """

    signals: Mapping[str, Signal]
    rows: Tensor
    shard: VocabShard
    group: dist.ProcessGroup | None
    chunk_tokens: int
    shares: Mapping[TermTeachers, Tensor] = field(default_factory=dict)

    def signal(self, teachers: TermTeachers, terms: Sequence[Term]) -> Recorded:
        """The mean for each term, on the ids that the term has in the records.

        Tokens besides ``rows`` have those of the records.

        Collective: that of `log_probs_at` for each live teacher and temperature.

        Raises:
            ValueError: several teachers are recorded, their ids are draws, or a geometric mean is
                not renormalised.
        """
        recorded = [name for name in teachers.names if self._is_recorded(name)]
        if len(recorded) != 1:
            raise ValueError(
                f"a mean of {', '.join(teachers.names)}: {' and '.join(recorded)} have recorded "
                "ids only, and none has probabilities of another's ids; give each a term of its "
                "own"
            )
        targets = self.signals[recorded[0]].targets(terms)
        assert targets is not None
        known: dict[tuple[float, int | None, str], TopK] = {}
        found: list[TopK] = []
        for term, target in zip(terms, targets, strict=True):
            if not isinstance(target, TopK):
                raise ValueError(
                    f"teacher {recorded[0]!r} has drawn ids, which have no probabilities to take a "
                    "mean of; give it a term of its own"
                )
            if teachers.mixture == "geometric" and term.support != "renormalized":
                raise ValueError(
                    f"{term.name}: teacher {recorded[0]!r} has recorded ids only, and a geometric "
                    f"mean with support {term.support!r} needs the whole vocabulary; use "
                    "support='renormalized', or the arithmetic mean"
                )
            key = (term.temperature, term.top_k, term.support)
            if key not in known:
                known[key] = self._mean(teachers, recorded[0], target, term.temperature)
            found.append(known[key])
        return Recorded(tuple(found), names=tuple(term.name for term in terms))

    def _is_recorded(self, name: str) -> bool:
        return self.signals[name].logit_source() is None

    def _mean(
        self, teachers: TermTeachers, recorded: str, target: TopK, temperature: float
    ) -> TopK:
        ids_nK = target.ids.index_select(0, self.rows)
        own_nK = target.log_probs.index_select(0, self.rows)
        own_n = target.log_tail.index_select(0, self.rows)
        valid_nK = own_nK > -torch.inf
        shares: dict[str, float | Tensor] = dict(teachers.weights)
        if teachers.score is not None:
            of_rows = self.shares[teachers].index_select(0, self.rows).unbind(1)
            shares = dict(zip(teachers.names, of_rows, strict=True))
        is_geometric = teachers.mixture == "geometric"
        mean_nK, tail_n = _weighted(own_nK, own_n, shares.pop(recorded), is_geometric=is_geometric)
        for name, share in shares.items():
            source = self.signals[name].logit_source()
            assert source is not None
            live = log_probs_at(
                source,
                ids_nK,
                valid_nK,
                self.rows,
                temperature=temperature,
                shard=self.shard,
                group=self.group,
                chunk_tokens=self.chunk_tokens,
            )
            more_nK, more_n = _weighted(*live, share, is_geometric=is_geometric)
            join = torch.add if is_geometric else torch.logaddexp
            mean_nK, tail_n = join(mean_nK, more_nK), join(tail_n, more_n)
        mean_nK = mean_nK.masked_fill(~valid_nK, -torch.inf)
        if is_geometric:
            mean_nK = mean_nK.log_softmax(1)
            tail_n = torch.full_like(tail_n, -torch.inf)
        # Metrics read the most probable id first.
        mean_nK, order_nK = mean_nK.sort(1, descending=True)
        return replace(
            target,
            ids=target.ids.index_copy(0, self.rows, ids_nK.gather(1, order_nK)),
            log_probs=target.log_probs.to(mean_nK.dtype).index_copy(0, self.rows, mean_nK),
            log_tail=target.log_tail.to(tail_n.dtype).index_copy(0, self.rows, tail_n),
        )


def _weighted(
    log_probs: Tensor, log_tail: Tensor, share: float | Tensor, *, is_geometric: bool
) -> tuple[Tensor, Tensor]:
    """Logarithms of ``w p``, or of ``p^w``; w is a number, or ``[n]``."""
    if isinstance(share, Tensor):
        share = share.to(log_probs.dtype)
        if is_geometric:
            return log_probs * share.unsqueeze(1), log_tail * share
        return log_probs + share.log().unsqueeze(1), log_tail + share.log()
    if is_geometric:
        return log_probs * share, log_tail * share
    return log_probs + math.log(share), log_tail + math.log(share)
