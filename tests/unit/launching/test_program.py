"""The commands of a launch, and the folder of each one's records."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
import yaml

from megatron_distill.cli import COMMANDS, main
from megatron_distill.errors import ConfigError
from megatron_distill.launching.program import JobRanks, Program
from megatron_distill.launching.ssh import ranks_on
from tests.guards.source_tree import ROOT

PYTHON = [sys.executable]
# Of the program's commands, those that need no ranks: they run where they are called.
HERE = {"plan", "calibrate", "store", "data", "submit", "status"}


@pytest.mark.parametrize(
    ("command", "words", "records", "results"),
    [
        ("evaluate", ("a", "parallel.tensor=2"), "a/launches_evaluate", "a"),
        ("evaluate", ("--tasks", "mmlu", "--hf", "a"), "a/launches_evaluate", "a"),
        ("evaluate.py", ("--run=a",), "a/launches_evaluate", "a"),
        ("generate", ("--checkpoint", "a", "--prompt", "x"), "a/launches_generate", "a"),
        ("rollout", ("--hf", "a", "--output=b/c", "--prompts", "d"), "b/c/launches", "b/c"),
        ("rollout", ("a", "--output", "x", "--output", "b"), "b/launches", "b"),
        ("convert", ("export", "--checkpoint", "a", "--hf", "b"), "records/launches", "records"),
        ("prune.py", ("a",), "records/launches", "records"),
        ("evaluate", ("a",), "records/launches_evaluate", "a"),
    ],
)
def test_records_are_beside_the_inputs_of_a_command_or_in_the_given_folder(
    command: str,
    words: tuple[str, ...],
    records: str,
    results: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    Path("prune.py").touch()
    folder = "records" if records.startswith("records") else None
    found = Program(command, words, folder).launches(PYTHON)
    assert (found.folder, found.results) == (Path(records), Path(results))


def test_rollouts_count_their_parts_and_are_done_for_one_file_and_model(tmp_path: Path) -> None:
    output, prompts, model = (tmp_path / name for name in ("out", "prompts.jsonl", "model"))
    model.mkdir()
    prompts.write_text("{}\n")
    words = ("--hf", str(model), "--prompts", str(prompts), "--output", str(output))
    found = Program("rollout", words).launches(PYTHON)
    (output / "launches").mkdir(parents=True)
    (output / "part-00000.jsonl").touch()
    assert (found.progress, found.unit) == (1, "part")
    found.mark_done()
    assert Program("rollout", words).launches(PYTHON).is_done()
    prompts.write_text("{}\n{}\n")
    assert not Program("rollout", words).launches(PYTHON).is_done()
    (output / "config.json").touch()
    with pytest.raises(
        ConfigError, match=r"it is the folder of a Hugging Face model \(config.json"
    ):
        Program("rollout", words).launches(PYTHON)


def test_each_of_several_jobs_that_write_a_store_has_a_folder_and_a_lock_of_its_own(
    tmp_path: Path,
) -> None:
    words = (str(ROOT / "configs" / "cache.yaml"), f"store.path={tmp_path}/a")
    assert Program("capture", words).launches(PYTHON).folder == tmp_path / "a.launches"
    jobs = [
        Program("capture", (*words, "store.jobs=2", f"store.job={job}")).launches(PYTHON)
        for job in range(2)
    ]
    assert [one.folder for one in jobs] == [
        tmp_path / "a.launches" / f"job_{job}_of_2" for job in range(2)
    ]
    (tmp_path / "a" / "shards").mkdir(parents=True)
    for shard in (0, 1, 2):
        (tmp_path / "a" / "shards" / f"logits-{shard:06d}.array_record").touch()
    assert [one.progress for one in jobs] == [2, 1]


@pytest.mark.parametrize(
    ("command", "words", "folder", "message"),
    [
        ("evaluate", ("typo",), None, "evaluate typo: there is no such folder; give the folder"),
        ("evaluate", ("--tasks", "mmlu"), None, "evaluate: give the folder of a run first"),
        ("generate", (), None, "generate: give the folder of a run first"),
        ("rollout", ("--prompts", "a", "--output", "b"), None, "rollout: give the folder of a run"),
        ("rollout", ("--hf", "/", "--output="), None, "rollout: give --output, a folder for the t"),
        ("rollout", ("--hf", "/", "--output", "/"), None, "rollout: give --output, a folder for t"),
        (
            "rollout",
            ("--hf", "/", "--output", "x"),
            "x",
            "--folder x: rollout keeps its records in",
        ),
        ("convert", ("import",), None, "convert: give --folder, a folder for the records"),
        ("train", ("tiny.yaml",), "x", "--folder x: train keeps its records next to its results"),
        ("trian", ("tiny.yaml",), None, "trian: not a command for a cluster; train, capture"),
        ("data", ("preview",), None, "data: not a command for a cluster"),
        (
            "prune",
            ("x",),
            None,
            "prune: not a command for a cluster; train, capture, rollout, evaluate, generate, "
            "convert are, and scripts. Layers are pruned at the start of train: set student.keep_",
        ),
        ("prun.py", (), "x", "prun.py: there is no such script in /"),
    ],
)
def test_a_command_without_a_folder_is_named(
    command: str,
    words: tuple[str, ...],
    folder: str | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        Program(command, words, folder).launches(PYTHON)
    assert str(error.value).startswith(message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import argparse; argparse.ArgumentParser().parse_args()", "unrecognized arguments"),
        ("print('pruned')", "writes no YAML of its settings"),
        ("print('a: [')", "writes no YAML of its settings"),
    ],
)
def test_a_script_without_settings_is_told_of_the_option(
    text: str, message: str, tmp_path: Path
) -> None:
    script = tmp_path / "prune.py"
    script.write_text(text)
    with pytest.raises(ConfigError, match="needs --folder, a folder for the records") as error:
        Program(str(script), ()).launches(PYTHON)
    assert message in str(error.value)


def test_a_python_without_the_packages_is_named_in_one_line() -> None:
    """As that of an image without them."""
    words = (str(ROOT / "configs" / "tiny.yaml"),)
    with pytest.raises(ConfigError) as caught:
        Program("train", words).launches([*PYTHON, "-S"])
    text = str(caught.value)
    assert text.startswith(f"{sys.executable} -S -m megatron_distill.cli train ")
    assert "--print-config: No module named '" in text
    assert text.endswith("install it for this Python, or name one that has it")
    assert "\n" not in text


@pytest.mark.parametrize(
    ("command", "words", "key"),
    [
        ("train", ("{configs}/tiny.yaml", "parallel.tensor=4"), "parallel.context = 4 * 1 * 1: "),
        ("capture", ("{configs}/cache.yaml", "parallel.tensor=4"), "parallel.context = 4 * 1 * 1"),
        ("evaluate", ("{run}", "parallel.pipeline=4"), "parallel.context = 1 * 4 * 1: "),
        ("generate", ("{run}", "parallel.tensor=4"), "parallel.context = 4 * 1 * 1: "),
        (
            "rollout",
            ("{run}", "parallel.tensor=4", "--prompts", "a.jsonl", "--output", "{run}/b"),
            "parallel.context = 4 * 1 * 1: ",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_one_error_without_any_rank(
    command: str, words: tuple[str, ...], key: str, tmp_path: Path
) -> None:
    run, configs = tmp_path / "run", ROOT / "configs"
    run.mkdir()
    (run / "config.yaml").write_text((configs / "tiny.yaml").read_text())
    program = Program(command, tuple(one.format(run=run, configs=configs) for one in words))
    with pytest.raises(ConfigError) as caught:
        program.launches(PYTHON, ranks=JobRanks(2, 1))
    assert str(caught.value).startswith("this configuration on 2 processes: 1 problem")
    assert key in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_layout_that_fits_the_ranks_changes_neither_settings_nor_folder() -> None:
    program = Program("train", (str(ROOT / "configs" / "tiny.yaml"), "parallel.tensor=2"))
    shown = program.launches(PYTHON)
    assert shown.digest is not None
    assert program.launches(PYTHON, ranks=JobRanks(2, 1)) == shown
    # One rank of each node where no GPU is.
    if ranks_on(PYTHON) == 1:
        assert program.launches(PYTHON, ranks=JobRanks(2)) == shown
        with pytest.raises(ConfigError, match="on 1 process: 1 problem"):
            program.launches(PYTHON, ranks=JobRanks(1))


def test_a_login_that_writes_a_line_is_named_with_it() -> None:
    login = ["sh", "-c", 'echo Welcome to node 3; exec "$0" "$@"', *PYTHON]
    words = (str(ROOT / "configs" / "tiny.yaml"),)
    with pytest.raises(ConfigError, match=r"^'Welcome to node 3' comes before .*\.bashrc silent"):
        Program("train", words).launches(login)
    assert ranks_on(login) == ranks_on(PYTHON) >= 1


def test_every_command_in_ranks_can_be_submitted(tmp_path: Path) -> None:
    refused = set()
    for command in COMMANDS:
        try:
            Program(command, (str(tmp_path),), str(tmp_path)).launches(PYTHON)
        except ConfigError as error:
            if "not a command for a cluster" in str(error):
                refused.add(command)
    assert refused == HERE


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "--command", "evaluate", "--tasks", "mmlu"], "options of the submitted command"),
        (["--command", "convert", "--folder", "a"], "convert: give its arguments, and its options"),
        ([], "train: give a configuration, such as configs/tiny.yaml"),
    ],
)
def test_a_submission_names_the_words_that_are_missing_or_too_early(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["submit", "slurm", *words, "--nodes", "1", "--dry-run"])
    assert message in capsys.readouterr().err


def test_options_of_the_command_follow_two_hyphens_into_the_batch_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir()
    submit = ["submit", "slurm", str(tmp_path / "a"), "--command", "evaluate", "--nodes", "1"]
    assert main([*submit, "--dry-run", "--", "--tasks", "mmlu=data/mmlu", "--limit", "5"]) == 0
    text = capsys.readouterr().out
    (line,) = [line for line in text.splitlines() if line.startswith("exec ")]
    program = [str(tmp_path / "a"), "--tasks", "mmlu=data/mmlu", "--limit", "5"]
    assert shlex.split(line)[-7:] == ["--", "evaluate", *program]
    assert f"{tmp_path}/a/launches_evaluate/log-%j.txt" in text

    # The pods alone see the run.
    submit = ["submit", "kubernetes", "/data/runs/a", "--command", "evaluate", "--nodes", "1"]
    folder = ["--folder", "/data/records"]
    claim = ["--claim", "data:/data"]
    assert main([*submit, *folder, *claim, "--image", "i", "--dry-run"]) == 0
    (group,) = yaml.safe_load(capsys.readouterr().out)["spec"]["replicatedJobs"]
    (container,) = group["template"]["spec"]["template"]["spec"]["containers"]
    assert container["command"][-5:] == [*folder, "--", "evaluate", "/data/runs/a"]
