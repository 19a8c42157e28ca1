"""Rules on the shape of one model: each one broken alone, each one just kept.

Regimes: a shape at odds with itself; with the tensor, pipeline and expert ranks, for student and
teacher apart; with the sequence length; a shape that is known only from a checkpoint.
"""

import pytest

from megatron_distill.config import ArchitectureConfig, ParallelConfig, check_architecture
from tests.support.sample_configs import ARCHITECTURE, EXPERTS, TAUGHT, complaints, load_tree

BROKEN = {
    "heads over kv heads": (
        ["student.architecture.num_kv_heads=3"],
        "student.architecture.num_kv_heads = 3: must divide "
        "student.architecture.num_attention_heads = 4",
    ),
    "hidden over heads": (
        ["teacher.architecture.hidden_size=66"],
        "teacher.architecture.hidden_size = 66: not a multiple of",
    ),
    "odd rotary head": (
        ["student.architecture.head_size=15"],
        "student.architecture.head_size = 15: rotary positions need an even head size",
    ),
    "positions": (
        ["teacher.architecture.max_position_embeddings=63"],
        "data.sequence_length = 64: more than teacher.architecture.max_position_embeddings = 63",
    ),
    "heads over tensor": (
        [
            "parallel.tensor=4",
            "student.architecture.num_kv_heads=4",
            "teacher.architecture.num_kv_heads=4",
            "student.architecture.num_attention_heads=4",
            "teacher.architecture={num_attention_heads: 2, num_kv_heads: null}",
        ],
        "parallel.tensor = 4: does not divide teacher.architecture.num_attention_heads = 2; "
        "use 1 or 2",
    ),
    "kv heads over tensor": (
        [
            "parallel.tensor=4",
            "teacher.architecture.num_kv_heads=null",
            "student.architecture={num_attention_heads: 12, num_kv_heads: 6, hidden_size: 96}",
        ],
        "parallel.tensor = 4: neither divides student.architecture.num_kv_heads = 6 nor is a "
        "multiple of it; use 1, 2, 3, 6 or 12",
    ),
    "shared kv heads over tensor": (
        [
            "parallel.tensor=12",
            "teacher.architecture={num_attention_heads: 12, num_kv_heads: null, hidden_size: 96, "
            "ffn_hidden_size: 96}",
            "student.architecture={num_attention_heads: 12, num_kv_heads: 1, hidden_size: 96, "
            "ffn_hidden_size: 96}",
        ],
        "parallel.tensor = 12: does not divide the 12 + 2 * 1 heads of "
        "student.architecture.head_size = 8",
    ),
    "feed-forward over tensor": (
        ["parallel.tensor=2", "student.architecture.ffn_hidden_size=129"],
        "parallel.tensor = 2: does not divide student.architecture.ffn_hidden_size = 129",
    ),
    "expert width over tensor": (
        [
            "parallel.tensor=2",
            "parallel.sequence=true",
            "student.architecture.moe={num_experts: 4, ffn_hidden_size: 33}",
        ],
        "parallel.tensor = 2: does not divide student.architecture.moe.ffn_hidden_size = 33",
    ),
    "more stages than student layers": (
        ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "student.architecture.num_layers=3"],
        "parallel.pipeline = 2 times parallel.virtual_pipeline = 2: more stages than "
        "student.architecture.num_layers = 3; each stage needs a layer",
    ),
    "more stages than teacher layers": (
        ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "teacher.architecture.num_layers=1"],
        "parallel.pipeline = 2: more stages than teacher.architecture.num_layers = 1",
    ),
    "odd turned part": (
        ["student.architecture={head_size: 16, rotary_fraction: 0.2}"],
        "student.architecture.rotary_fraction = 0.2: rotates 3 of the 16 dimensions "
        "of a head; this must be an even number above 0",
    ),
    "nothing turned": (
        ["student.architecture={head_size: 16, rotary_fraction: 0.01}"],
        "student.architecture.rotary_fraction = 0.01: rotates 0 of the 16 dimensions "
        "of a head; this must be an even number above 0",
    ),
    "factors of the scaling": (
        [
            "student.architecture.rope_scaling={kind: llama3, factor: 2, "
            "low_frequency_factor: 4, high_frequency_factor: 4}"
        ],
        "student.architecture.rope_scaling.high_frequency_factor = 4.0: must be more than "
        "low_frequency_factor = 4.0",
    ),
    "sliding layers that are not there": (
        ["student.architecture={sliding_window: 8, sliding_layers: [0, 4]}"],
        "student.architecture.sliding_layers = [0, 4]: there is no layer 4; with "
        "student.architecture.num_layers = 4 the layers are 0 to 3, counted from 0",
    ),
    "scaled positions": (
        ["student.architecture={positions: learned, embedding_scale: 8}"],
        "student.architecture.embedding_scale = 8.0: would also scale the position "
        "embeddings of student.architecture.positions = learned; set positions=rope "
        "or embedding_scale=1",
    ),
    "dropout under a soft cap": (
        ["student.architecture={attention_softcap: 50, attention_dropout: 0.1}"],
        "student.architecture.attention_dropout = 0.1: not supported with "
        "student.architecture.attention_softcap; set attention_dropout=0",
    ),
    "post norms and experts": (
        [EXPERTS, "student.architecture.post_norms=true"],
        "student.architecture.post_norms = true: not supported with experts "
        "(student.architecture.moe); set post_norms=false or moe=null",
    ),
    "layers per stage": (
        ["parallel={pipeline: 2, layers_per_stage: {student: [3, 2]}}"],
        "parallel.layers_per_stage.student = [3, 2]: 5 layers in all, but "
        "student.architecture.num_layers = 4; change the numbers so that their sum is 4",
    ),
    "layers per stage of the teacher": (
        ["parallel={pipeline: 2, layers_per_stage: {teacher: [1, 2]}}"],
        "parallel.layers_per_stage.teacher = [1, 2]: 3 layers in all, but "
        "teacher.architecture.num_layers = 4",
    ),
    "one expert of weight one": (
        ["student.architecture.moe={num_experts: 4, top_k: 1}"],
        "student.architecture.moe.top_k = 1: with renormalize = true",
    ),
    "more experts used than there are": (
        ["student.architecture.moe={num_experts: 2, top_k: 3}"],
        "student.architecture.moe.top_k = 3: more than student.architecture.moe.num_experts = 2",
    ),
    "experts over ranks": (
        [EXPERTS, "parallel.expert=3"],
        "parallel.expert = 3: does not divide student.architecture.moe.num_experts = 4; "
        "use 1, 2 or 4",
    ),
    "experts and tensor without sequence": (
        [EXPERTS, "parallel.tensor=2"],
        "parallel.sequence = false: student.architecture.moe with parallel.tensor = 2"
        " needs sequence parallelism; set parallel.sequence=true",
    ),
}

