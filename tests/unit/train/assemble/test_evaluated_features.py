"""The projectors of a run with feature losses, which an evaluation reads from its checkpoint."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_distill.errors import CheckpointError, ConfigError
from megatron_distill.train.assemble import trained_run

LOSSES: dict[str, Any] = {"losses": ["feature_mse_1_2"], "projectors": None}


@pytest.mark.parametrize(
    ("checkpoint", "saved", "error", "message"),
    [
        (None, None, ConfigError, "student.checkpoint = null; name the run"),
        ("run", None, CheckpointError, r"losses are \[\] in the checkpoint"),
        ("run", {**LOSSES, "losses": ["feature_mse_2_2"]}, CheckpointError, "feature_mse_2_2"),
    ],
)
def test_projectors_that_the_weights_lack_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: str | None,
    saved: dict[str, Any] | None,
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.setattr(trained_run, "together", nullcontext)
    monkeypatch.setattr(trained_run, "resolve_checkpoint", Path)
    read = SimpleNamespace(read=lambda _: SimpleNamespace(features=saved))
    monkeypatch.setattr(trained_run, "Description", read)
    tapped: list[Any] = []
    features: Any = SimpleNamespace(
        attach=tapped.append, projectors=object(), as_dict=lambda: LOSSES
    )
    groups: Any = None
    with pytest.raises(error, match=message) as raised:
        trained_run._restore_features(features, [], checkpoint, groups)
    assert "set objective.features=[] to evaluate without them" in str(raised.value)
    features.projectors = None  # equal sizes need none
    trained_run._restore_features(features, [], checkpoint, groups)
    assert len(tapped) == 2
