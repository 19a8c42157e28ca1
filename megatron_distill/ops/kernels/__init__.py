"""Triton executors of the row sweeps: the same statistics and gradients in one pass each.

Nothing here imports Triton before a kernel is wanted.
"""

from megatron_distill.ops.kernels.available import KernelForm, kernels_run

__all__ = ["KernelForm", "kernels_run"]
