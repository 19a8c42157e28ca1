"""The defects that losses for distillation shipped with elsewhere: each has a test here that is
named after it, `test_defect_NN_...`, so that `pytest -k defect_NN` runs it."""

import re

from tests.guards.source_tree import ROOT

DEFECTS = {
    1: "a loss accumulator [N, V] inside a kernel that is to hold no logits (Liger-Kernel, JSD)",
    2: "chunks along the batch axis of [b, s, H], so that nothing is chunked (TRL, GKD)",
    3: "T^2 on the loss but not on the gradient (Axolotl)",
    4: "vocabularies of unequal size padded with 0 instead of -inf (Liger-Kernel)",
    5: "a mask that is never false (MiniLLM)",
    6: "the maximum subtracted in place from what `.float()` did not copy (Megatron-LM)",
    7: "vocabularies limited to 131,072 (Megatron-LM's store, SpecForge's blocks)",
    8: "a per-token upstream gradient applied after the sum over tokens (Liger-Kernel)",
    9: "a mean normalised twice (torchtune)",
    10: "fp32 products in backward (NeMo-RL)",
    11: "blocks too large for their warps or for two softmaxes (Liger-Kernel, Fast-LLM)",
    12: "an autotuner that runs a kernel again which works in place (Fast-LLM, SkyRL)",
    13: "log-probabilities in bf16 before the divergence (TRL)",
    14: "an exception swallowed by one rank around a collective (Megatron-LM)",
    15: "rows that break the formula: all masked, ids twice or nowhere, underflow, point masses",
    16: "-inf less -inf in masked lanes, which is NaN before `where` looks away",
    17: "tensor-parallel results that differ from the dense ones",
}
NAME = re.compile(r"^def test_defect_(\d\d)_\w+\(", re.MULTILINE)


def test_every_known_defect_and_no_other_has_a_test_of_its_name() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    assert {int(number) for text in texts for number in NAME.findall(text)} == set(DEFECTS)
