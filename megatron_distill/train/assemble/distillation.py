"""From a configuration to an opened run: its teacher, objective, samples and validation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_distill.config import (
    EvaluationConfig,
    FeatureConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ProjectorConfig,
    RunConfig,
    TrainConfig,
    ValueScheduleConfig,
    check_features,
    is_aligned,
    matched_layers,
    teacher_parallel,
)
from megatron_distill.data.tokenizers.open import Tokenizer, Vocabulary
from megatron_distill.errors import ConfigError
from megatron_distill.evaluation.tasks.prepared import PreparedTask
from megatron_distill.losses import (
    FeaturePair,
    RatioBalance,
    ScoreRule,
    ValueSchedule,
)
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.flops import stage_layers
from megatron_distill.models.gpt import vocab_shard
from megatron_distill.models.layer_kinds import LayerKinds
from megatron_distill.models.pipeline_stages import ranks_of_layers
from megatron_distill.models.stage_table import configured_layers
from megatron_distill.ops import LogitRule
from megatron_distill.runtime.groups import Groups
from megatron_distill.train.assemble.alignment import TeacherTokenizer, open_teacher_tokens
from megatron_distill.train.assemble.data import RunSamples
from megatron_distill.train.assemble.models import (
    build_terms,
    resolve_model,
)
from megatron_distill.train.assemble.routing import sample_routing
from megatron_distill.train.assemble.site import Site, TeacherFit
from megatron_distill.train.assemble.sources import data_options, open_tokenizer
from megatron_distill.train.assemble.tasks import NO_TASKS, OpenTasks, longest_input
from megatron_distill.train.assemble.teacher import OpenTeacher, open_teacher, with_movement
from megatron_distill.train.balancing import Balancing, Schedules
from megatron_distill.train.features import (
    FeatureLosses,
    ProjectorOptimization,
    Projectors,
    ProjectorShape,
    ScoreRules,
    projector_name,
)
from megatron_distill.train.model_source import ModelSource
from megatron_distill.train.objective import TokenObjective
from megatron_distill.train.teachers.attention_heads import attention_parts
from megatron_distill.train.teachers.host_states import HostFeatures
from megatron_distill.train.teachers.live import FeatureTeacher, routes
from megatron_distill.train.teachers.own_layout import OwnLayout
from megatron_distill.train.teachers.own_ranks import OwnRanksTeacher
from megatron_distill.train.teachers.several import SeveralTeachers
from megatron_distill.train.throughput import Throughput
from megatron_distill.train.validation import HeldOut, read_held_out


@dataclass(frozen=True)
class OpenRun:
    """A run's models, samples and tasks; its student is a source, which `site` builds.

    tasks_of_student: the tasks in the student's tokens.
    """

    vocabulary: Vocabulary
    student: ModelSource
    teacher: OpenTeacher
    objective: TokenObjective
    samples: RunSamples
    site: Site
    tasks: OpenTasks = NO_TASKS
    tasks_of_student: tuple[PreparedTask, ...] = ()

    def throughput(self, train: TrainConfig) -> Throughput:
        """Return what turns the seconds of a training step into figures."""
        elsewhere = sum(remote.ranks for remote in self.teacher.remotes.values())
        return Throughput.of_run(
            self.student.architecture,
            # Of several teachers the samples decide which run: their work is not counted.
            self.teacher.shapes.get("teacher"),
            sequence_length=self.samples.data.sequence_length,
            teacher_length=self.samples.teacher_length,
            global_batch_size=train.global_batch_size,
            precision=train.precision,
            num_devices=self.site.groups.world.size() + elsewhere,
            device=self.site.execution.device,
        )

    def objective_of(self, names: tuple[str, ...]) -> TokenObjective:
        """Return the objective with separate metrics of the sources, where they are several."""
        return replace(self.objective, source_names=names if len(names) > 1 else ())


def open_run(config: RunConfig, site: Site, tasks: OpenTasks = NO_TASKS) -> OpenRun:
    """Open the tokenizer and the teacher; all checks run before the teacher's weights are read.

    Raises a MegatronDistillError on all ranks.

    Collective: world, short objects, and with tasks one broadcast of their tokens.
    """
    section, groups, execution = config.objective, site.groups, site.execution
    options = data_options(config.data, Path(config.output), shows_progress=config.logging.progress)
    tokenizer, vocabulary = open_tokenizer(config, options)
    source = resolve_model(config, "student", vocabulary)
    student = source.architecture
    terms = build_terms(section.terms, vocabulary.size)
    own: TeacherTokenizer | None = None
    if is_aligned(config):
        own = open_teacher_tokens(config, tokenizer, vocabulary, execution.device)
        options = replace(options, teacher=own.reading)
    tasks_of_student: tuple[PreparedTask, ...] = ()
    if tasks.tasks:
        tasks_of_student = _of_student(tasks, config.evaluation, tokenizer, student, own, site)
    if config.teachers:
        options = replace(options, routing=sample_routing(config))
    teacher = open_teacher(config, TeacherFit(terms, student, vocabulary, own), site)
    layers = stage_layers(
        groups.layout,
        student,
        _head_in_stages(config.teacher, teacher),
        given=config.parallel.layers_per_stage.student,
        sequence_length=config.data.sequence_length,
        teacher_length=own.sequence_length if own else None,
        is_recomputed=execution.recompute.layers is None,
    )
    objective = TokenObjective(
        ce_weight=section.ce_weight,
        terms=terms,
        metrics=teacher.metrics,
        chunk_tokens=section.chunk_tokens,
        shard=vocab_shard(student, groups, tokens=vocabulary.size),
        logit_rule=LogitRule(student.logit_softcap, student.logit_scale),
        groups=groups,
        aligned=teacher.aligned,
        several=teacher.several,
    )
    if section.features:
        objective, teacher = _with_features(config, objective, teacher, student, layers, site)
    if teacher.stored is not None and options.teacher is not None:
        options = replace(options, teacher=replace(options.teacher, stores=teacher.stored.joins))
    samples = RunSamples(
        data=config.data,
        options=options,
        tokenizer=tokenizer,
        stored=teacher.stored,
        seed=config.seed,
        held_out=config.validation.samples,
        teacher_length=own.sequence_length if own else None,
        planner=objective.planner,
        units=teacher.units,
    )
    site = replace(site, execution=replace(execution, layers_per_stage=layers))
    return OpenRun(vocabulary, source, teacher, objective, samples, site, tasks, tasks_of_student)


def _head_in_stages(section: ModelConfig | None, teacher: OpenTeacher) -> Architecture | None:
    """Return the teacher whose head runs in the student's losses, on its last stage.

    One that sends top-k ids has run it in its own layout. Of several the samples decide.
    """
    sends_ids = section is not None and section.transfer.what == "top_k"
    return None if sends_ids else teacher.shapes.get("teacher")


def _of_student(
    tasks: OpenTasks,
    section: EvaluationConfig,
    tokenizer: Tokenizer | None,
    student: Architecture,
    own: TeacherTokenizer | None,
    site: Site,
) -> tuple[PreparedTask, ...]:
    """Encode the tasks for the student; raises where a teacher's tokens do not fit them either.

    `own`: of a teacher with a tokenizer of its own.
    """
    if own is not None and section.teacher:
        tasks.check_template(own.tokenizer)
    positions = longest_input(student, section)
    most = student.max_position_embeddings
    return tasks.encoded(tokenizer, positions, site.execution.device, most=most)


def open_held_out(train: TrainConfig, section: ObjectiveConfig, opened: OpenRun) -> HeldOut:
    """Read the held-out samples; all held-out losses use the weights at the end of the schedules.

    Raises DataError or StoreError on all ranks.
    """
    samples, site = opened.samples, opened.site
    names = samples.names(held_out=True)
    steps = []
    if samples.held_out:
        steps = read_held_out(
            samples.loader(train, site.groups, site.execution.device, held_out=True),
            samples=samples.held_out,
            global_batch_size=train.global_batch_size,
            names=names,
        )
    objective = opened.objective_of(names)
    schedules = build_balancing(section, objective).schedules
    final = schedules.applied(objective, steps_done=sys.maxsize)
    teacher = opened.teacher.signals
    if samples.stored is not None and samples.data.sources:
        teacher = None  # a store has no records of a corpus's held-out samples
    if isinstance(teacher, OwnRanksTeacher | SeveralTeachers):
        teacher = teacher.held_out(len(steps))
    return HeldOut.of(steps, teacher, final)


def build_balancing(config: ObjectiveConfig, objective: TokenObjective) -> Balancing:
    """Translate `objective.balance` and every schedule of the objective.

    The feature losses' weights come from `objective`, which has the pairs of layers.
    """
    balance, terms = config.balance, config.terms
    return Balancing(
        mode=balance.mode,
        schedules=Schedules(
            ce=_schedule(config.ce_weight, config.ce_weight_schedule),
            terms=tuple(_schedule(x.weight, x.weight_schedule) for x in terms),
            temperatures=tuple(_schedule(x.temperature, x.temperature_schedule) for x in terms),
            features=tuple(ValueSchedule.unchanging(float(x)) for x in objective.feature_weights),
            alpha=_schedule(balance.alpha, balance.alpha_schedule),
        ),
        ratios=RatioBalance(balance.epsilon, balance.clamp),
        decay=balance.ema,
        from_last_step=balance.raw_losses == "previous",
        per_micro_batch=balance.per_microbatch,
    )


def _schedule(value: float, schedule: ValueScheduleConfig | None) -> ValueSchedule:
    if schedule is None:
        return ValueSchedule.unchanging(value)
    steps = schedule.steps or 0
    return ValueSchedule(value, schedule.to, schedule.kind, steps, schedule.start_step)


def _with_features(
    config: RunConfig,
    objective: TokenObjective,
    teacher: OpenTeacher,
    student: Architecture,
    layers: tuple[int, ...],
    site: Site,
) -> tuple[TokenObjective, OpenTeacher]:
    """Add the feature losses to both sides; `layers` of each of the student's stages."""
    # The rules ask for a live one. One elsewhere sends its layers already.
    online, groups, device = teacher.models.get("teacher"), site.groups, site.execution.device
    shapes = student, teacher.shapes["teacher"]
    _, copies = attention_parts(teacher_parallel(config).tensor, config.parallel.tensor)
    features = _build_features(
        config.objective, config.optimizer, shapes, config.seed, groups, device, copies=copies
    )
    weights = tuple(pair.weight for pair in features.pairs)
    with_features = replace(objective, features=features, feature_weights=weights)
    if online is None:
        return with_features, teacher
    ranks = groups.layout.pipeline
    of_student = ranks_of_layers(layers, ranks)
    if isinstance(online, OwnLayout):
        in_own_layout = online.with_features(features.pairs, of_student)
        moved = with_movement(
            replace(teacher, signals=in_own_layout), [in_own_layout], config.train
        )
        return with_features, moved
    of_teacher = ranks_of_layers(configured_layers(online.model.config), ranks)
    ways = routes(features.pairs, of_student=of_student, of_teacher=of_teacher)
    host = HostFeatures(device) if config.models["teacher"].offload_hidden else None
    return with_features, replace(teacher, signals=FeatureTeacher(online, ways, host))


