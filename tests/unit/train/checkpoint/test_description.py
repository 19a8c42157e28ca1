"""A damaged checkpoint's errors: one that a user named, and the newest one of a resumed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distill.errors import CheckpointError
from megatron_distill.train.checkpoint.description import Description, resumed_from

NAMED = {None: "one of its checkpoints/step_* folders", "{": "use another checkpoint"}


@pytest.mark.parametrize("content", NAMED)
@pytest.mark.parametrize("before", [None, "step_0000015"])
def test_the_remedy_of_a_resume_is_one_that_it_has(
    tmp_path: Path, content: str | None, before: str | None
) -> None:
    newest = tmp_path / "step_0000020"
    for name in (newest.name, "step_0000005.old.partial", *([before] if before else ())):
        (tmp_path / name).mkdir()
    if content is not None:
        (newest / "description.json").write_text(content)
    with pytest.raises(CheckpointError) as named:
        Description.read(newest)
    assert str(named.value).endswith(NAMED[content])
    with pytest.raises(CheckpointError) as resumed, resumed_from(newest):
        Description.read(newest)
    place = f"resume from {before}" if before else "start from step 0"
    assert str(resumed.value).endswith(f"; remove or rename {newest} to {place}")
    assert str(resumed.value).partition(";")[0] == str(named.value).partition(";")[0]


def test_an_error_that_is_of_no_damage_keeps_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="^change `output`$"), resumed_from(tmp_path):
        raise CheckpointError("change `output`")
