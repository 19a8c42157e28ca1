"""Settings without effect: each alone is a warning with its text, and the run does not see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distill.config import (
    CaptureConfig,
    RunConfig,
    check_layout,
    load_capture_config,
    load_config,
    load_warnings,
    with_steps,
)
from tests.support.sample_configs import MINIMAL, TAUGHT, complaints, load_tree, read_table

# Overrides, and all that is warned of.
WITHOUT_EFFECT = """
parallel.virtual_pipeline=2
    -> parallel.virtual_pipeline = 2 has no effect with parallel.pipeline = 1
parallel.sequence=true
    -> parallel.sequence = true has no effect with parallel.tensor = 1
teacher.offload_hidden=true
    -> teacher.offload_hidden = true has no effect with parallel.pipeline = 1: the states of one
       micro-batch exist at a time
parallel.expert=2
    -> parallel.expert = 2 has no effect because no model here has experts (architecture.moe)
student.architecture.moe={num_experts: 4, shared_gate: true}
    -> student.architecture.moe.shared_gate = true has no effect with
       student.architecture.moe.shared_ffn_hidden_size = null
student.architecture.moe={num_experts: 4, bias_update_rate: 0.1}
    -> student.architecture.moe.bias_update_rate = 0.1 has no effect with
       student.architecture.moe.correction_bias = false
data.sources.0.paths=x
    -> data.sources.0.paths = ['x'] has no effect with data.sources.0.format = 'python_stdlib'
data.distill_on_prompt=true
    -> data.distill_on_prompt = true has no effect because no source has a `conversation`
       section
teacher=null
objective.terms=[{}]
    -> objective.terms = ['forward_kl'] has no effect with teacher = null
objective.terms=[{divergence: reverse_kl, beta: 0.3}]
    -> objective.terms.0.beta = 0.3 has no effect with objective.terms.0.divergence =
       'reverse_kl'
objective.terms=[{score_alpha: 2}]
    -> objective.terms.0.score_alpha = 2.0 has no effect without objective.terms.0.score
objective.terms=[{uncommon_top_k: 9}]
    -> objective.terms.0.uncommon_top_k = 9 has no effect with objective.terms.0.alignment = null
objective.terms=[{alignment: uld, divergence: reverse_kl}]
    -> objective.terms.0.divergence = 'reverse_kl' has no effect with objective.terms.0.alignment =
       'uld'
teacher.sequence_length=32
    -> teacher.sequence_length = 32 has no effect without a term that has an alignment
data.max_unaligned=0.5
    -> data.max_unaligned = 0.5 has no effect without a term that has an alignment
data.document_cache_gib=0
    -> data.document_cache_gib = 0.0 has no effect without a term that has an alignment
teacher=null
parallel.layers_per_stage.teacher=[4]
    -> parallel.layers_per_stage.teacher = [4] has no effect because this job has no live teacher
objective.terms=[{support: raw}]
    -> objective.terms.0.support = 'raw' has no effect with objective.terms.0.top_k = null,
       which compares the whole vocabulary
schedule.wsd_decay_steps=1
    -> schedule.wsd_decay_steps = 1 has no effect with schedule.decay = 'cosine'
schedule={decay: constant, min_learning_rate: 1.0e-9, decay_steps: 3}
    -> schedule.min_learning_rate = 1e-09 has no effect with schedule.decay = 'constant'
    -> schedule.decay_steps = 3 has no effect with schedule.decay = 'constant'
checkpoint={save: false, keep: 3, keep_best: {metric: validation.ce_loss}}
validation.samples=2
data.validation_fraction=0.1
    -> checkpoint.keep = 3 has no effect with checkpoint.save = false
    -> checkpoint.keep_best = 'validation.ce_loss' has no effect with checkpoint.save = false
schedule.warmup_steps=4
    -> schedule.decay = 'cosine' has no effect within train.steps = 3: the warm-up takes
       schedule.warmup_steps = 4
schedule.warmup_steps=3
    -> schedule.decay = 'cosine' has no effect within train.steps = 3: the warm-up takes
       schedule.warmup_steps = 3
schedule.warmup_steps=0
schedule.initial_learning_rate=0.0001
    -> schedule.initial_learning_rate = 0.0001 has no effect with schedule.warmup_steps = 0
schedule.wsd_decay_form=cosine
    -> schedule.wsd_decay_form = 'cosine' has no effect with schedule.decay = 'cosine'
optimizer={overlap_param_gather: true, overlap_grad_reduce: false}
    -> optimizer.overlap_param_gather = true has no effect with optimizer.overlap_grad_reduce =
       false