KEPT = [
    ["student.architecture.num_kv_heads=1"],
    ["parallel.tensor=4", "student.architecture.num_kv_heads=2"],
    ["parallel.tensor=4", "student.architecture.num_kv_heads=1"],
    ["teacher.architecture={hidden_size: 66, head_size: 8}"],
    ["student.architecture={head_size: 15, positions: learned}"],
    ["teacher.architecture.max_position_embeddings=64"],
    ["parallel={pipeline: 2, virtual_pipeline: 2}", "teacher.architecture.num_layers=2"],
    [EXPERTS, "parallel={expert: 2, tensor: 2, sequence: true}"],
    ["parallel={pipeline: 2, virtual_pipeline: 2}", "student.architecture.num_layers=5"],
    [
        "parallel={pipeline: 2, virtual_pipeline: 2, layers_per_stage: {student: [1, 2, 1, 1], "
        "teacher: [3, 1]}}",
        "student.architecture.num_layers=5",
    ],
    ["student.architecture={head_size: 15, rotary_fraction: 0.4}"],
    ["student.architecture={sliding_window: 8, sliding_layers: [3], sliding_rope_base: 500}"],
    ["student.architecture={attention_softcap: 50, post_norms: true, embedding_scale: 8}"],
    ["student.architecture.moe={num_experts: 4, top_k: 1, renormalize: false}"],
]


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_the_only_complaint(tmp_path, case):
    overrides, words = BROKEN[case]
    found = complaints(load_tree, tmp_path, TAUGHT, *overrides)
    assert [line[: len(words)] for line in found] == [words]


@pytest.mark.parametrize("overrides", KEPT)
def test_a_rule_that_is_just_kept_says_nothing(tmp_path, overrides):
    load_tree(tmp_path, TAUGHT, *overrides)


def test_a_shape_from_a_checkpoint_is_checked_by_the_same_rules():
    shape = ArchitectureConfig(
        **ARCHITECTURE | {"num_layers": 3, "ffn_hidden_size": 130},
        max_position_embeddings=64,
        vocab_size=100,
    )
    layout = ParallelConfig(tensor=4, pipeline=2, virtual_pipeline=2)
    assert check_architecture(shape, "student", ParallelConfig(), 64) == []
    student = check_architecture(shape, "student", layout, 65)
    teacher = check_architecture(shape, "teacher", layout, 65)
    assert [text.split(":")[0] for text in student] == [
        "data.sequence_length = 65",
        "parallel.tensor = 4",
        "parallel.pipeline = 2 times parallel.virtual_pipeline = 2",
    ]
    assert [text.split(":")[0] for text in teacher] == [
        "data.sequence_length = 65",
        "parallel.tensor = 4",
    ]
    assert "teacher.architecture.ffn_hidden_size = 130" in teacher[1]
