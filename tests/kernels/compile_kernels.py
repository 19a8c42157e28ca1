"""Compile every kernel for GPUs that are not here, as far as machine code; prints the PTX' words.

python -m tests.kernels.compile_kernels    # as JSON: kernel, dtype, architecture, instructions
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_distill.ops.kernels.elementwise import FORMS
from megatron_distill.ops.kernels.gradient import push_rows
from megatron_distill.ops.kernels.launch import GRADIENT_TILING
from megatron_distill.ops.kernels.measure import STATISTICS_TILING
from megatron_distill.ops.kernels.statistics import measure_rows, sum_slopes

_INTEGERS = ("top", "scatter_columns")
_STATISTICS = ("local", "sums")
_STRIDES = ("student_stride", "teacher_stride", "out_stride", "local_stride")
_SCALARS = {
    **dict.fromkeys((*_STRIDES, "rows", "width", "entries"), "i32"),
    **dict.fromkeys(("inverse_temperature", "parameter", "rest"), "fp32"),
}
_RULES = {"STUDENT_SCALE": 0.5, "STUDENT_CAP": 30.0, "TEACHER_SCALE": 1.0, "TEACHER_CAP": 0.0}
_NAMES = ("STUDENT_PEAK", "STUDENT_MASS", "STUDENT_LOG", "TEACHER_PEAK", "TEACHER_MASS")
_NAMES += ("TEACHER_LOG", "RATIO", "AT_TOP")
_ROWS = {name: row for row, name in enumerate(_NAMES)}
_ALL_FORMS = sum((form << 8 * place) for place, form in enumerate(FORMS.values()))

CASES: list[tuple[str, Any, dict[str, Any]]] = [
    (
        "measure_rows",
        measure_rows,
        {
            **_RULES,
            **_ROWS,
            "HAS_TOP": True,
            "BLOCK": STATISTICS_TILING.block,
            "NEAR_KL": 0.0625,
        },
    ),
    *(
        (f"sum_slopes {name}", sum_slopes, {**_RULES, "FORM": form, "BLOCK": GRADIENT_TILING.block})
        for name, form in FORMS.items()
    ),
    (
        "push_rows",
        push_rows,
        {
            **_RULES,
            "TEMPERATURES": 2,
            "HAS_TEACHER": True,
            "HAS_TAIL": True,
            "NONLINEAR": len(FORMS),
            "FORMS": _ALL_FORMS,
            "HAS_SCATTER": True,
            "BLOCK": GRADIENT_TILING.block,
            "SCATTER_BLOCK": 128,
        },
    ),
]


def signature(kernel: Any, constants: dict[str, Any], logits: str) -> dict[str, str]:
    """Types of the arguments as the executor passes them."""
    types = {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name in _SCALARS:
            types[name] = _SCALARS[name]
        elif name in ("student", "teacher", "out"):
            types[name] = f"*{logits}"
        elif name == "scatter_topk_mask":
            types[name] = "*i1"
        else:
            types[name] = "*i64" if name in _INTEGERS else "*fp32"
            if name in _STATISTICS:
                types[name] = "*fp64"
    return types


def main() -> None:
    found = []
    for architecture in map(int, sys.argv[1:]):
        target = GPUTarget("cuda", architecture, 32)
        for logits in ("fp32", "bf16"):
            for name, kernel, constants in CASES:
                source = ASTSource(kernel, signature(kernel, constants, logits), constants)
                tiling = STATISTICS_TILING if kernel is measure_rows else GRADIENT_TILING
                compiled = triton.compile(source, target=target, options=tiling.options)
                words = Counter(
                    line.split()[0].removeprefix("@")
                    for line in compiled.asm["ptx"].splitlines()
                    if line.startswith("\t") and line.split()
                )
                found.append(
                    {
                        "kernel": name,
                        "logits": logits,
                        "architecture": architecture,
                        "bytes": len(compiled.asm["cubin"]),
                        "instructions": dict(words),
                    }
                )
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
