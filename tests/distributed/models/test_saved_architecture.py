"""The architecture in a checkpoint's description, of this release and of older ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.megatron_world import small_architecture
from tests.distributed.pool import Pool

SLIDING: dict[str, Any] = {
    "sliding_window": 5,
    "sliding_layers": (0, 2),
    "rope_scaling": {"kind": "linear", "factor": 2.0},
}
EXPERTS: dict[str, Any] = {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24}}


def _complaint(
    rank: int,
    world: int,
    saved: dict[str, Any],
    forgotten: list[str],
    added: dict[str, Any],
    ours: dict[str, Any],
) -> str:
    architecture = small_architecture(**ours)
    from megatron_distill.errors import CheckpointError
    from megatron_distill.train.checkpoint.description import Description, check_same_model

    values = json.loads(json.dumps(small_architecture(**saved).as_dict()))
    for name in forgotten:
        holder, _, key = name.rpartition(".")
        del (values[holder] if holder else values)[key]
    description = Description(
        step=1, tokens=1, bad_steps=0, architecture={**values, **added}, tokenizer="abc",
        layout="", data={},
    )  # fmt: skip
    try:
        check_same_model(description, architecture, "abc", Path("folder"))
    except CheckpointError as error:
        return str(error)
    return ""


OLDER = ["sliding_window", "sliding_layers", "rope_scaling", "post_norms", "embedding_scale"]
SAME: dict[str, tuple[dict[str, Any], list[str]]] = {
    "of this release": (SLIDING, []),
    "of an older release": ({}, OLDER),
    "experts of an older release": (EXPERTS, [*OLDER, "moe.renormalize"]),
}


@pytest.mark.parametrize("case", SAME)
def test_the_same_model_is_known_again(pool: Pool, case: str) -> None:
    changes, forgotten = SAME[case]
    assert pool.run(1, _complaint, changes, forgotten, {}, changes) == [""]


def test_another_model_is_distinguished_by_fields_that_only_one_of_them_has(pool: Pool) -> None:
    (text,) = pool.run(1, _complaint, {}, OLDER, {}, SLIDING)
    assert "sliding_window None vs 5" in text
    assert "rope_scaling.kind None vs 'linear'" in text
    (text,) = pool.run(1, _complaint, SLIDING, [], {}, {**SLIDING, "sliding_layers": (0, 1)})
    assert "sliding_layers (0, 2) vs (0, 1)" in text


def test_a_field_of_another_release_is_named(pool: Pool) -> None:
    (text,) = pool.run(1, _complaint, {}, [], {"sinks": 4}, {})
    assert "of another release" in text
    assert "sinks" in text
