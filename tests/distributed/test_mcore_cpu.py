"""The patches that let Megatron-Core run without CUDA."""

from __future__ import annotations

import inspect
import sys
import types
from functools import reduce

import pytest
import torch

from megatron_distill.errors import ConfigError
from megatron_distill.runtime import imports
from megatron_distill.runtime import mcore_patches as mcore_cpu
from megatron_distill.runtime.mcore_patches import (
    LITERAL_CHANGES,
    LiteralChange,
    change_literals,
    prepare_megatron_core,
)
from tests.distributed.megatron_world import build, megatron_groups, small_architecture
from tests.distributed.pool import Pool


def _constants(code: types.CodeType) -> set[object]:
    found: set[object] = set()
    for constant in code.co_consts:
        found |= _constants(constant) if isinstance(constant, types.CodeType) else {constant}
    return found


def _literals_left(rank: int, world: int) -> tuple[list[str], list[str]]:
    prepare_megatron_core(on_cuda=False)
    prepare_megatron_core(on_cuda=False)
    left, source_without = [], []
    for change in LITERAL_CHANGES:
        found = reduce(getattr, change.function.split("."), sys.modules[change.module])
        function = inspect.unwrap(getattr(found, "__func__", found))
        name = f"{change.module}.{change.function}"
        if _constants(function.__code__) & set(change.constants):
            left.append(name)
        source = inspect.getsource(function)
        words = [
            word for key in change.constants for word in ([key] if isinstance(key, str) else key)
        ]
        if not all(word in source for word in words):
            source_without.append(name)
    return left, source_without


def test_every_listed_literal_is_in_the_source_and_gone_from_the_code(pool: Pool) -> None:
    assert pool.run(1, _literals_left) == [([], [])]


def _host_names(rank: int, world: int) -> bool:
    prepare_megatron_core(on_cuda=False)
    with torch.cuda.stream(torch.cuda.current_stream()):
        torch.cuda.synchronize()
    moved = torch.ones(2).cuda()
    return torch.cuda.current_device() == torch.device("cpu") == moved.device


def test_cuda_names_mean_the_host(pool: Pool) -> None:
    assert pool.run(1, _host_names) == [True]


def _module_with(function: types.FunctionType) -> str:
    module = types.ModuleType("synthetic_upstream")
    setattr(module, function.__name__, function)
    sys.modules[module.__name__] = module
    return module.__name__


def _counter(where: str = "x") -> list[object]:
    def inner() -> str:
        return "cuda"

    return [inner(), ("a", "b"), where]


def test_a_literal_is_exchanged_in_nested_functions_and_tuples() -> None:
    name = _module_with(_counter)
    change_literals(LiteralChange(name, "_counter", {"cuda": "cpu", ("a", "b"): ("c",)}, "test"))
    assert _counter() == ["cpu", ("c",), "x"]


def test_a_literal_that_is_gone_is_an_error_that_names_it() -> None:
    name = _module_with(_counter)
    with pytest.raises(ConfigError, match="does not contain.*torch.cuda.NoTensor"):
        change_literals(LiteralChange(name, "_counter", {"torch.cuda.NoTensor": "x"}, "test"))


def test_a_function_that_is_gone_is_an_error_that_names_it() -> None:
    name = _module_with(_counter)
    with pytest.raises(ConfigError, match=r"has no synthetic_upstream\.moved"):
        change_literals(LiteralChange(name, "moved", {"a": "b"}, "test"))


def test_an_unknown_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "version", lambda _: "9.9.9")
    monkeypatch.setattr(mcore_cpu, "_host_device", object())
    with pytest.raises(ConfigError, match="megatron-core 9.9.9 is installed"):
        prepare_megatron_core(on_cuda=False)


def _gathered(rank: int, world: int) -> tuple[list[bool], list[bool], list[bool]]:
    """Of each bucket: is it on its way, is it there once waited for, and in a forward pass."""
    with megatron_groups() as groups:
        from megatron_distill.config import OptimizerConfig
        from megatron_distill.train.optimizer import finish_gathers, wrap_data_parallel

        chunks = build(small_architecture(), groups, seed=1)
        late = OptimizerConfig(overlap_param_gather=True, bucket_size=2000)
        (wrapped,) = wrap_data_parallel(chunks, late, groups=groups)
        buckets = [bucket for group in wrapped.bucket_groups for bucket in group.buckets]

        def shards() -> list[tuple[torch.Tensor, ...]]:
            return [bucket.param_data.chunk(world) for bucket in buckets]

        def set_own(value: float) -> None:
            for parts in shards():
                parts[rank].fill_(value * (rank + 1))

        def are_there(value: float) -> list[bool]:
            return [
                all(bool((part == value * (owner + 1)).all()) for owner, part in enumerate(parts))
                for parts in shards()
            ]

        set_own(1.0)
        for group in wrapped.bucket_groups:
            group.finish_param_sync()
        in_forward = are_there(1.0)
        set_own(2.0)
        wrapped.start_param_sync()
        under_way = [group.param_gather_handle is not None for group in wrapped.bucket_groups]
        finish_gathers([wrapped])
        assert all(group.param_gather_handle is None for group in wrapped.bucket_groups)
        return under_way, are_there(2.0), in_forward


def test_parameters_are_gathered_behind_the_step_and_waited_for(pool: Pool) -> None:
    # As on a GPU, so that a read without a wait is seen here; but one by one: gloo's all-gather of
    # a coalescing manager corrupts the heap beside a thread that allocates.
    for under_way, there, in_forward in pool.run(2, _gathered):
        assert len(under_way) > 1
        assert all(under_way)
        assert all(there)
        assert all(in_forward)
