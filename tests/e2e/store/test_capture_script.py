"""The entry script of a capture: its messages and its exit status."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distill.config import load_capture_config
from tests.distributed.pool import Pool
from tests.e2e.captures import SCRIPT, shards_of, write_capture
from tests.e2e.failing import Ending, call_script, message, script
from tests.e2e.runs import SECONDS, Inputs


@pytest.fixture(scope="module")
def config(inputs: Inputs) -> Path:
    return write_capture(inputs, "script", samples=5, per_shard=2)


def call(pool: Pool, world: int, config: Path, *overrides: str) -> list[Ending]:
    arguments = ["--config", str(config), *overrides]
    return pool.run(world, call_script, SCRIPT, arguments, timeout=SECONDS)


def test_it_writes_a_store_prints_its_summary_and_ends_with_zero(
    pool: Pool, config: Path, tmp_path: Path
) -> None:
    store = f"store.path={tmp_path}/store"
    first, second = call(pool, 2, config, store)
    assert (first.status, second.status) == (0, 0)
    assert "samples 5/5  shards 3/3" in first.stderr
    summary = first.stderr.strip().splitlines()[-1]
    for words in (
        f"{tmp_path}/store: 160 tokens",
        "bytes/token",
        "stored probability",
        "ce",
        "entropy",
    ):
        assert words in summary
    assert second.stderr == ""
    assert len(shards_of(tmp_path / "store")) == 3
    again = call(pool, 1, config, store)[0]
    assert again.status == 0
    assert "nothing to do: the store is complete" in again.stderr


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("teacher=null", "teacher is required to capture a store; set teacher.hf or"),
        ("teacher={store: stores/x}", "a model and cannot read a store"),
        ("store.job=1", "with store.jobs = 1 the jobs are 0 to 0"),
        ("store.temperatures=[1.0]", "list positive numbers other than 1 in ascending order"),
        ("parallel.tensor=4", "the layout needs a multiple of 4 processes; there are 2"),
        ("store.kk=3", "store.kk"),
    ],
)
def test_contradictory_settings_are_one_message(
    pool: Pool, config: Path, tmp_path: Path, override: str, words: str
) -> None:
    text = message(call(pool, 2, config, f"store.path={tmp_path}/store", override))
    assert words in text
    assert not (tmp_path / "store").exists()


def test_a_printed_configuration_is_the_same_when_read(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script(SCRIPT).main(["--config", str(config), "--print-config", "store.k=5"]) == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert load_capture_config(printed) == load_capture_config(config, ["store.k=5"])
