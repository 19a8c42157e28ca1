"""The flow of the quickstart, with stand-ins for its child processes."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from launch import quickstart
from megatron_distill.commands.quickstart.one_tokenizer import parse, plan
from megatron_distill.commands.quickstart.options import Checkout
from megatron_distill.config import load_capture_config, load_config
from megatron_distill.errors import ConfigError
from megatron_distill.evaluation import child_runs
from megatron_distill.runtime.torchrun import ChildOutcome

ROOT = Path(quickstart.__file__).parent.parent
LOSS = {"teacher": 3.0, "student_alone": 4.0, "student_distilled": 3.5}
STEPS = 4
COMPARED = {
    "comparison": {
        "top1_agreement": 0.25,
        "tokens_per_verification": {"4": 1.75},
        "tokens_per_verification_stderr": {"4": 0.05},
    }
}
# The error of five right items of eight: sqrt(0.625 * 0.375 / 7).
TASK = {"acc": 0.625, "n": 8}
RESULTS = {"results": {name: {"next_line": TASK} for name in ("student", "teacher")}}


class Children:
    """In place of real children: writes what a run, an evaluation or a sample would leave."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.outcome = ChildOutcome(0, None)
        self.first_loss = dict.fromkeys(LOSS, 8.0)

    def __call__(self, command: Sequence[str], *, environment: dict[str, str]) -> ChildOutcome:
        words = list(command)
        script = next(Path(word).name for word in words if word.endswith(".py"))
        if self.outcome.status or self.outcome.interrupted_by:
            return self.outcome
        if script == "evaluate.py":
            self.made.append("task" if "--tasks" in words else "evaluation")
            given = RESULTS if "--tasks" in words else COMPARED
            Path(words[words.index("--json") + 1]).write_text(json.dumps(given))
        elif script == "convert_checkpoint.py":
            self.made.append("export")
            exported = Path(words[words.index("--hf") + 1])
            exported.mkdir()
            (exported / "config.json").write_text("{}")
        elif script == "generate.py":
            self.made.append("sample")
            Path(words[words.index("--text") + 1]).write_text("def __init__(self, [x]):")
        else:
            self.train(words[words.index("--config") + 1 :])
        return self.outcome

    def train(self, arguments: Sequence[str]) -> None:
        folder = Path(load_config(arguments[0], arguments[1:]).output)
        self.made.append(folder.name)
        (folder / "checkpoints" / f"step_000000{STEPS}").mkdir(parents=True)
        (folder / "checkpoints" / "step_0000009.partial").mkdir()
        final = LOSS[folder.name]
        records: list[dict[str, object]] = [
            {
                "step": step,
                "tokens": step * 100,
                "ce_loss": self.first_loss[folder.name] if step == 1 else final,
                "tokens_per_second": 1000.0,
                "peak_memory_bytes": 500_000_000,
            }
            for step in range(1, STEPS + 1)
        ]
        records.append({"step": STEPS, "validation": {"ce_loss": final, "top1_agreement": 0.5}})
        lines = [json.dumps(record) + "\n" for record in records]
        (folder / "metrics.jsonl").write_text("".join(lines))


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    stand_in = Children()
    monkeypatch.setattr(child_runs, "run_child", stand_in)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(ROOT)
    return stand_in


def start(output: Path, *arguments: str) -> int:
    return quickstart.main(["--output", str(output), "--steps", str(STEPS), *arguments])


@pytest.mark.parametrize("prefix", ["quickstart", "quickstart_gpu"])
def test_the_students_differ_in_the_teacher_alone(
    prefix: str, tmp_path: Path, children: Children
) -> None:
    arguments = parse(["--config", f"configs/{prefix}", "--output", str(tmp_path), "--seed", "7"])
    flow = plan(arguments, arguments.seed, Checkout(ROOT))
    teacher, alone, distilled = (
        load_config(run.arguments[1], run.arguments[2:])
        for run in (flow.teacher, flow.alone, flow.distilled)
    )
    assert {teacher.seed, alone.seed, distilled.seed} == {7}
    assert alone.teacher is None
    assert not alone.objective.terms
    assert distilled.teacher.checkpoint == teacher.output
    assert alone.data.tokenizer.path == f"{teacher.output}/tokenizer"
    same = {"student", "data", "optimizer", "schedule", "train", "parallel", "validation", "seed"}
    for section in same:
        assert getattr(alone, section) == getattr(distilled, section), section
    assert teacher.data.sources == alone.data.sources
    assert teacher.data.validation_fraction == alone.data.validation_fraction
    assert teacher.data.sequence_length == alone.data.sequence_length
    assert teacher.validation.samples == alone.validation.samples > 0


def test_the_flow_ends_with_table_picture_checkpoint_and_text(
    tmp_path: Path, children: Children, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(tmp_path) == 0
    assert children.made == [
        *("teacher", "student_alone", "student_distilled"),
        *("evaluation", "evaluation", "export", "sample", "task", "task"),
    ]
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()]
    assert ["teacher", "3.0000", "50.0%", "400", "1,000", "0.50"] in rows
    assert ["student", "alone", "4.0000", "25.0%", "400", "1,000", "0.50"] in rows
    assert ["distilled", "student", "3.5000", "25.0%", "400", "1,000", "0.50"] in rows
    assert "ends 0.5000 nats per token lower (12.5%)" in text
    assert (
        "over 4 drafted tokens: student alone 1.75 +- 0.05, distilled student 1.75 +- 0.05." in text
    )
    assert "held-out code (8 items), out of four: teacher 62.5% +- 18.3%, student alone" in text
    assert "50% of the way to its teacher" in text
    assert f"{tmp_path}/curves.png" in text
    assert f"{tmp_path}/student_distilled/checkpoints/step_0000004\n" in text
    assert "def __init__(self, [x]):" in text
    assert (tmp_path / "curves.png").stat().st_size > 0
    assert "| distilled student | 3.5000 |" in (tmp_path / "result.md").read_text()


