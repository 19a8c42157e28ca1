"""The command `plan`: its tables, the simulated step's files, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_distill.cli import main
from megatron_distill.config import load_config
from megatron_distill.planning.device import DeviceProfile, load_device, write_device
from megatron_distill.planning.parameters import stage_numbers
from megatron_distill.planning.refine import MeasuredSteps, refined
from megatron_distill.planning.step_time import phase_seconds
from megatron_distill.train.reports.planned_run import configured_choice, open_shapes, planned_run

RUN = """
student: {architecture: {num_layers: 8, hidden_size: 512, ffn_hidden_size: 1408,
  num_attention_heads: 8, num_kv_heads: 4, vocab_size: 32768}}
teacher: {architecture: {num_layers: 16, hidden_size: 1024, ffn_hidden_size: 2816,
  num_attention_heads: 16, num_kv_heads: 8, vocab_size: 32768}}
data: {sources: [{format: python_stdlib}], sequence_length: 2048,
  tokenizer: {train_vocab_size: 300}}
train: {steps: 1000, global_batch_size: 64, precision: bf16}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return str(path)


def test_a_plan_ranks_layouts_with_the_settings_of_the_first(
    config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["plan", config, "--devices", "8", "--device", "l40s", "parallel.pipeline=2"]
    assert main([*words, "--simulate", str(tmp_path / "s"), "--row", "0"]) == 0
    text = capsys.readouterr().out
    for words_of in ("plan for 8 x NVIDIA L40S", "device-", "Simulated: TP1 PP2"):
        assert words_of in text
    # Reading decides: the first row has ranks of the teacher, which gain nothing.
    assert "The keys of row 2, which is recommended:\n" in text
    assert (tmp_path / "s" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "s" / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    # Texts are read more slowly than eight such GPUs take them.
    assert names == {"stage 0 (4 ranks)", "stage 1 (4 ranks)", "reading (beside a rank)"}


def test_a_plan_names_the_rates_that_varied_by_more_than_fifteen_per_cent(
    config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names = ("kernel_us", "score_ns", "update_ns", "node.gather", "logit_ns.bf16", "logit_ns.fp32")
    spread = {name: 0.16 + number / 10 for number, name in enumerate(names)}
    device = load_device("l40s").model_copy(update={"spread": spread | {"node.scatter": 0.15}})
    write_device(device, tmp_path / "mine.yaml")
    words = ["plan", config, "--devices", "1", "--device"]
    assert main([*words, str(tmp_path / "mine.yaml")]) == 0
    assert " ".join(capsys.readouterr().out.split()).endswith(
        "varied by more than 15% while they were measured: logit_ns.bf16 56%, node.gather 46%, "
        "update_ns 36%, score_ns 26% and 1 more."
    )
    assert main([*words, "l40s"]) == 0
    assert "varied" not in capsys.readouterr().out


def test_a_plan_says_whether_measured_steps_refine_it(
    config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = load_config(config, [])
    run = planned_run(given, open_shapes(given))
    choice = configured_choice(given, run, ranks=1, teachers=0)
    device = load_device("l40s")
    planned = phase_seconds(run, choice, device, stage_numbers(run.student, choice.layout, (8,)))
    measured = MeasuredSteps({"teacher": 1.5 * planned["teacher"]}, 1e-9, 1, 1.0, 1.0)
    write_device(refined(device, run, choice, measured, shared_by=1), tmp_path / "mine.yaml")
    words = ["plan", config, "--devices", "4", "--device", str(tmp_path / "mine.yaml")]

    def end(*overrides: str) -> str:
        assert main([*words, *overrides]) == 0
        return " ".join(capsys.readouterr().out.split())

    assert end().endswith("Refined by measured steps of such a run, factors: teacher 1.50.")
    assert end("data.sequence_length=1024").endswith(
        "Measured steps of 1 run of NVIDIA L40S 48 GB refine nothing here: models, sequences, "
        "documents, losses, precision, layout or place of the teacher differ."
    )
    assert "refine nothing here" in end("objective.terms=[{top_k: 64}]")
    assert "refine nothing here" in end("parallel.tensor=2")
    short = MeasuredSteps({"teacher": 1e-9}, 1.0, 1, 1.0, 1.0)
    write_device(refined(device, run, choice, short, shared_by=1), tmp_path / "mine.yaml")
    assert end().endswith("such a run refine nothing here: its phases were too short.")


def test_a_plan_names_its_assumed_vocabulary_once(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", config, "--devices", "1", "--device", "l40s", "teacher=null"]
    words += ["data.tokenizer.path=unread", "data.tokenizer.train_vocab_size=null"]
    assert main([*words, "student.architecture.vocab_size=null"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("Assumed: a vocabulary of 32,768 rows") == 1
    assert "; set student.architecture.vocab_size layout" in text


SEVERAL = """
student: {architecture: &small {num_layers: 4, hidden_size: 256, ffn_hidden_size: 704,
  num_attention_heads: 8, num_kv_heads: 4, vocab_size: 32768}}
teachers:
  math: {architecture: {<<: *small, num_layers: 16, hidden_size: 1024}}
  code: {architecture: {<<: *small, num_layers: 8, hidden_size: 512}}
data:
  sources:
    - {format: text, paths: a.txt, weight: 3, teacher: math}
    - {format: text, paths: b.txt, weight: 1}
  sequence_length: 2048
  tokenizer: {train_vocab_size: 300}
objective: {terms: [{divergence: forward_kl}], routing_weights: {math: 1, code: 1}}
train: {steps: 1000, global_batch_size: 64, precision: bf16}
"""


def test_several_teachers_on_the_ranks_of_the_student_are_planned_by_their_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(SEVERAL)
    words = ["plan", str(tmp_path / "run.yaml"), "--devices", "4", "--device", "l40s"]
    assert main([*words, "--simulate", str(tmp_path / "s")]) == 0
    text = capsys.readouterr().out
    assert "with their shares of the samples: code 12%, math 88%." in text
    assert "The first row" in text
    assert "teacher." not in text
    assert "Simulated: " in text
    assert main([*words, "teachers.math.parallel={tensor: 2}"]) == 1
    assert "teachers.math.parallel: a plan has several teachers on" in capsys.readouterr().err


def test_a_teacher_whose_tokenizer_a_term_shows_is_not_planned_as_one_of_the_students(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    terms = "{divergence: forward_kl, teacher: math}, {alignment: likelihood, teacher: code}"
    aligned = SEVERAL.replace("{divergence: forward_kl}", terms)
    for routed in (", routing_weights: {math: 1, code: 1}", ", teacher: math"):
        aligned = aligned.replace(f"{routed}}}", "}", 1)
    (tmp_path / "run.yaml").write_text(aligned)
    words = ["plan", str(tmp_path / "run.yaml"), "--devices", "4", "--device", "l40s"]
    assert main(words) == 1
    assert "teachers.code has a tokenizer of its own" in capsys.readouterr().err


def test_wrong_words_are_named_before_any_work(
    config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = ["plan", config, "--device", "l40s"]
    for words, message in (
        ([*plan, "--devices", "0"], "--devices 0: must be 1 or more"),
        ([*plan, "--devices", "8", "--row", "-1"], "--row -1: must be 0"),
        ([*plan, "--devices", "abc"], "argument --devices: abc: give a whole number, as 64"),
        ([*plan, "--devices", "8", "--row", "x"], "argument --row: x: give a whole number, as 2"),
        ([*plan, "--devices", "8", "--simulate", config], "run.yaml: not a folder"),
        (["calibrate", "--output", str(tmp_path)], "is a folder; name a file in it"),
        (["calibrate", "--output", str(tmp_path / "no" / "a.yaml")], "is not there; make it"),
    ):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "8", "--device", "none"], "--device none: there is no device none"),
        (["--devices", "8", "--device", ""], "--device : there is no device ; the shipped ones"),
        (["--devices", "8", "--device", "."], "--device .: there is no device .; the shipped ones"),
        (["--devices", "8", "--device", "/"], "--device /: there is no device /; the shipped ones"),
        (
            ["--devices", "8", "--device", "l40s", "--simulate", "x", "--row", "99"],
            "--row 99: the table has 10 rows; give one of them\n",
        ),
        (
            ["--devices", "6", "--device", "l40s", "--simulate", "x", "--row", "0",
             "parallel.tensor=4"],
            "does not run on these devices (",
        ),
    ],
)  # fmt: skip
def test_an_error_is_one_line(
    config: str, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["plan", config, *words]) == 1
    found = capsys.readouterr()
    assert message in found.err
    assert found.out == ""


def test_a_row_without_a_simulation_is_a_warning(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", config, "--devices", "8", "--device", "l40s"]
    assert main([*words, "--row", "3"]) == 0
    assert "--row 3: has no effect without --simulate; give its folder\n" in capsys.readouterr().err
    assert main(words) == 0
    assert capsys.readouterr().err == ""


def test_the_training_command_plans_too(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", config, "--plan", "8xl40s"]) == 0
    assert "plan for 8 x NVIDIA L40S" in capsys.readouterr().out
    assert main(["train", config, "--plan", "l40s"]) == 1
    assert "as 64xh100-80gb" in capsys.readouterr().err
    assert main(["train", config, "--plan", "64xnope"]) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: --plan 64xnope: there is no device nope; the shipped ones are ")
    assert "--device " not in text


def test_the_training_command_names_its_option_where_a_machine_has_too_few_places(
    config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fields = load_device("h200").model_dump() | {"kind": "cpu", "cores": 2}
    fields["node"]["devices"] = 2
    file = tmp_path / "mine.yaml"
    write_device(DeviceProfile.model_validate(fields), file)
    assert main(["train", config, "--plan", f"3x{file}"]) == 1
    text = f"error: --plan 3x{file}: {file} is one machine with room for 2 ranks; plan at most"
    assert capsys.readouterr().err.startswith(text)


def test_a_plan_of_short_documents_is_faster(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", config, "--devices", "1", "--device", "l40s"]

    def seconds(*more: str) -> float:
        assert main([*words, *more]) == 0
        heading, _, _, row, *_ = capsys.readouterr().out.splitlines()
        assert heading.endswith(f"documents of {int(more[1]):,} tokens" if more else "tried")
        return float(row.split()[-4])

    whole = seconds()
    assert seconds("--document-length", "256") < whole
    assert seconds("--document-length", "2048") == whole
    assert main([*words, "--document-length", "256", "data.isolate_documents=false"]) != 0
    assert "data.isolate_documents=false" in " ".join(capsys.readouterr().err.split())
    assert main([*words, "--document-length", "5000"]) != 0
    assert "a sample has data.sequence_length = 2048 tokens" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "--document-length", "0"])
    assert "must be 1 or more" in capsys.readouterr().err
