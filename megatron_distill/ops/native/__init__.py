"""Row functions in C for what torch's CPU operations would need many passes for.

They stand in for the same formulas in torch, which remain what is used without a C compiler.
"""

from megatron_distill.ops.native.rows import RowFunctions, native_rows

__all__ = ["RowFunctions", "native_rows"]
