"""Parts of rollouts in a folder: whole or absent, of one setting, with their sums."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_distill.errors import ConfigError
from megatron_distill.rollouts.folder import RolloutFolder, Totals

SETTINGS = {"seed": 1, "weights": "sha256:a"}
ONE = Totals(texts=2, tokens=10, truncated=1, left_out=0, log_prob=-5.0)


def test_parts_are_counted_and_their_sums_are_kept(tmp_path: Path) -> None:
    folder = RolloutFolder(tmp_path / "a" / "b", SETTINGS)
    folder.require(digest="b")
    assert folder.missing(3) == [0, 1, 2]
    folder.write(1, [{"text": "é", "row": 1}], ONE)
    assert folder.missing(3) == [0, 2]
    assert folder.part(1).read_text(encoding="utf-8") == '{"text": "é", "row": 1}\n'
    folder.write(0, [], Totals(left_out=1))
    folder.require(digest="b")
    assert folder.finish(2) == Totals(2, 10, 1, 1, -5.0)
    record = json.loads((tmp_path / "a" / "b" / "rollouts.json").read_text())
    assert record["totals"] == {
        "texts": 2, "tokens": 10, "truncated": 1, "left_out": 1, "log_prob": -5.0,
    }  # fmt: skip
    assert record["settings"] == {"version": 1, **SETTINGS, "digest": "b"}
    with pytest.raises(ConfigError, match=r"its rollouts have digest = b, not c; name another"):
        folder.require(digest="c")


def test_other_settings_are_refused_by_their_name_and_both_values(tmp_path: Path) -> None:
    RolloutFolder(tmp_path, {**SETTINGS, "seed": 7}).close()  # without a part it binds nothing
    first = RolloutFolder(tmp_path, SETTINGS)
    first.write(0, [], ONE)
    first.close()
    RolloutFolder(tmp_path, SETTINGS).close()
    with pytest.raises(ConfigError) as error:
        RolloutFolder(tmp_path, {**SETTINGS, "seed": 2})
    assert str(error.value) == (
        f"--output {tmp_path}: its rollouts have seed = 1, not 2; name another folder, or start "
        "with the same"
    )


def test_a_folder_of_another_kind_or_with_damaged_records_is_refused(tmp_path: Path) -> None:
    (tmp_path / "part-00000.jsonl").touch()
    with pytest.raises(
        ConfigError, match=r"it has parts without their settings in .*rollouts.json"
    ):
        RolloutFolder(tmp_path, SETTINGS)
    (tmp_path / "rollouts.json").write_text("[")
    with pytest.raises(ConfigError, match=r"rollouts.json is damaged; name another --output"):
        RolloutFolder(tmp_path, SETTINGS)
    other = RolloutFolder(tmp_path / "other", SETTINGS)
    other.write(0, [], ONE)
    (tmp_path / "other" / "sums" / "part-00000.json").unlink()
    with pytest.raises(ConfigError, match=r"is missing or damaged; remove .*part-00000.jsonl to"):
        other.finish(1)


def test_a_second_process_is_refused_while_the_first_holds_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_distill.runtime.folder_lock._PATIENCE_SECONDS", 0.0)
    first = RolloutFolder(tmp_path, SETTINGS)
    with pytest.raises(ConfigError, match=f"--output {tmp_path}"):
        RolloutFolder(tmp_path, SETTINGS)
    first.close()
    RolloutFolder(tmp_path, SETTINGS).close()
