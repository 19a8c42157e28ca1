"""Traces of a piece of code: memory, matrix products, communication, waits of the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.mm.out,
    torch.ops.aten.addmm.default,
    torch.ops.aten.addmm.out,
    torch.ops.aten.addmm_.default,
    torch.ops.aten.bmm.default,
}


class Watch(TorchDispatchMode, ABC):
    """Looks at every operator that runs inside, once it has its result."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.look(func, args, result)
        return result

    @abstractmethod
    def look(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Note an operator, its arguments and its result."""


class Trace(Watch):
    """Records every operator that runs inside.

    Attributes:
        peak_bytes: most bytes of storages alive at once that were not alive before.
        products: operands of every matrix product.
        collectives: name and bytes of the input of every collective.
    """

    def __init__(self, *existing: Tensor) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.products: list[tuple[Tensor, ...]] = []
        self.collectives: list[str] = []
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in existing}

    def look(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        if func in PRODUCTS:
            operands = [leaf for leaf in args if isinstance(leaf, Tensor)][-2:]
            self.products.append(tuple(operand.detach() for operand in operands))
        if func.namespace == "c10d":
            self.collectives.append(func._opname)
        self._count(result)

    def _count(self, result: Any) -> None:
        """Add the storages of a result; the bytes alive grow with a new one only."""
        has_grown = False
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
                continue
            storage = leaf.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            known = self._live.get(key)
            if key not in self._known and (known is None or known[1] != size):
                self._live[key] = (StorageWeakRef(storage), size)
                has_grown = True
        if has_grown:
            self._live = {key: one for key, one in self._live.items() if not one[0].expired()}
            self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._live.values()))


class HostWaits(Watch):
    """Counts the operators whose result the host has to wait for on a GPU."""

    WAITING = (
        torch.ops.aten.nonzero.default,
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.masked_select.default,
        torch.ops.aten.unique_dim.default,
    )

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def look(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        self.count += func in self.WAITING


def traced(run: Callable[[], object], *existing: Tensor) -> Trace:
    """Run it once, counting storages beyond those of ``existing``."""
    with Trace(*existing) as trace:
        run()
    return trace