optimizer={bucket_size: 1000, overlap_grad_reduce: false}
    -> optimizer.bucket_size = 1000 has no effect with optimizer.overlap_grad_reduce = false
train={recompute_modules: [mlp], recompute_layers: 2}
    -> train.recompute_modules = ['mlp'] has no effect with train.recompute = none
    -> train.recompute_layers = 2 has no effect with train.recompute = none
validation.interval=5
    -> validation.interval = 5 has no effect with validation.samples = 0
profile={ranks: [1], memory_snapshot: true, shapes: true, stacks: true}
    -> profile.ranks = [1] has no effect without profile.steps
    -> profile.memory_snapshot = true has no effect without profile.steps
    -> profile.shapes = true has no effect without profile.steps
    -> profile.stacks = true has no effect without profile.steps
profile.steps=[7, 8]
    -> profile.steps = [7, 8] has no effect because train.steps = 3
student.architecture={positions: learned, rope_scaling: {kind: linear, factor: 2}}
    -> student.architecture.rope_scaling = 'linear' has no effect with
       student.architecture.positions = 'learned'
student.architecture={positions: learned, rotary_fraction: 0.5}
    -> student.architecture.rotary_fraction = 0.5 has no effect with
       student.architecture.positions = 'learned'
student.architecture={positions: learned, sliding_rope_base: 500, sliding_window: 8}
    -> student.architecture.sliding_rope_base = 500.0 has no effect with
       student.architecture.positions = 'learned'
student.architecture.sliding_layers=[0, 2]
    -> student.architecture.sliding_layers = [0, 2] has no effect with
       student.architecture.sliding_window = null
teacher.architecture.sliding_rope_base=500
    -> teacher.architecture.sliding_rope_base = 500.0 has no effect with
       teacher.architecture.sliding_window = null
objective.terms=[{weight_schedule: {to: 0.5, steps: 10}}]
    -> objective.terms.0.weight_schedule = {'to': 0.5, 'steps': 10} has no effect with
       objective.balance.mode = 'fixed'
objective.terms=[{temperature_schedule: {to: 0.5, steps: 10}}]
    -> objective.terms.0.temperature_schedule = {'to': 0.5, 'steps': 10} has no effect with
       objective.balance.mode = 'fixed'
objective.balance.alpha_schedule={to: 0.5, steps: 10}
    -> objective.balance.alpha_schedule = {'to': 0.5, 'steps': 10} has no effect with
       objective.balance.mode = 'fixed'
objective.ce_weight_schedule={to: 0.5, steps: 10}
    -> objective.ce_weight_schedule = {'to': 0.5, 'steps': 10} has no effect with
       objective.balance.mode = 'fixed'
objective.balance.mode=schedule
objective.ce_weight_schedule={to: 0.5, kind: constant, steps: 3}
    -> objective.ce_weight_schedule.steps = 3 has no effect with
       objective.ce_weight_schedule.kind = 'constant', which changes at
       objective.ce_weight_schedule.start_step
objective.terms=[{weight: 0}]
    -> objective.terms.0.weight = 0.0 has no effect on the student: the term is measured but not
       trained
objective.balance.mode=schedule
objective.terms=[{weight: 0, weight_schedule: {to: 0, steps: 3}}]
    -> objective.terms.0.weight = 0.0 has no effect on the student: the term is measured but not
       trained
objective.balance.mode=gradient_norm
objective.balance.raw_losses=previous
    -> objective.balance.raw_losses = 'previous' has no effect with objective.balance.mode =
       'gradient_norm'
objective.balance.mode=gradient_norm
objective.balance.per_microbatch=true
    -> objective.balance.per_microbatch = true has no effect with objective.balance.mode =
       'gradient_norm'
teacher=null
objective.features=[{student: 1, teacher: 2}]
    -> objective.features = ['mse'] has no effect with teacher = null
objective.features=[{student: 1, teacher: 2}]
objective.projector.hidden_size=8
    -> objective.projector.hidden_size = 8 has no effect with objective.projector.kind =
       'linear'
objective.projector.kind=mlp
    -> objective.projector = {'kind': 'mlp'} has no effect without objective.features
objective.balance.mode=schedule
objective.balance.raw_losses=previous
    -> objective.balance.raw_losses = 'previous' has no effect with objective.balance.mode =
       'schedule'
objective.balance.mode=fixed
objective.balance.ema=0.5
    -> objective.balance.ema = 0.5 has no effect with objective.balance.mode = 'fixed'
