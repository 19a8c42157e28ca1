"""Triton executors of the row passes: the same statistics and gradients in one pass each.

Triton is imported only when a kernel is used.
"""

from megatron_distill.ops.kernels.available import KernelForm, kernels_run

__all__ = ["KernelForm", "kernels_run"]