def test_the_offline_students_run_differs_in_the_store_alone(
    tmp_path: Path, children: Children
) -> None:
    arguments = parse(["--output", str(tmp_path), "--offline", "--steps", "10"])
    flow = plan(arguments, arguments.seed, Checkout(ROOT))
    online, offline = (
        load_config(run.arguments[1], run.arguments[2:]) for run in (flow.distilled, flow.offline)
    )
    assert [source.path for source in offline.teacher.store or ()] == [str(flow.capture.folder)]
    assert offline.teacher.checkpoint == online.teacher.checkpoint
    for section in ("student", "data", "objective", "optimizer", "train", "parallel", "seed"):
        assert getattr(offline, section) == getattr(online, section), section
    flow.capture.settings_file.write_text(flow.capture.settings)
    capture = load_capture_config(flow.capture.settings_file)
    assert capture.data == online.data
    assert capture.seed == online.seed
    assert capture.store.samples == 10 * online.train.global_batch_size
    assert capture.capture.micro_batch_size == online.train.micro_batch_size
    assert capture.teacher.checkpoint == online.teacher.checkpoint
    assert [child.name for child in flow.children] == [
        *("teacher", "student_alone", "student_distilled", "teacher_store", "student_offline")
    ]


def test_fresh_makes_everything_again_and_deletes_nothing_else(
    tmp_path: Path, children: Children
) -> None:
    start(tmp_path)
    (tmp_path / "mine.txt").write_text("kept")
    stale = tmp_path / "teacher" / "stale"
    stale.touch()
    assert start(tmp_path, "--fresh", "train.micro_batch_size=1") == 0
    assert len(children.made) == 18
    assert not stale.exists()
    assert (tmp_path / "mine.txt").read_text() == "kept"


@pytest.mark.slow
def test_the_result_has_the_seconds_of_a_call_that_did_all_of_it(
    tmp_path: Path, children: Children
) -> None:
    result = tmp_path / "result.json"

    def seconds(*arguments: str) -> float | None:
        assert start(tmp_path / "runs", "--result", str(result), *arguments) == 0
        (seed,) = json.loads(result.read_text())["seeds"]
        found: float | None = seed["seconds"]
        return found

    began = time.perf_counter()
    first = seconds()
    assert 0 < first < time.perf_counter() - began
    assert seconds() is None, "an earlier call had done the work"
    assert seconds("--fresh") is not None


@pytest.mark.slow
def test_several_seeds_have_folders_of_their_own_and_one_result(
    tmp_path: Path, children: Children
) -> None:
    result = tmp_path / "seeds.json"
    assert start(tmp_path, "--seeds", "1,2,3", "--result", str(result)) == 0
    written = json.loads(result.read_text())
    assert [seed["seed"] for seed in written["seeds"]] == [1, 2, 3]
    assert written["margin_nats"] == {"mean": 0.5, "least": 0.5, "most": 0.5}
    assert written["seeds"][0]["margin"]["gap_closed"] == 0.5
    assert [run["held_out_ce"] for run in written["seeds"][2]["runs"]] == [3.0, 4.0, 3.5]
    assert written["hardware"]
    for seed in (1, 2, 3):
        config = load_config(tmp_path / f"seed_{seed}" / "student_alone.yaml", [])
        assert config.seed == seed
        assert config.data.tokenizer.path == f"{tmp_path}/seed_{seed}/teacher/tokenizer"


def test_students_that_began_differently_are_not_compared(
    tmp_path: Path, children: Children, capsys: pytest.CaptureFixture[str]
) -> None:
    children.first_loss["student_distilled"] = 8.1
    assert start(tmp_path) == 1
    assert "cannot be compared: first cross-entropies 8.0000 and 8.1000" in capsys.readouterr().err


def test_a_failing_child_ends_with_status_1_and_a_stop_with_130(
    tmp_path: Path, children: Children, capsys: pytest.CaptureFixture[str]
) -> None:
    children.outcome = ChildOutcome(1, None)
    assert start(tmp_path) == 1
    assert "teacher: failed with exit status 1" in capsys.readouterr().err
    children.outcome = ChildOutcome(0, 2)
    assert start(tmp_path) == 130
    assert "The same command goes on from here" in capsys.readouterr().out
    children.outcome = ChildOutcome(0, None)
    assert start(tmp_path) == 0


def test_a_wrong_override_is_found_before_anything_runs(
    tmp_path: Path, children: Children, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(tmp_path, "optimizer.learning_rat=1") == 1
    assert "learning_rate" in capsys.readouterr().err
    assert children.made == []
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    arguments = parse(["--config", str(tmp_path / "none")])
    with pytest.raises(ConfigError, match=r"none_student\.yaml|none_teacher\.yaml"):
        plan(arguments, None, Checkout(ROOT))
