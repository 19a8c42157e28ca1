"""Rules over several keys: each one broken alone, each one just kept, all reported together.

Regimes: rules that hold for any number of processes and are checked at loading; rules on the
number of processes. Those on the shape of one model are in test_check_model.py.
"""

import re

import pytest

from megatron_distill.config import ParallelConfig, check_layout
from tests.support.sample_configs import EXPERTS, TAUGHT, complaints, load_tree

BROKEN = {
    "no shape and no checkpoint": (
        ["student={architecture: null}"],
        "student: neither student.hf nor student.architecture nor student.checkpoint is given",
    ),
    "sequence length over tensor and context": (
        ["parallel.sequence=true", "parallel.tensor=2", "data.sequence_length=65"],
        "data.sequence_length = 65: with parallel.sequence it must be a multiple of "
        "parallel.tensor * parallel.context = 2",
    ),
    "sequence length over context": (
        ["parallel.context=2", "data.sequence_length=66"],
        "data.sequence_length = 66: with parallel.context = 2 it must be a multiple of "
        "2 * parallel.context = 4",
    ),
    "numbers of layers over stages": (
        ["parallel={pipeline: 2, layers_per_stage: {student: [4]}}"],
        "parallel.layers_per_stage.student = [4]: 1 number, but parallel.pipeline = 2 needs one "
        "for each of 2 stages; list 2",
    ),
    "a stage without layers": (
        ["parallel={pipeline: 2, layers_per_stage: {student: [4, 0]}}"],
        "parallel.layers_per_stage.student = [4, 0]: each stage needs a layer; write 1 or more",
    ),
    "numbers of layers over virtual stages": (
        ["parallel={pipeline: 2, virtual_pipeline: 2, layers_per_stage: {student: [2, 2]}}"],
        "parallel.layers_per_stage.student = [2, 2]: 2 numbers, but parallel.pipeline = 2 times "
        "parallel.virtual_pipeline = 2 needs one for each of 4 stages; list 4",
    ),
    "source without paths": (
        ["data.sources.0.format=jsonl"],
        "data.sources.0.paths = []: format jsonl needs at least one path",
    ),
    "validation source without paths": (
        ["data.validation_sources=[{format: text}]"],
        "data.validation_sources.0.paths = []: format text needs at least one path",
    ),
    "sources of one name": (
        ["data.sources=[{format: jsonl, paths: a/text.jsonl}, {format: text, paths: b/text.txt}]"],
        "data.sources.1.name = 'text': data.sources.0 has the same name in the log; "
        "set another name for one of the two",
    ),
    "validation sources of one name": (
        ["data.validation_sources=[{format: python_stdlib, name: a}, {format: text, paths: a}]"],
        "data.validation_sources.1.name = 'a': data.validation_sources.0 has the same"
        " name in the log; set another name for one of the two",
    ),
    "conversations in plain text": (
        ["data.sources=[{format: text, paths: a, conversation: {}}]"],
        "data.sources.0.conversation: format text has no conversations, only jsonl, "
        "parquet, arrow; remove the section or change data.sources.0.format",
    ),
    "conversations that see each other": (
        [
            "data.sources=[{format: jsonl, paths: a, conversation: {}}]",
            "data.isolate_documents=false",
        ],
        "data.isolate_documents = false: no attention may cross from one conversation"
        " to another in a sequence; set it to true",
    ),
    "no tokenizer": (
        ["data.tokenizer={train_vocab_size: null}"],
        "data.tokenizer: set one of data.tokenizer.path, data.tokenizer.encoding, "
        "data.tokenizer.train_vocab_size, student.hf, teacher.hf or teacher.store",
    ),
    "two tokenizers": (
        ["data.tokenizer.path=tok"],
        "data.tokenizer.path = 'tok' and data.tokenizer.train_vocab_size = 512: set "
        "only one of them",
    ),
    "a tokenizer by name and trained": (
        ["data.tokenizer.encoding=gpt2"],
        "data.tokenizer.encoding = 'gpt2' and data.tokenizer.train_vocab_size = 512: "
        "set only one of them",
    ),
    "tokenizer trained on tokens": (
        ["data.sources=[{format: megatron, paths: corpus}]"],
        "data.tokenizer.train_vocab_size = 512: data.sources.0 is already tokenised; "
        "set data.tokenizer.path to the folder of its tokenizer",
    ),
    "nothing to train": (
        ["objective={ce_weight: 0, terms: []}"],
        "objective.ce_weight = 0.0 and objective.terms = []: there is no loss; raise "
        "objective.ce_weight or add a term",
    ),
    "the same term twice": (
        ["objective.terms=[{weight: 0.5}, {divergence: reverse_kl}, {weight: 2.0}]"],
        "objective.terms.2 differs from objective.terms.0 in its weight at most; keep"
        " one of them, with the sum of the weights",
    ),
    "wsd without its length": (
        ["schedule.decay=wsd"],
        "schedule.wsd_decay_steps is required with schedule.decay = 'wsd'; set it to "
        "the number of updates of the final decay",
    ),
    "warm-up and wsd longer than the decay": (
        ["schedule={decay: wsd, warmup_steps: 2, wsd_decay_steps: 2, decay_steps: 3}"],
        "schedule.warmup_steps = 2 and schedule.wsd_decay_steps = 2 take more than "
        "schedule.decay_steps = 3",
    ),
    "floor above peak": (
        ["schedule.min_learning_rate=1e-3"],
        "schedule.min_learning_rate = 0.001 is above optimizer.learning_rate = 0.0003",
    ),
    "a warm-up from above the peak": (
        ["schedule.warmup_steps=2", "schedule.initial_learning_rate=0.001"],
        "schedule.initial_learning_rate = 0.001 is above optimizer.learning_rate = 0.0003",
    ),
    "batch over micro-batch": (
        ["train.micro_batch_size=3"],
        "train.global_batch_size = 4: not a multiple of train.micro_batch_size = 3",
    ),
    "nothing held out": (
        ["validation.samples=5", "data.validation_fraction=0"],
        "validation.samples = 5 but nothing is held out",
    ),
    "nccl on a CPU": (
        ["runtime={device: cpu, backend: nccl}"],
        "runtime.backend = 'nccl' needs runtime.device = 'cuda', not 'cpu'; set "
        "runtime.backend to 'gloo' or 'auto'",
    ),
}

