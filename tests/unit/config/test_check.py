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
    "virtual without pipeline": (
        ["parallel.virtual_pipeline=2"],
        "parallel.virtual_pipeline = 2: interleaving needs parallel.pipeline >= 2, not 1",
    ),
    "sequence without tensor": (
        ["parallel.sequence=true"],
        "parallel.sequence = true: sequence parallelism needs parallel.tensor >= 2, not 1",
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
    "expert ranks without experts": (
        ["parallel.expert=2"],
        "parallel.expert = 2: no model here has experts",
    ),
    "vocabularies": (
        ["student.architecture.vocab_size=500", "teacher.architecture.vocab_size=501"],
        "student.architecture.vocab_size = 500 but teacher.architecture.vocab_size = 501",
    ),
    "source without paths": (
        ["data.sources.0.format=jsonl"],
        "data.sources.0.paths: format jsonl needs at least one path",
    ),
    "validation source without paths": (
        ["data.validation_sources=[{format: text}]"],
        "data.validation_sources.0.paths: format text needs at least one path",
    ),
    "sources of one name": (
        ["data.sources=[{format: jsonl, paths: a/text.jsonl}, {format: text, paths: b/text.txt}]"],
        "data.sources.1.name: the log calls this source 'text' and data.sources.0 as well; give",
    ),
    "validation sources of one name": (
        ["data.validation_sources=[{format: python_stdlib, name: a}, {format: text, paths: a}]"],
        "data.validation_sources.1.name: the log calls this source 'a'",
    ),
    "standard library with paths": (
        ["data.sources.0.paths=x"],
        "data.sources.0.paths: format python_stdlib finds its own files",
    ),
    "conversations in plain text": (
        ["data.sources=[{format: text, paths: a, conversation: {}}]"],
        "data.sources.0.conversation: rows of format jsonl, parquet, arrow hold conversations",
    ),
    "conversations that see each other": (
        [
            "data.sources=[{format: jsonl, paths: a, conversation: {}}]",
            "data.isolate_documents=false",
        ],
        "data.isolate_documents = false: conversations in one sequence must not see each other",
    ),
    "prompts without conversations": (
        ["data.distill_on_prompt=true"],
        "data.distill_on_prompt = True: says something of conversations, and no source has",
    ),
    "no tokenizer": (
        ["data.tokenizer={train_vocab_size: null}"],
        "data.tokenizer: give one of data.tokenizer.path, data.tokenizer.encoding, "
        "data.tokenizer.train_vocab_size, or a model's student.hf",
    ),
    "two tokenizers": (
        ["data.tokenizer.path=tok"],
        "data.tokenizer.path = 'tok' and data.tokenizer.train_vocab_size = 512: give only one",
    ),
    "a tokenizer by name and trained": (
        ["data.tokenizer.encoding=gpt2"],
        "data.tokenizer.encoding = 'gpt2' and data.tokenizer.train_vocab_size = 512: give only",
    ),
    "tokenizer trained on tokens": (
        ["data.sources=[{format: megatron, paths: corpus}]"],
        "data.tokenizer.train_vocab_size = 512: data.sources.0 is tokenised already",
    ),
    "terms without teacher": (
        ["teacher=null", "objective.terms=[{}]"],
        "objective.terms: 1 distillation term(s) but teacher = null",
    ),
    "nothing to train": (
        ["objective={ce_weight: 0, terms: []}"],
        "objective.ce_weight = 0.0 and objective.terms is empty: nothing is trained",
    ),
    "parameter of another divergence": (
        ["objective.terms=[{divergence: reverse_kl, beta: 0.3}]"],
        "objective.terms.0.beta = 0.3 belongs to js_divergence, here",
    ),
    "support without top-k": (
        ["objective.terms=[{support: raw}]"],
        "objective.terms.0.support = 'raw' says what becomes of tokens that are not kept",
    ),
    "the same term twice": (
        ["objective.terms=[{weight: 0.5}, {divergence: reverse_kl}, {weight: 2.0}]"],
        "objective.terms.2 differs from objective.terms.0 at most in its weight",
    ),
    "wsd without its length": (
        ["schedule.decay=wsd"],
        "schedule.wsd_decay_steps is required by schedule.decay = 'wsd'",
    ),
    "length of wsd without wsd": (
        ["schedule.wsd_decay_steps=1"],
        "schedule.wsd_decay_steps = 1 belongs only to schedule.decay = 'wsd', here "
        "schedule.decay = 'cosine'",
    ),
    "warm-up longer than the run": (
        ["schedule.warmup_steps=4"],
        "schedule.warmup_steps = 4 takes more than train.steps = 3",
    ),
    "warm-up as long as the run": (
        ["schedule.warmup_steps=3"],
        "schedule.warmup_steps = 3 leaves nothing of train.steps = 3",
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
    "the first rate of no warm-up": (
        ["schedule.warmup_steps=0", "schedule.initial_learning_rate=0.0001"],
        "schedule.initial_learning_rate = 0.0001 begins a warm-up, and schedule.warmup_steps = 0",
    ),
    "the form of no final decay": (
        ["schedule.wsd_decay_form=cosine"],
        "schedule.wsd_decay_form = 'cosine' belongs only to schedule.decay = 'wsd', here",
    ),
    "gather without reduce": (
        ["optimizer={overlap_param_gather: true, overlap_grad_reduce: false}"],
        "optimizer.overlap_param_gather = true: needs optimizer.distributed = true",
    ),
    "batch over micro-batch": (
        ["train.micro_batch_size=3"],
        "train.global_batch_size = 4: not a multiple of train.micro_batch_size = 3",
    ),
    "validation of nothing": (
        ["validation.interval=5"],
        "validation.interval = 5 but validation.samples = 0",
    ),
    "nothing held out": (
        ["validation.samples=5", "data.validation_fraction=0"],
        "validation.samples = 5 but nothing is held out",
    ),
    "interval without saving": (
        ["checkpoint={save: false, interval: 5}"],
        "checkpoint.save = false: checkpoint.interval and checkpoint.asynchronous mean nothing",
    ),
    "nccl on a CPU": (
        ["runtime={device: cpu, backend: nccl}"],
        "runtime.backend = 'nccl': needs runtime.device = 'cuda', not 'cpu'",
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
            "parallel.tensor * parallel.pipeline * parallel.context = 2 * 2 * 1 = 4 does not "
            "divide the 6 processes; start a multiple of 4",
        ),
        (
            ["parallel.context=2"],
            1,
            "parallel.tensor * parallel.pipeline * parallel.context = 1 * 1 * 2 = 2 does not "
            "divide the 1 processes",
        ),
        (
            [EXPERTS, "parallel.expert=2"],
            1,
            "parallel.expert = 2: must divide the data-parallel times context size, 1 * 1 on 1 "
            "processes",
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
            "train.global_batch_size = 6: makes 3 micro-batches on each data-parallel rank, and "
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
    assert starts.count("parallel.tensor") == 6
    assert "train.global_batch_size" in starts
    assert "parallel.tensor * parallel.pipeline * parallel.context" in starts