def _build_features(
    section: ObjectiveConfig,
    optimizer: OptimizerConfig,
    shapes: tuple[Architecture, Architecture],
    seed: int,
    groups: Groups,
    device: torch.device,
    *,
    copies: int,
) -> FeatureLosses:
    """Return the feature losses of a run; `shapes` of the student and the teacher.

    copies: tensor ranks that have the same heads of the teacher, which count in its maps as often.
    Raises ConfigError, on all ranks, for layers that a model does not have, and for attention maps
    of layers that see different keys.
    """
    student, teacher = shapes
    check_features(section.features, student.num_layers, teacher.num_layers)
    pairs = _pairs(section.features, student.num_layers, teacher.num_layers)
    _check_windows(pairs, student, teacher)
    return FeatureLosses(
        pairs,
        projectors=_projectors(
            section.projector,
            optimizer,
            [pair for pair in pairs if not pair.is_of_attention],
            (student.hidden_size, teacher.hidden_size),
            seed=seed,
            groups=groups,
            device=device,
        ),
        rules=ScoreRules(_score_rule(student), _score_rule(teacher, copies)),
        groups=groups,
        device=device,
    )


def _pairs(
    entries: Sequence[FeatureConfig], student_layers: int, teacher_layers: int
) -> tuple[FeaturePair, ...]:
    found = []
    for entry in entries:
        layers = matched_layers(entry, student_layers, teacher_layers)
        weight = entry.weight / len(layers)
        found += [FeaturePair(*pair, entry.loss, weight) for pair in layers]
    return tuple(found)


