"""The vocabulary of a plan where no file has its size, and the places of its teacher."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_distill.config import RunConfig, load_config
from megatron_distill.planning.device import load_device, reading_seconds
from megatron_distill.planning.losses.layer_messages import projector_numbers
from megatron_distill.planning.memory import stage_need
from megatron_distill.planning.parameters import stage_numbers
from megatron_distill.planning.run import ChunkLoss
from megatron_distill.planning.search import Search
from megatron_distill.runtime.roles import Roles
from megatron_distill.train.assemble.answers.plan import answer_plan, sent_records
from megatron_distill.train.assemble.distillation import _build_features
from megatron_distill.train.reports.planned_run import (
    configured_choice,
    open_shapes,
    planned_run,
    teacher_places,
    vocabulary_note,
)
from tests.unit.commands.test_plan import RUN, SEVERAL


def run_config(folder: Path, changes: Sequence[str] = (), *, text: str = RUN) -> RunConfig:
    (folder / "run.yaml").write_text(text)
    return load_config(folder / "run.yaml", changes)


BOTH = "student.architecture.vocab_size and teacher.architecture.vocab_size"
UNREAD = ("data.tokenizer.path=tokenizers/llama3", "data.tokenizer.train_vocab_size=null")


@pytest.mark.parametrize(
    ("changes", "sizes", "note"),
    [
        ([], (32_768, 32_768), None),
        (["student.architecture.vocab_size=null"], (300, 32_768), None),  # it is trained
        (
            [*UNREAD, "student.architecture.vocab_size=null",
             "teacher.architecture.vocab_size=null"],
            (32_768, 32_768),
            f"a vocabulary of 32,768 rows, since no tokenizer is read here; set {BOTH}",
        ),
        (
            [*UNREAD, "student.architecture.vocab_size=null",
             "teacher.architecture.vocab_size=5000"],
            (5000, 5000),
            "a vocabulary of 5,000 rows, since no tokenizer is read here; set "
            "student.architecture.vocab_size",
        ),
        (
            [*UNREAD, "teacher.architecture.vocab_size=null",
             "student.architecture.vocab_size=5000", "teacher.tokenizer.path=tokenizers/qwen3",
             "teacher.sequence_length=2048",
             "objective.terms=[{alignment: likelihood, divergence: forward_kl}]"],
            (5000, 32_768),
            "a vocabulary of 32,768 rows, since no tokenizer is read here; set "
            "teacher.architecture.vocab_size",
        ),
    ],
)  # fmt: skip
def test_an_assumed_vocabulary_is_named_with_the_keys_to_set(
    tmp_path: Path, changes: list[str], sizes: tuple[int, int], note: str | None
) -> None:
    config = run_config(tmp_path, changes)
    shapes = open_shapes(config)
    assert (shapes["student"].vocab_size, shapes["teacher"].vocab_size) == sizes
    found = vocabulary_note(config.models, config.data.tokenizer, shapes)
    assert found == (None if note is None else f"Assumed: {note}")


MAPS = "objective.features=[{student: 1, teacher: 2, loss: attention}]"
STATES = "objective.features=[{student: 1, teacher: 2}]"


@pytest.mark.parametrize(
    ("changes", "places", "sends_heads"),
    [
        ([], ("shared", "own ranks"), False),
        ([STATES], ("shared", "own ranks"), False),
        ([MAPS], ("shared", "own ranks"), True),
        ([MAPS, "objective.terms=[]"], ("shared", "own ranks"), True),
        (["objective.terms=[]"], ("shared",), False),
        (["teacher=null", "objective.terms=[]"], ("none",), False),
    ],
)
def test_a_teacher_has_own_ranks_for_every_loss_that_asks_it(
    tmp_path: Path, changes: list[str], places: tuple[str, ...], sends_heads: bool
) -> None:
    config = run_config(tmp_path, changes)
    assert teacher_places(config) == places
    assert planned_run(config, open_shapes(config)).sends_heads == sends_heads


@pytest.mark.parametrize(
    ("mode", "raw", "keeps", "measures"),
    [
        ("fixed", "exact", False, None),
        ("magnitude", "exact", True, "losses"),
        ("magnitude", "previous", True, None),
        ("gradient_norm", "exact", True, "gradients"),
    ],
)
def test_losses_measured_in_a_step_keep_the_signals_and_take_a_pass(
    tmp_path: Path, mode: str, raw: str, keeps: bool, measures: str | None
) -> None:
    changes = [f"objective.balance.mode={mode}", f"objective.balance.raw_losses={raw}"]
    config = run_config(tmp_path, changes)
    found = planned_run(config, open_shapes(config))
    assert (found.keeps_signals, found.measures) == (keeps, measures)


@pytest.mark.parametrize(
    ("terms", "takes"),
    [
        ("[]", False),
        ("[{}, {divergence: js_divergence, temperature: 2}]", False),
        ("[{}, {divergence: adaptive_kl}]", True),
        ("[{top_k: 8}]", False),  # segments of rows are read by a kernel
        ("[{top_k: 8}, {divergence: adaptive_kl}]", True),
    ],
)
def test_blocks_of_rows_are_for_terms_without_a_kernel(
    tmp_path: Path, terms: str, *, takes: bool
) -> None:
    config = run_config(tmp_path, [f"objective.terms={terms}"])
    assert planned_run(config, open_shapes(config)).row_blocks == takes


@pytest.mark.parametrize("key", ["shard_weights", "offload"])
def test_a_key_of_one_of_several_teachers_is_its_own(tmp_path: Path, key: str) -> None:
    config = run_config(tmp_path, [f"teachers.math.{key}=true"], text=SEVERAL)
    run = planned_run(config, open_shapes(config))
    name = {"shard_weights": "shards", "offload": "rests"}[key]
    assert {one.name: getattr(one, name) for one in run.several} == {"code": False, "math": True}


@pytest.mark.parametrize(
    ("layout", "own"),
    [
        ("{}", "{tensor: 2}"),
        ("{tensor: 2, sequence: true}", "{tensor: 1}"),
        ("{tensor: 2, context: 2}", "{tensor: 4, sequence: true}"),
        (
            "{pipeline: 2, context: 2, layers_per_stage: {student: [5, 3]}}",
            "{pipeline: 2, tensor: 2}",
        ),
    ],
)
def test_slots_of_layers_are_those_of_the_answers(tmp_path: Path, layout: str, own: str) -> None:
    features = (
        "objective.features=[{student: 1, teacher: 2}, {student: 2, teacher: 2, loss: cosine}, "
        "{student: 7, teacher: 9, loss: attention}]"
    )
    given = [f"parallel={layout}", f"teacher.parallel={own}", "teacher.ranks=4", features]
    config = run_config(tmp_path, [*given, "teacher.steps_ahead=2"])
    shapes = open_shapes(config)
    run = planned_run(config, shapes)
    choice = configured_choice(config, run, ranks=12, teachers=4)
    roles = Roles(12, (("teacher", 4),))
    role = roles.teacher("teacher")
    plan = answer_plan(
        config, role, roles, shapes["teacher"], shapes["student"], torch.bfloat16, None
    )  # fmt: skip
    numbers = stage_numbers(run.student, choice.layout, choice.layers)
    for stage in range(choice.layout.pipeline):
        need = stage_need(run, choice, load_device("h100-80gb"), numbers[stage], stage)
        assert need.hidden_states == plan.slot_bytes(plan.student.rank(stage=stage))


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["objective.projector={kind: mlp, hidden_size: 48}"],
        ["objective.projector={kind: mlp, shared: true}"],
        ["teacher.architecture.hidden_size=512"],
        ["teacher.architecture.hidden_size=512", "objective.projector.always=true"],
        [MAPS],
    ],
    ids=str,
)
def test_projectors_are_those_that_a_run_builds(tmp_path: Path, changes: list[str]) -> None:
    features = "objective.features=[{match: uniform}, {student: 1, teacher: 1, loss: cosine}]"
    config = run_config(tmp_path, [features, "teacher.architecture.hidden_size=96", *changes])
    shapes = open_shapes(config)
    run = planned_run(config, shapes)
    groups: Any = None
    built = _build_features(
        config.objective, config.optimizer, (shapes["student"], shapes["teacher"]), 1, groups,
        torch.device("cpu"), copies=1,
    )  # fmt: skip
    choice = configured_choice(config, run, ranks=1, teachers=0)
    numbers = projector_numbers(run, choice)
    if built.projectors is None:
        assert (run.projector, numbers) == ((), 0)
        return
    assert run.projector == built.projectors.shape.sizes
    parameters = [one for _, one in built.projectors.named_parameters()]
    assert numbers == sum(one.numel() for one in parameters) > 0


# Layers of two stages of the student; the head of a teacher that sends ids is not on the second.
OF_WHAT_IS_SENT: list[tuple[list[str], tuple[int, ...]]] = [
    ([], (7, 1)),
    (["teacher.transfer={what: top_k, k: 8}", "objective.terms=[{top_k: 8}]"], (6, 2)),
]


@pytest.mark.parametrize(("sent", "layers"), OF_WHAT_IS_SENT)
def test_stages_of_a_teacher_in_another_layout_count_its_head_where_the_losses_run_it(
    tmp_path: Path, sent: list[str], layers: tuple[int, ...]
) -> None:
    given = ["parallel.pipeline=2", "teacher.parallel={tensor: 2}", *sent]
    config = run_config(tmp_path, given)
    run = planned_run(config, open_shapes(config))
    assert configured_choice(config, run, ranks=2, teachers=0).layers == layers
    found = Search(run, load_device("h100-80gb"), 4, lambda role, layout: None, ("shared",))
    own = {
        one.choice.layers
        for one in found.ranking(shown=1).fitting
        if one.choice.layout.stages == 2
        and one.choice.recompute != "full"
        and not one.choice.is_same_layout
    }
    assert own == {layers}


@pytest.mark.parametrize(("sent", "layers"), OF_WHAT_IS_SENT)
def test_stages_count_the_head_of_a_teacher_elsewhere_where_the_losses_run_it(
    tmp_path: Path, sent: list[str], layers: tuple[int, ...]
) -> None:
    given = ["parallel.pipeline=2", "teacher.ranks=2", "teacher.parallel={pipeline: 2}"]
    features = "objective.features=[{student: 7, teacher: 9}]"
    config = run_config(tmp_path, [*given, features, *sent])
    shapes = open_shapes(config)
    run = planned_run(config, shapes)
    choice = configured_choice(config, run, ranks=2, teachers=2)
    assert choice.layers == layers
    found = Search(run, load_device("h100-80gb"), 4, lambda role, layout: None, ("own ranks",))
    assert {
        one.choice.layers
        for one in found.ranking(shown=1).fitting
        if one.choice.layout.stages == 2 and one.choice.recompute != "full"
    } == {layers}
    roles = Roles(4, (("teacher", 2),))
    plan = answer_plan(
        config, roles.teacher("teacher"), roles, shapes["teacher"], shapes["student"],
        torch.bfloat16, sent_records(config, "teacher"),
    )  # fmt: skip
    (sent_layer,) = plan.outputs[1:]
    assert sent_layer.destination == (0 if layers[0] >= 7 else 1)


CHATS = "{format: jsonl, paths: c.jsonl, weight: 3, conversation: {}}"
ALIGNED = (
    "teacher.tokenizer.path=tokenizers/qwen3",
    "objective.terms=[{alignment: likelihood, divergence: forward_kl}]",
)


@pytest.mark.parametrize(
    ("changes", "texts", "processes"),
    [
        ([], 1.0, None),
        ([*UNREAD, "data.sources=[{format: megatron, paths: a}]"], 0.0, None),
        ([f"data.sources=[{CHATS}, {{format: text, paths: a.txt}}]"], 0.25, None),
        ([*ALIGNED, "data.workers=5"], 1.0, 5),
        ([*ALIGNED], 1.0, 2),
    ],
)
def test_the_time_of_reading_is_that_of_the_sources(
    tmp_path: Path, changes: list[str], texts: float, processes: int | None
) -> None:
    config = run_config(tmp_path, changes)
    found = planned_run(config, open_shapes(config)).reading_seconds
    assert found == pytest.approx(reading_seconds(texts=texts, aligned_by=processes))


def test_terms_with_an_alignment_are_planned_as_losses_between_tokenizers(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    terms = (
        "[{alignment: common, divergence: forward_kl, top_k: 64}, "
        "{alignment: uld, uncommon_top_k: 32}]"
    )
    given = [ALIGNED[0], "teacher.sequence_length=4096", f"objective.terms={terms}"]
    config = load_config(tmp_path / "run.yaml", given)
    run = planned_run(config, open_shapes(config))
    assert run.chunk_losses == (ChunkLoss("common", 64), ChunkLoss("uld", None, 32))
    assert run.is_aligned
    plain = load_config(tmp_path / "run.yaml", [])
    assert not planned_run(plain, open_shapes(plain)).is_aligned
