"""Several teachers of which some have recorded ids only: routed, mixed and chosen."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import Term
from megatron_distill.losses.mean_on_records import MeanOnRecords
from megatron_distill.ops import VocabShard
from megatron_distill.signals import HiddenState, Recorded, Sampled
from tests.support.several_teachers import (
    LENGTH,
    SAMPLES,
    Inputs,
    Result,
    _divergence,
    on_ids,
    on_shard,
    recorded,
    target,
)
from tests.unit.losses.test_several_teachers import MIXED, NAMES, scored, teachers

K = 7
CODE = {"code": K}
ROUTED = [
    Term(top_k=K),
    Term("reverse_kl", 0.5, temperature=2.0, top_k=4),
    Term("js_divergence", 0.3, top_k=K, support="renormalized"),
    Term("total_variation", 0.2, top_k=5, support="raw"),
]


def assert_same(ours: Result, other: Result, *, tolerance: float = 1e-10) -> None:
    assert float(ours.total) == pytest.approx(float(other.total), rel=tolerance)
    for name in ("hidden_gradient", "weight_gradient"):
        torch.testing.assert_close(
            getattr(ours, name), getattr(other, name), rtol=tolerance, atol=1e-13
        )


@pytest.mark.parametrize("stored", [CODE, {"code": K, "law": K}, dict.fromkeys(NAMES, K)])
def test_routed_records_are_the_live_top_k(stored: dict[str, int]) -> None:
    inputs = Inputs.random()
    live = on_shard(0, 1, inputs, ROUTED, NAMES)
    ours = on_shard(0, 1, inputs, ROUTED, NAMES, stored=stored)
    assert_same(ours, live)
    metrics = ("teacher_ce", "teacher_entropy", "student_entropy", "topk_mass", "top1_agreement")
    for name in ("kd", *metrics, *(term.name for term in ROUTED)):
        # The statistics of records are summed with the weights of tokens, in fp32.
        rel = 1e-6 if name in ("teacher_ce", "teacher_entropy") else 1e-10
        assert float(ours.report[name]) == pytest.approx(float(live.report[name]), rel=rel)
    for name, sums in ours.sums.items():
        assert float(sums.labels) == float(live.sums[name].labels)
        assert float(sums.agreement) == pytest.approx(float(live.sums[name].agreement))


def mean_of_whole(inputs: Inputs, terms: Sequence[Term], k: int) -> Tensor:
    """The mean over the whole vocabulary, then restricted to the first ids of `code`."""
    hidden = inputs.hidden_NH.detach().clone().requires_grad_()
    total = hidden.new_zeros(())
    for term in terms:
        ids = inputs.logits("code").topk(term.top_k or k, 1).indices
        log_q = (hidden @ inputs.weight_GH.t() / term.temperature).log_softmax(1)
        mean = on_ids(target(inputs, term, NAMES), ids, term)
        values = _divergence(term, mean, on_ids(log_q, ids, term))
        weighted = (inputs.kd_weights_N.double() * values).sum()
        total = total + term.weight * term.temperature_factor * weighted
    total.backward()
    return hidden.grad


MEANS = {
    "arithmetic": [
        Term(temperature=2.0, scale_by_temperature_squared=True, teachers=teachers(**MIXED)),
        Term("reverse_kl", 0.5, top_k=4, teachers=teachers(**MIXED)),
        Term("js_divergence", 0.3, support="renormalized", teachers=teachers(**MIXED)),
    ],
    "scored": [
        Term(temperature=2.0, teachers=scored("cross_entropy", 2.0, math=1, code=1, law=1)),
        Term("reverse_kl", 0.5, top_k=4, teachers=scored("entropy", 2.0, **MIXED)),
    ],
    "three": [Term("squared_hellinger", teachers=teachers(math=1, code=2, law=3))],
    "geometric": [
        Term(temperature=2.0, support="renormalized", teachers=teachers("geometric", **MIXED)),
        Term("reverse_kl", top_k=4, support="renormalized",
             teachers=teachers("geometric", **MIXED)),
    ],
    "geometric scored": [
        Term(support="renormalized", teachers=scored("entropy", 3.0, "geometric", **MIXED)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", MEANS)
def test_a_mean_with_one_record_is_that_of_the_whole_distributions(kind: str) -> None:
    inputs = Inputs.random(3)
    terms = MEANS[kind]
    ours = on_shard(0, 1, inputs, terms, NAMES, stored=CODE)
    labels = on_shard(0, 1, inputs, [], NAMES).hidden_gradient
    expected = labels + mean_of_whole(inputs, terms, K)
    torch.testing.assert_close(ours.hidden_gradient, expected, rtol=1e-9, atol=1e-13)
    name = "+".join(terms[0].teachers.names)
    mean = target(inputs, terms[0], NAMES)
    ids = inputs.logits("code").topk(K, 1).indices
    top = ids.gather(1, mean.gather(1, ids).argmax(1, keepdim=True)).squeeze(1)
    is_same = top == (inputs.hidden_NH @ inputs.weight_GH.t()).argmax(1)
    agreement = (inputs.kd_weights_N.double() * is_same).sum()
    assert float(ours.sums[name].agreement) == pytest.approx(float(agreement))


def test_all_ids_of_a_record_are_the_live_mean() -> None:
    inputs = Inputs.random(4)
    for terms in (MEANS["arithmetic"][:1], MEANS["geometric"][:1]):
        live = on_shard(0, 1, inputs, terms, NAMES)
        ours = on_shard(0, 1, inputs, terms, NAMES, stored={"code": 53})
        assert_same(ours, live, tolerance=1e-9)


LOWEST = [
    Term(top_k=K, teachers=teachers("lowest_loss", math=1, code=1, law=1)),
    Term("reverse_kl", 0.5, top_k=4, teachers=teachers("lowest_loss", code=1, law=1)),
]


@pytest.mark.parametrize("stored", [CODE, {"code": K, "law": K}])
def test_the_lowest_loss_is_chosen_among_records_and_models(stored: dict[str, int]) -> None:
    inputs = Inputs.random(5)
    live = on_shard(0, 1, inputs, LOWEST, NAMES)
    ours = on_shard(0, 1, inputs, LOWEST, NAMES, stored=stored)
    # A live choice has the top-k of the chosen logits.
    assert_same(ours, live)
    for name in ("code", "law", "math"):
        assert float(ours.sums[name].labels) == pytest.approx(float(live.sums[name].labels))
    labels = inputs.kd_weights_N.view(SAMPLES, LENGTH).sum()
    assert sum(float(one.labels) for one in ours.sums.values()) == pytest.approx(2 * float(labels))


def test_means_that_records_do_not_have_are_refused_by_name() -> None:
    inputs = Inputs.random()
    both = [Term(teachers=teachers(**MIXED))]
    with pytest.raises(ValueError, match="code and math have recorded ids only"):
        on_shard(0, 1, inputs, both, NAMES, stored={"code": K, "math": K})
    geometric = [Term(teachers=teachers("geometric", **MIXED))]
    with pytest.raises(ValueError, match="'code' has recorded ids only, and a geometric"):
        on_shard(0, 1, inputs, geometric, NAMES, stored=CODE)
    top = [Term(teachers=scored("top_probability", 1.0, **MIXED))]
    with pytest.raises(ValueError, match="'code' has recorded ids without its top probability"):
        on_shard(0, 1, inputs, top, NAMES, stored=CODE)
    drawn = Sampled(torch.zeros(24, 1, dtype=torch.int64), torch.ones(24, 1))
    whole = HiddenState(*inputs.teachers["math"])
    signals = {"code": Recorded((drawn,), names=(both[0].name,)), "math": whole}
    mean = MeanOnRecords(signals, torch.arange(24), VocabShard(53, 0, 53), None, 5)
    with pytest.raises(ValueError, match="'code' has drawn ids"):
        mean.signal(both[0].teachers, both)


def test_a_record_names_its_terms() -> None:
    inputs = Inputs.random()
    found = recorded(inputs, "code", K, ROUTED)
    (second,) = found.targets([ROUTED[1]])
    assert torch.equal(second.ids, found.by_term[1].ids)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="not squared_hellinger"):
        found.targets([Term("squared_hellinger")])
    with pytest.raises(ValueError, match="names"):
        Recorded(found.by_term, names=("forward_kl",))