KEPT = [
    ["parallel={tensor: 2, sequence: true, context: 2}"],
    ["teacher={architecture: null, checkpoint: runs/t}", "parallel.expert=2"],
    ["teacher.architecture.vocab_size=501"],
    ["student.architecture.vocab_size=501", "teacher.architecture.vocab_size=501"],
    ["objective.ce_weight=0"],
    ["objective.terms=[]"],
    ["schedule={decay: wsd, warmup_steps: 1, wsd_decay_steps: 2}"],
    ["schedule.min_learning_rate=3e-4"],
    ["optimizer.overlap_param_gather=true"],
    ["validation={interval: 1, samples: 1}"],
    [
        "validation.samples=1",
        "data.validation_fraction=0",
        "data.validation_sources=[{format: text, paths: a}]",
    ],
    ["checkpoint.save=false"],
    ["runtime={device: auto, backend: nccl}"],
]


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_the_only_complaint(tmp_path, case):
    overrides, words = BROKEN[case]
    found = complaints(load_tree, tmp_path, TAUGHT, *overrides)
    assert [line[: len(words)] for line in found] == [words]


@pytest.mark.parametrize("overrides", KEPT)
def test_a_rule_that_is_just_kept_says_nothing(tmp_path, overrides):
    load_tree(tmp_path, TAUGHT, *overrides)


@pytest.mark.parametrize(
    ("overrides", "world_size", "words"),
    [
        (
            ["parallel={tensor: 2, pipeline: 2}"],
            6,
            "parallel.tensor * parallel.pipeline * parallel.context = 2 * 2 * 1: the layout "
            "needs a multiple of 4 processes; there are 6. Set --nproc-per-node",
        ),
        (
            ["parallel.context=2"],
            1,
            "parallel.tensor * parallel.pipeline * parallel.context = 1 * 1 * 2: the layout "
            "needs a multiple of 2 processes; there is 1. Set --nproc-per-node",
        ),
        (
            [EXPERTS, "parallel.expert=2"],
            1,
            "parallel.expert = 2: must divide data-parallel size * parallel.context = 1 * 1 on 1 "
            "process",
        ),
        (
            ["train={global_batch_size: 6, micro_batch_size: 2}"],
            2,
            "train.global_batch_size = 6: must be a multiple of train.micro_batch_size * "
            "data-parallel size = 2 * 2 on 2 processes",
        ),
        (
            ["parallel={pipeline: 2, virtual_pipeline: 2}", "train.global_batch_size=6"],
            4,
            "train.global_batch_size = 6 makes 3 micro-batches on each data-parallel rank; "
            "parallel.virtual_pipeline needs a multiple of parallel.pipeline = 2",
        ),
    ],
)
def test_a_layout_that_does_not_fit_the_processes_is_named(tmp_path, overrides, world_size, words):
    found = complaints(check_layout, load_tree(tmp_path, TAUGHT, *overrides), world_size)
    assert [line[: len(words)] for line in found] == [words]


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        ([], 1),
        ([], 4),
        (["parallel={tensor: 2, pipeline: 2}"], 4),
        (["parallel={tensor: 2, pipeline: 2}"], 8),
        ([EXPERTS, "parallel={context: 2, expert: 2}"], 2),
        ([EXPERTS, "parallel.expert=4"], 4),
        (["parallel={pipeline: 2, virtual_pipeline: 2}"], 4),
        (["parallel.pipeline=2", "train.global_batch_size=3"], 2),
    ],
)
def test_a_layout_that_fits_passes(tmp_path, overrides, world_size):
    check_layout(load_tree(tmp_path, TAUGHT, *overrides), world_size)


def test_check_layout_reports_rules_and_processes_together(tmp_path):
    good = load_tree(tmp_path, TAUGHT)
    bad = good.model_copy(
        update={
            "parallel": ParallelConfig(tensor=3),
            "train": good.train.model_copy(update={"micro_batch_size": 3}),
        }
    )
    found = complaints(check_layout, bad, 4)
    starts = [re.split(r" = |: ", line)[0] for line in found]
    assert starts.count("parallel.tensor") == 4
    assert "train.global_batch_size" in starts
    assert "parallel.tensor * parallel.pipeline * parallel.context" in starts
