"""The planner's bytes of activations that wait for the backward pass against built models.

Dense layers in fp32 and experts in bf16, without recomputation and with that of parts; dense ones
also with that of whole layers. Two models that differ in their layers give the bytes of one alone.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from tests.distributed.megatron_world import megatron_groups, small_architecture
from tests.distributed.pool import Pool

if TYPE_CHECKING:
    from megatron_distill.planning.operations import Recomputed

ROWS, LENGTH = 2, 32
WIDE = {"hidden_size": 64, "ffn_hidden_size": 160, "head_size": 16}
EXPERTS = {**WIDE, "moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 96}}
Setting = tuple[dict[str, Any], str, "Recomputed", tuple[str, ...]]
SETTINGS: dict[str, Setting] = {
    "dense": (WIDE, "fp32", "none", ()),
    "dense, attention": (WIDE, "fp32", "selective", ("attention",)),
    "dense, mlp": (WIDE, "fp32", "selective", ("mlp",)),
    "dense, full": (WIDE, "fp32", "full", ()),
    "experts": (EXPERTS, "bf16", "none", ()),
    "experts, mlp": (EXPERTS, "bf16", "selective", ("mlp",)),
}


def kept(rank: int, world: int, settings: dict[str, Setting]) -> dict[str, tuple[float, float]]:
    """Bytes per token that a layer leaves for its backward pass: built, and planned."""
    with megatron_groups() as groups:
        import torch

        from benchmarks.harness.peak import LiveStorages
        from megatron_distill.models.execution import Execution, Recompute
        from megatron_distill.models.gpt import build_gpt, run_model
        from megatron_distill.planning.activations import layer_bytes
        from megatron_distill.planning.run import Choice, PlannedRun
        from megatron_distill.runtime.batch import Batch

        batch = Batch.untrained(torch.ones((ROWS, LENGTH), dtype=torch.int64))
        found = {}
        for name, (fields, precision, recompute, modules) in settings.items():
            dtype = torch.float32 if precision == "fp32" else torch.bfloat16
            again = Recompute.of(recompute, modules)
            execution = Execution(dtype, torch.device("cpu"), again)
            alive = []
            for layers in (2, 4):
                shape = small_architecture(**fields, num_layers=layers)
                (model,) = build_gpt(shape, groups=groups, execution=execution, seed=1)
                run_model(model, batch, context_size=1)  # makes what later passes have in common
                with LiveStorages() as live:
                    output = run_model(model, batch, context_size=1)
                    gc.collect()
                    alive.append(live.current)
                del output
            run = PlannedRun(
                student=shape, teacher=None, sequence_length=LENGTH, global_batch_size=ROWS,
                precision="fp32" if precision == "fp32" else "bf16",
            )  # fmt: skip
            choice = Choice(
                layout=groups.layout, ranks=1, micro_batch_size=ROWS, layers=(4,),
                recompute=recompute, modules=modules,
            )  # fmt: skip
            has_experts = shape.moe is not None
            planned = layer_bytes(
                run, choice, has_experts=has_experts, recomputed=True, is_fused=False
            )
            found[name] = (alive[1] - alive[0]) / 2 / (ROWS * LENGTH), planned.kept
        return found


def test_a_layer_leaves_the_planned_bytes_for_its_backward_pass(pool: Pool) -> None:
    (found,) = pool.run(1, kept, SETTINGS)
    assert found.keys() == SETTINGS.keys()
    wrong = {
        name: both for name, both in found.items() if not 0.95 * both[0] <= both[1] <= 1.1 * both[0]
    }
    assert not wrong