objective.balance.mode=schedule
objective.balance.clamp=10
    -> objective.balance.clamp = 10.0 has no effect with objective.balance.mode = 'schedule'
objective.balance.mode=schedule
objective.balance.epsilon=1e-3
    -> objective.balance.epsilon = 0.001 has no effect with objective.balance.mode = 'schedule'
objective.balance.mode=schedule
objective.balance.per_microbatch=true
    -> objective.balance.per_microbatch = true has no effect with objective.balance.mode =
       'schedule'
checkpoint={save: false, asynchronous: true, interval: 2}
    -> checkpoint.interval = 2 has no effect with checkpoint.save = false
    -> checkpoint.asynchronous = true has no effect with checkpoint.save = false
objective={terms: [], balance: {mode: magnitude, ema: 0.9}}
    -> objective.balance.mode = 'magnitude' has no effect without objective.terms and
       objective.features
    -> objective.balance.ema = 0.9 has no effect with objective.balance.mode = 'schedule'
train.epochs=2
    -> train.steps = 3 has no effect: train.epochs = 2 was given later
train={epochs: 2}
train.steps=7
    -> train.steps = 3 has no effect: train.epochs = 2 was given later
    -> train.epochs = 2 has no effect: train.steps = 7 was given later
"""


@pytest.mark.parametrize(("overrides", "expected"), read_table(WITHOUT_EFFECT))
def test_a_setting_without_effect_is_a_warning(
    tmp_path: Path, overrides: list[str], expected: list[str]
) -> None:
    config = load_tree(tmp_path, TAUGHT, *overrides)
    assert load_warnings(tmp_path / "run.yaml", overrides, RunConfig) == expected
    check_layout(config, 1)


def test_a_setting_without_effect_becomes_its_default(tmp_path: Path) -> None:
    overrides = (
        "parallel={virtual_pipeline: 2, sequence: true, expert: 2}",
        "objective.terms=[{divergence: reverse_kl, beta: 0.3, support: raw}]",
        "data.sources.0.paths=x",
    )
    plain = load_tree(tmp_path, TAUGHT, "objective.terms=[{divergence: reverse_kl}]")
    assert load_tree(tmp_path, TAUGHT, *overrides) == plain
    assert load_warnings(tmp_path / "run.yaml", (), RunConfig) == []


def test_where_only_ids_move_no_hidden_state_waits_in_host_memory(tmp_path: Path) -> None:
    overrides = (
        "parallel.pipeline=2",
        "teacher={offload_hidden: true, parallel: {pipeline: 1}, transfer: {what: top_k, k: 8}}",
        "objective.terms=[{top_k: 8}]",
    )
    config = load_tree(tmp_path, TAUGHT, *overrides)
    assert not config.teacher.offload_hidden
    file = tmp_path / "run.yaml"
    assert load_warnings(file, overrides, RunConfig) == [
        "teacher.offload_hidden = true has no effect with teacher.transfer.what = 'top_k' and no "
        "objective.features: only ids move"
    ]
    features = "objective.features=[{student: 1, teacher: 1, loss: cosine}]"
    for change in (features, "teacher.transfer.what=hidden", "teacher.parallel=null"):
        found = load_warnings(file, (*overrides, change), RunConfig)
        assert not any("offload" in text for text in found)


def test_epochs_take_the_place_of_steps(tmp_path: Path) -> None:
    length = load_tree(tmp_path, TAUGHT, "train.epochs=2").train
    assert (length.steps, length.epochs) == (0, 2.0)
    length = load_tree(tmp_path, TAUGHT, "train.epochs=2", "train.steps=7").train
    assert (length.steps, length.epochs) == (7, None)


def test_a_warm_up_as_long_as_the_run_keeps_its_length(tmp_path: Path) -> None:
    assert load_tree(tmp_path, TAUGHT, "schedule.warmup_steps=4").schedule.warmup_steps == 4


def test_a_teacher_that_was_forgotten_is_an_error(tmp_path: Path) -> None:
    features = "objective={terms: [], features: [{student: 1, teacher: 2}]}"
    assert complaints(
        load_tree, tmp_path, MINIMAL, "objective.terms=[{}, {divergence: reverse_kl}]"
    ) == [
        "objective.terms: 2 distillation terms but teacher = null; set teacher.hf, "
        "teacher.checkpoint or teacher.store, or objective.terms=[]"
    ]
    assert complaints(load_tree, tmp_path, MINIMAL, features) == [
        "objective.features: 1 feature loss but teacher = null; set teacher.hf or "
        "teacher.checkpoint, or objective.features=[]"
    ]


def test_an_error_stands_alone_beside_a_warning(tmp_path: Path) -> None:
    (found,) = complaints(
        load_tree, tmp_path, TAUGHT, "validation.interval=5", "train.micro_batch_size=3"
    )
    assert found.startswith("train.global_batch_size = 4: not a multiple of")


def test_a_store_as_the_corpus_leaves_settings_of_sources_without_effect(tmp_path: Path) -> None:
    overrides = (
        "teacher={architecture: null, store: stores/a}",
        "data={sources: [], validation_sources: [{format: python_stdlib}]}",
    )
    load_tree(tmp_path, TAUGHT, *overrides)
    assert load_warnings(tmp_path / "run.yaml", overrides, RunConfig) == [
        "data.validation_sources = ['python_stdlib'] has no effect without data.sources: samples "
        "of the stores are held out",
        "data.tokenizer.train_vocab_size = 512 has no effect without data.sources: the store's "
        "tokenizer is used",
    ]


def test_settings_without_effect_in_a_capture(tmp_path: Path) -> None:
    file = tmp_path / "capture.yaml"
    file.write_text(
        "teacher: {hf: t}\ndata: {sources: [{format: python_stdlib}], sequence_length: 8}\n"
    )
    overrides = (
        "store={path: s, samples: 4, mode: sampled, top_p: 0.9, temperatures: [2]}",
        "parallel={pipeline: 2, virtual_pipeline: 2}",
    )
    assert load_warnings(file, overrides, CaptureConfig) == [
        "parallel.virtual_pipeline = 2 has no effect in a capture, which runs forward passes only",
        "store.top_p = 0.9 has no effect with store.mode = 'sampled'",
        "store.temperatures = [2.0] has no effect with store.mode = 'sampled', which draws at "
        "temperature 1",
    ]
    store = load_capture_config(file, overrides).store
    assert (store.top_p, store.temperatures) == (None, ())


WITHOUT_MEANING = """
train.steps=0
    -> train.steps = 0: set train.steps to the number of optimizer steps, or train.epochs to the
       passes over the data