def _check_windows(
    pairs: tuple[FeaturePair, ...], student: Architecture, teacher: Architecture
) -> None:
    """Raise ConfigError where teacher and student layers attend to different keys."""
    of_student, of_teacher = LayerKinds.of(student).layers, LayerKinds.of(teacher).layers
    problems = [
        f"layer {pair.student} of the student has a sliding_window of {own.window}, layer "
        f"{pair.teacher} of the teacher one of {other.window}"
        for pair in pairs
        if pair.is_of_attention
        for own, other in [(of_student[pair.student - 1], of_teacher[pair.teacher - 1])]
        if own.window != other.window
    ]
    if problems:
        raise ConfigError(
            "objective.features with loss = 'attention' need student and teacher layers with the "
            f"same attention window: {'; '.join(problems)}; pair such layers, or use another loss"
        )


def _score_rule(architecture: Architecture, copies: int = 1) -> ScoreRule:
    scalar = architecture.attention_scalar or architecture.head_size
    return ScoreRule(
        scale=scalar**-0.5,
        softcap=architecture.attention_softcap,
        heads=architecture.num_attention_heads * copies,
    )


def _projectors(
    wanted: ProjectorConfig,
    optimizer: OptimizerConfig,
    pairs: Sequence[FeaturePair],
    hidden_sizes: tuple[int, int],
    *,
    seed: int,
    groups: Groups,
    device: torch.device,
) -> Projectors | None:
    """Return the projectors from the student's hidden size to the teacher's, where needed."""
    student_size, teacher_size = hidden_sizes
    if not pairs or (student_size == teacher_size and not wanted.always):
        return None
    within = (wanted.hidden_size or teacher_size,) if wanted.kind == "mlp" else ()
    decay = optimizer.weight_decay if wanted.weight_decay is None else wanted.weight_decay
    return Projectors(
        ProjectorShape(
            names=tuple(
                dict.fromkeys(projector_name(pair, shared=wanted.shared) for pair in pairs)
            ),
            sizes=(student_size, *within, teacher_size),
        ),
        ProjectorOptimization(
            learning_rate=wanted.learning_rate or optimizer.learning_rate,
            weight_decay=decay,
            betas=(optimizer.beta1, optimizer.beta2),
            epsilon=optimizer.epsilon,
            is_decoupled=optimizer.name == "adamw",
            clip_grad_norm=optimizer.clip_grad_norm,
        ),
        seed=seed,
        groups=groups,
        device=device,
    )
