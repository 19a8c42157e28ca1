"""Errors about wrong keys and values, and that all of them are reported at once."""

import re

import pytest

from megatron_distill.errors import ConfigError
from tests.support.sample_configs import MINIMAL, complaints, load_tree


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.tensr=2", "parallel.tensr: unknown key; did you mean parallel.tensor?"),
        (
            "data.sources.0.pths=x",
            "data.sources.0.pths: unknown key; did you mean data.sources.0.paths?",
        ),
        (
            "learning_rate=1e-3",
            "learning_rate: unknown key; did you mean objective.projector.learning_rate or "
            "optimizer.learning_rate?",
        ),
        (
            "train.clip_grad=1",
            "train.clip_grad: unknown key; did you mean optimizer.clip_grad_norm?",
        ),
        ("temperature=2", "temperature: unknown key; did you mean objective.terms.0.temperature?"),
        (
            "runtime.zzzz=1",
            "runtime.zzzz: unknown key; the keys here are device, backend, "
            "timeout_seconds, threads, transformer_engine, tp_comm_overlap",
        ),
        (
            "student.norm_epsilon=2",
            "student.norm_epsilon: unknown key; did you mean "
            "teacher.architecture.norm_epsilon or student.architecture.norm_epsilon?",
        ),
    ],
)
def test_an_unknown_key_brings_the_nearest_known_one(tmp_path, override, message):
    assert complaints(load_tree, tmp_path, MINIMAL, override) == [message]


def test_a_key_that_is_not_text_is_named(tmp_path):
    [line] = complaints(load_tree, tmp_path, MINIMAL | {3: "x"})
    assert line.startswith("3: unknown key; the keys here are seed, ")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=ten", "train.steps = 'ten': must be an integer >= 0"),
        ("train.steps=1.5", "train.steps = 1.5: must be an integer >= 0"),
        ("train.steps=true", "train.steps = true: must be an integer >= 0"),
        ("train.steps='3'", "train.steps = '3': must be an integer >= 0"),
        ("train.steps=null", "train.steps = null: must be an integer >= 0"),
        ("seed=-1", "seed = -1: must be an integer >= 0 and < 2147483648"),
        ("optimizer.beta2=1.0", "optimizer.beta2 = 1.0: must be a number >= 0 and < 1"),
        ("optimizer.learning_rate=0", "optimizer.learning_rate = 0: must be a number > 0"),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate = nan: must be a number > 0"),
        ("optimizer.weight_decay=.inf", "optimizer.weight_decay = inf: must be a number >= 0"),
        (
            "schedule.decay=cosin",
            "schedule.decay = 'cosin': must be one of 'cosine', 'linear', 'constant', 'wsd'",
        ),
        (
            "parallel.virtual_pipeline=1",
            "parallel.virtual_pipeline = 1: must be an integer >= 2, or null",
        ),
        ("parallel.sequence=1", "parallel.sequence = 1: must be true or false"),
        ("output=''", "output = '': must be text, not empty"),
        ("output=3", "output = 3: must be text, not empty"),
        (
            "data.sources=[]",
            "data.sources = []: add a source, or set teacher.store to train on the samples of a "
            "store",
        ),
        ("data.sources=text", "data.sources = 'text': must be a list of sections"),
        ("data.sources.0.paths=[a, 3]", "data.sources.0.paths.1 = 3: must be text"),
        (
            "data.sources=[python_stdlib]",
            "data.sources.0 = 'python_stdlib': must be a section "
            "with keys such as format, paths, weight",
        ),
        (
            "teacher=big",
            "teacher = 'big': must be a section with keys such as hf, architecture, "
            "checkpoint, or null",
        ),
        (
            "logging.wandb={}",
            "logging.wandb.project: this key is required; it must be text, not empty",
        ),
    ],
)
def test_a_wrong_value_is_shown_with_its_key_and_its_range(tmp_path, override, message):
    assert complaints(load_tree, tmp_path, MINIMAL, override) == [message]


def test_the_edge_of_a_range_belongs_to_it(tmp_path):
    at_zero = ("optimizer={beta2: 0, clip_grad_norm: 0}", "data.validation_fraction=0.0")
    load_tree(tmp_path, MINIMAL, "seed=0", "train.steps=1", *at_zero)
    load_tree(tmp_path, MINIMAL, "seed=2147483647", "data.tokenizer.train_vocab_size=260")


def test_long_values_are_shortened(tmp_path):
    [line] = complaints(load_tree, tmp_path, MINIMAL, f"train.precision={'x' * 500}")
    assert len(line) < 160


def test_missing_sections_are_all_named(tmp_path):
    found = complaints(load_tree, tmp_path, {"seed": 1})
    assert [line.partition(":")[0] for line in found] == ["data", "student", "train"]
    assert all("this key is required" in line for line in found)


def test_keys_values_and_rules_are_reported_together(tmp_path):
    found = complaints(
        load_tree,
        tmp_path,
        MINIMAL,
        "parallel.tensr=2",
        "train.steps=0",
        "optimizer.beta1=2",
        "data.sources.0.pths=x",
        "data.sources.0.format=text",
        "student.architecture.num_attention_heads=6",
        "train.micro_batch_size=3",
        "runtime.backend=nccl",
        "runtime.device=cpu",
    )
    keys = [re.split(r"[ :]", line)[0] for line in found]
    assert sorted(keys) == [
        "data.sources.0.paths",
        "data.sources.0.pths",
        "optimizer.beta1",
        "parallel.tensr",
        "runtime.backend",
        "student.architecture.hidden_size",
        "train.global_batch_size",
        "train.steps",
    ]


def test_a_rule_is_silent_about_a_key_that_is_wrong_itself(tmp_path):
    assert complaints(
        load_tree, tmp_path, MINIMAL, "parallel.pipeline=two", "parallel.virtual_pipeline=2"
    ) == ["parallel.pipeline = 'two': must be an integer >= 1"]
    assert complaints(
        load_tree, tmp_path, MINIMAL, "train.global_batch_size=0", "train.micro_batch_size=3"
    ) == ["train.global_batch_size = 0: must be an integer >= 1"]
    assert complaints(load_tree, tmp_path, MINIMAL, "data.tokenizer.train_vocab_size=1") == [
        "data.tokenizer.train_vocab_size = 1: must be an integer >= 260, or null"
    ]


def test_rules_are_still_read_when_a_whole_section_is_missing(tmp_path):
    tree = {key: value for key, value in MINIMAL.items() if key != "data"}
    found = complaints(load_tree, tmp_path, tree, "student.architecture.num_kv_heads=3")
    assert [re.split(r"[ :]", line)[0] for line in found] == [
        "data",
        "student.architecture.num_kv_heads",
    ]


def test_overrides_are_part_of_the_heading(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_tree(tmp_path, MINIMAL, "train.steps=0")
    path = tmp_path / "run.yaml"
    assert str(caught.value).splitlines()[0] == f"{path} with train.steps=0: 1 problem"