train={steps: 3, epochs: 2}
    -> train.steps = 3 and train.epochs = 2: give only one of the two
train.epochs=0.5
data.sources=[{format: python_stdlib}, {format: text, paths: a}]
    -> train.epochs = 0.5: data.sources is a blend of 2 corpora, each with epochs of its own;
       set train.steps instead
train.epochs=2
data={sources: [{format: megatron, paths: [a, b]}], tokenizer: {path: t}}
data.tokenizer.train_vocab_size=null
    -> train.epochs = 2: data.sources is a blend of 2 corpora, each with epochs of its own; set
       train.steps instead
train.epochs=2
teacher={architecture: null, store: [a, b]}
data.sources=[]
    -> train.epochs = 2: teacher.store is a blend of 2 corpora, each with epochs of its own; set
       train.steps instead
"""


@pytest.mark.parametrize(("overrides", "expected"), read_table(WITHOUT_MEANING))
def test_a_length_that_has_no_meaning_is_refused(
    tmp_path: Path, overrides: list[str], expected: list[str]
) -> None:
    assert complaints(load_tree, tmp_path, TAUGHT, *overrides) == expected


def test_a_schedule_is_compared_with_the_computed_steps(tmp_path: Path) -> None:
    waves = "schedule={decay: wsd, warmup_steps: 2, wsd_decay_steps: 2}"
    config = load_tree(tmp_path, TAUGHT, "train.epochs=2", waves)
    resolved, warnings = with_steps(config, 4)
    assert (resolved.train.steps, resolved.train.epochs, warnings) == (4, None, [])
    resolved, warnings = with_steps(config, 3)
    assert resolved.schedule.wsd_decay_steps == 1
    assert warnings == [
        "schedule.wsd_decay_steps = 2 has no effect beyond the 1 update that "
        "schedule.warmup_steps = 2 leaves of train.steps = 3: the decay is as short"
    ]
    resolved, warnings = with_steps(config, 2)
    assert resolved.schedule.wsd_decay_steps == 2
    assert warnings == [
        "schedule.decay = 'wsd' has no effect within train.steps = 2: the warm-up takes "
        "schedule.warmup_steps = 2"
    ]
    config = load_tree(tmp_path, TAUGHT, "train.epochs=2", "schedule.warmup_steps=4")
    assert load_config(tmp_path / "run.yaml").train.steps == 3
    assert with_steps(config, 4)[1] == [
        "schedule.decay = 'cosine' has no effect within train.steps = 4: the warm-up takes "
        "schedule.warmup_steps = 4"
    ]
