"""A test module that imports `row_executor` and asks for it runs with compiled row functions, and
again with torch's operations, as on a machine without a C compiler."""

from __future__ import annotations

import pytest
import torch

from megatron_distill.ops.native import native_rows, rows


@pytest.fixture(params=["native", "torch"])
def row_executor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which executor does the row work."""
    if request.param == "torch":
        monkeypatch.setattr(rows, "_functions", lambda: None)
    elif native_rows(torch.zeros(1, 1)) is None:
        pytest.skip("no C compiler for this CPU")
    return str(request.param)
