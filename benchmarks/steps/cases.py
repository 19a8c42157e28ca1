"""The measured cases: model shapes, layouts, and the tables of cases."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from random import Random
from typing import Any, Literal

Subject = Literal["ours", "peer", "peer-unrepaired", "peer-stock"]

# Smoke runs of the harness itself; their figures mean nothing.
_QUICK_TOKENS = 256


@dataclass(frozen=True)
class Body:
    """A GPT's shape without its vocabulary: RMSNorm, SwiGLU, RoPE, grouped queries, no biases."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    num_experts: int | None = None  # top-2 of them in every layer


@dataclass(frozen=True)
class Workload:
    """Two models and the tokens of one step."""

    name: str
    student: Body
    teacher: Body
    vocab_size: int
    sequence_length: int
    micro_batch_size: int
    micro_batches: int  # per data-parallel rank
    document_length: int | None = None  # mean of the documents in a sample; None: one per sample

    def documents(self, sample: int) -> list[int]:
        """Return the lengths of a sample's documents, drawn from half to 1.5 times the mean."""
        if self.document_length is None:
            return [self.sequence_length]
        drawn, mean, lengths = Random(sample), self.document_length, list[int]()
        while (left := self.sequence_length - sum(lengths)) > 0:
            lengths.append(min(left, drawn.randint(mean // 2, mean + mean // 2)))
        return lengths

    def tokens_per_step(self, data_parallel: int) -> int:
        """Return the tokens of one optimizer step over all ranks."""
        sequences = self.micro_batch_size * self.micro_batches * data_parallel
        return self.sequence_length * sequences


@dataclass(frozen=True)
class Ranks:
    """A layout and the number of processes it takes."""

    name: str
    processes: int
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    context: int = 1
    expert: int = 1
    sequence: bool = False

    @property
    def data_parallel(self) -> int:
        """Ranks that see different data."""
        return self.processes // (self.tensor * self.pipeline * self.context)


@dataclass(frozen=True)
class Case:
    """One measurement: a workload under a layout in one precision."""

    workload: Workload
    ranks: Ranks
    precision: str
    chunk_tokens: int = 1024  # objective.chunk_tokens, the default of the configuration

    @property
    def name(self) -> str:
        """The case in three words, unique in a table."""
        return f"{self.workload.name}/{self.ranks.name}/{self.precision}"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.workload.tokens_per_step(self.ranks.data_parallel)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for a child process."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Case:
        """Rebuild a case from `as_dict`."""
        workload = dict(values["workload"])
        student, teacher = Body(**workload.pop("student")), Body(**workload.pop("teacher"))
        return cls(
            workload=Workload(student=student, teacher=teacher, **workload),
            ranks=Ranks(**values["ranks"]),
            precision=values["precision"],
            chunk_tokens=values["chunk_tokens"],
        )


_STUDENT = Body(4, 256, 704, 8, 4)
_TEACHER = Body(8, 512, 1408, 8, 4)

# The vocabulary is 64 to 256 times the student's width, as in students of 1 B parameters (64 times
# in Llama 3.2 1B, 170 in Qwen2.5 0.5B): that ratio decides how much of a step the head takes.
WORKLOADS = {
    "v32k": Workload("v32k", _STUDENT, _TEACHER, 32_768, 512, 4, 1),
    "v64k": Workload("v64k", _STUDENT, _TEACHER, 65_536, 512, 2, 1),
    "v128k": Workload("v128k", _STUDENT, _TEACHER, 128_256, 512, 2, 1),
    # Layers dominate: the smallest gain from a faster head.
    "v32k-deep": Workload(
        "v32k-deep", Body(8, 512, 1408, 8, 4), Body(16, 768, 2048, 12, 4), 32_768, 512, 4, 1
    ),
}
# The table of layouts: four micro-batches, enough to fill the pipelines.
LAYOUT_WORKLOAD = Workload(
    "layouts", Body(4, 256, 704, 8, 4), Body(4, 384, 1024, 8, 4), 32_768, 256, 2, 4
)
EXPERT_WORKLOAD = Workload(
    "layouts-moe",
    Body(4, 256, 352, 8, 4, num_experts=4),
    Body(4, 384, 1024, 8, 4),
    32_768,
    256,
    2,
    4,
)

LAYOUTS = {
    ranks.name: ranks
    for ranks in (
        Ranks("TP1", 1),
        Ranks("TP2", 2, tensor=2),
        Ranks("TP2+SP", 2, tensor=2, sequence=True),
        Ranks("PP2", 2, pipeline=2),
        Ranks("PP2+VPP2", 2, pipeline=2, virtual_pipeline=2),
        Ranks("DP2", 2),
        Ranks("CP2", 2, context=2),
        Ranks("TP2xPP2", 4, tensor=2, pipeline=2),
        Ranks("EP1-MoE", 1),
        Ranks("EP2-MoE", 2, expert=2),
    )
}


def layout_cases() -> list[Case]:
    """Return our own step under every layout; the global batch is the same in all of them."""
    cases = []
    for name, ranks in LAYOUTS.items():
        workload = EXPERT_WORKLOAD if name.endswith("MoE") else LAYOUT_WORKLOAD
        cases.append(Case(_shared_out(workload, ranks.data_parallel), ranks, "fp32"))
    return cases


def _shared_out(workload: Workload, data_parallel: int) -> Workload:
    fields = dict(vars(workload))
    fields["micro_batches"] //= data_parallel
    return Workload(**fields)


def peer_cases() -> list[Case]:
    """Return the cases in which the peer runs beside us."""
    plan = [
        ("v32k", "TP1", "fp32"),
        ("v32k", "TP1", "bf16"),
        ("v32k", "TP2", "fp32"),
        ("v32k", "TP2", "bf16"),
        ("v64k", "TP1", "fp32"),
        ("v64k", "TP2", "fp32"),
        ("v128k", "TP1", "fp32"),
        ("v128k", "TP2", "fp32"),
        ("v32k-deep", "TP1", "fp32"),
    ]
    return [
        Case(WORKLOADS[workload], LAYOUTS[layout], precision)
        for workload, layout, precision in plan
    ]


def document_cases() -> list[Case]:
    """Return steps over whole sequences, and over packed documents of some 512 tokens."""
    student, teacher = Body(2, 256, 704, 8, 4), Body(2, 384, 1024, 8, 4)
    return [
        Case(
            Workload(
                f"{length}-{'whole' if mean is None else 'documents'}",
                *(student, teacher, 8192, length, 1, 8192 // length),
                document_length=mean,
            ),
            LAYOUTS["TP1"],
            "fp32",
        )
        for length in (8192, 2048)
        for mean in (None, 512)
    ]


def stage_cases() -> list[Case]:
    """Return steps whose memory peaks in passes of stages with a small loss, or in the update."""
    student, teacher = Body(8, 256, 704, 8, 4), Body(8, 128, 352, 8, 4)
    stages = Workload("stages", student, teacher, 1024, 256, 2, 8)
    experts = Body(4, 256, 352, 8, 4, num_experts=4)
    with_experts = Workload("stages-moe", experts, Body(4, 384, 1024, 8, 4), 1024, 256, 2, 4)
    update = Workload("update", Body(4, 256, 704, 8, 4), teacher, 32_768, 64, 1, 4)
    plan = [
        (stages, Ranks("PP2", 2, pipeline=2), "bf16"),
        (stages, Ranks("PP2+VPP2", 2, pipeline=2, virtual_pipeline=2), "fp32"),
        (stages, Ranks("PP4", 4, pipeline=4), "fp32"),
        (stages, Ranks("PP4+VPP2", 4, pipeline=4, virtual_pipeline=2), "fp32"),
        (stages, Ranks("TP2xPP2", 4, tensor=2, pipeline=2), "fp32"),
        (stages, Ranks("TP2xPP2+SP", 4, tensor=2, pipeline=2, sequence=True), "fp32"),
        (stages, Ranks("CP2xPP2", 4, context=2, pipeline=2), "fp32"),
        (with_experts, Ranks("PP2", 2, pipeline=2), "fp32"),
        (update, LAYOUTS["TP1"], "fp32"),
        (update, LAYOUTS["DP2"], "bf16"),
    ]
    return [Case(workload, ranks, precision) for workload, ranks, precision in plan]


def quick(case: Case) -> Case:
    """Return a case with few tokens, to test the harness."""
    fields = dict(vars(case.workload))
    fields.update(sequence_length=_QUICK_TOKENS // fields["micro_batch_size"])
    return Case(Workload(**fields), case.ranks, case.precision, case.chunk_tokens)
