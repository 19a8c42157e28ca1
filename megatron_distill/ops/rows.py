"""The interface of the passes over logits, and the choice between torch and Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.divergences import Model
from megatron_distill.ops.kernels import kernels_run
from megatron_distill.ops.normalizers import Normalizers
from megatron_distill.ops.softmax_gradient import SoftmaxWeights
from megatron_distill.ops.statistics import LocalStatistics, StatisticsSpec
from megatron_distill.ops.torch_rows import TorchRows
from megatron_distill.ops.workspace import Scratch
from megatron_distill.signals import LogitRule

__all__ = ["AllPasses", "RowExecutor", "choose_rows"]


class AllPasses(Protocol):
    """Statistics, slopes and gradient of one block of tokens after another, for one rank alone."""

    def __call__(
        self, local: LocalStatistics, weights: Sequence[SoftmaxWeights], out: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Fill the statistics except the label logits, and write the gradient to ``out``.

        Returns the values ``[N]`` fp64 of terms with slopes, and the blends ``[N, 1]``.
        """
        ...


class RowExecutor(Protocol):
    """Passes over the logits ``[N, V]`` of both models, on this shard's real columns."""

    @property
    def all_passes(self) -> AllPasses | None:
        """All passes at once, where this saves reads of the logits; None if it does not."""
        ...

    def measure(self, local: LocalStatistics) -> None:
        """Fill the local statistics, except the label logits."""
        ...

    def blends(
        self,
        local: LocalStatistics,
        normalizers: Normalizers,
        group: dist.ProcessGroup | None,
        shared_class: Tensor | None,
    ) -> dict[str, Tensor]:
        """The share of forward KL ``[N, 1]`` in each term that blends two divergences.

        ``shared_class``: see `head_share`.

        Collective: over ``group`` those of `head_share` for each such term.
        """
        ...

    def sum_slopes(self, local: LocalStatistics, normalizers: Normalizers) -> Tensor:
        """``[3 C, N]`` fp64, three for each of the C terms with slopes.

        These are the value, ``sum q (s - reference)``, and the reference: the slope at the
        student's top token of this shard.
        """
        ...

    def write_gradient(
        self,
        local: LocalStatistics,
        normalizers: Normalizers,
        weights: Sequence[SoftmaxWeights],
        out: Tensor,
    ) -> None:
        """Write the gradient on the student's raw outputs to ``out``, which may alias these."""
        ...


def choose_rows(
    spec: StatisticsSpec,
    raw: Mapping[Model, Tensor],
    rules: Mapping[Model, LogitRule],
    scratch: Scratch,
) -> RowExecutor:
    """The Triton kernels if they run here and cover every divergence of the spec, else torch."""
    torch_rows = TorchRows(spec, raw, rules, scratch)
    if raw["student"].numel() == 0 or any(one.divergence.kernel is None for one in spec.nonlinear):
        return torch_rows
    for outputs in raw.values():
        # Kernels need contiguous rows; strided columns take the torch path.
        if outputs.stride(1) != 1 or not kernels_run(outputs.device, outputs.dtype):
            return torch_rows
    # Imported only where Triton is installed.
    from megatron_distill.ops.kernels.launch import TritonRows

    return TritonRows(raw, rules, torch_rows)
