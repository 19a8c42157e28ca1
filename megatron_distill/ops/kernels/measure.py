"""Launches of the row kernels, and that of the statistics of a chunk."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_distill.ops.divergences import Model
from megatron_distill.ops.kernels.statistics import measure_rows
from megatron_distill.ops.statistics import NEAR_KL, LocalStatistics
from megatron_distill.signals import LogitRule

__all__ = ["STATISTICS_TILING", "Tiling", "launch", "measure", "power_of_two"]


@dataclass(frozen=True)
class Tiling:
    """Columns per tile of a row, and warps of its program."""

    block: int
    warps: int

    @property
    def options(self) -> dict[str, Any]:
        """Options of the compiler."""
        # Without fp fusion: a fused product is not rounded, and equal models would differ.
        return {"num_warps": self.warps, "enable_fp_fusion": False}


# Few registers per row allow many rows in flight: compiled for sm_90, statistics of forward KL take
# 72 a thread.
STATISTICS_TILING = Tiling(1024, 4)


def measure(
    local: LocalStatistics, raw: Mapping[Model, Tensor], rules: Mapping[Model, LogitRule]
) -> None:
    """Fill the local statistics of raw outputs ``[N, V]``, except the label logits.

    One pass per temperature, and a second one over the tokens near their teacher.
    """
    spec, names = local.spec, local.spec.names
    student = raw["student"]
    teacher = raw.get("teacher", student)
    top = local.top
    for number, temperature in enumerate(dict.fromkeys(value for _, value in spec.softmaxes)):
        wanted = {
            "STUDENT_PEAK": "student_peak",
            "STUDENT_MASS": f"student_mass@{temperature}",
            "TEACHER_PEAK": "teacher_peak",
            "TEACHER_MASS": f"teacher_mass@{temperature}",
            "RATIO": f"ratio@{temperature}",
        }
        if temperature == 1.0:
            wanted |= {"STUDENT_LOG": "student_log", "TEACHER_LOG": "teacher_log"}
        if number == 0:
            wanted |= {"AT_TOP": "teacher_at_top"}
        at = dict.fromkeys(("STUDENT_LOG", "TEACHER_LOG", "AT_TOP"), -1)
        at |= {key: names.index(name) if name in names else -1 for key, name in wanted.items()}
        if at["TEACHER_MASS"] < 0:
            at["TEACHER_PEAK"] = -1
        if top is None:
            top = student.new_empty(len(student) if at["AT_TOP"] >= 0 else 0, dtype=torch.int64)
        launch(
            measure_rows,
            STATISTICS_TILING,
            raw,
            rules,
            student,
            teacher,
            student.stride(0),
            teacher.stride(0),
            student.shape[1],
            local.values,
            local.values.stride(0),
            top,
            1 / temperature,
            **at,
            HAS_TOP=number == 0 and top.numel() > 0,
            NEAR_KL=NEAR_KL,
        )


def launch(
    kernel: Any,
    tiling: Tiling,
    raw: Mapping[Model, Tensor],
    rules: Mapping[Model, LogitRule],
    *arguments: Any,
    **constants: Any,
) -> None:
    """One program per token, on the device of the logits, also if another device is current."""
    outputs = raw["student"]
    constants["BLOCK"] = min(tiling.block, power_of_two(outputs.shape[1]))
    student = rules["student"]
    for name, rule in (("STUDENT", student), ("TEACHER", rules.get("teacher", student))):
        constants[f"{name}_SCALE"] = float(rule.scale)
        constants[f"{name}_CAP"] = float(rule.softcap or 0.0)
    on_cuda = outputs.device.type == "cuda"
    with torch.cuda.device(outputs.device) if on_cuda else nullcontext():
        kernel[(len(outputs),)](*arguments, **constants, **tiling.options)


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below the count."""
    return 1 << max(count - 1, 0).bit_length()
