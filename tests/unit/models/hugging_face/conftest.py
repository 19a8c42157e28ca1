"""Megatron-Core is prepared before a test of a model imports it."""

import pytest

from megatron_distill.runtime.mcore_patches import prepare_megatron_core


@pytest.fixture(autouse=True, scope="package")
def _prepared() -> None:
    prepare_megatron_core(on_cuda=False)
