"""The row kernels on the tensors of a chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.divergences import Model, WeightedDivergence
from megatron_distill.ops.kernels.elementwise import FORMS
from megatron_distill.ops.kernels.gradient import push_rows
from megatron_distill.ops.kernels.measure import Tiling, launch, measure, power_of_two
from megatron_distill.ops.kernels.statistics import sum_slopes
from megatron_distill.ops.normalizers import Normalizers
from megatron_distill.ops.softmax_gradient import SoftmaxWeights
from megatron_distill.ops.statistics import LocalStatistics
from megatron_distill.ops.torch_rows import TorchRows
from megatron_distill.signals import LogitRule

__all__ = ["GRADIENT_TILING", "TritonRows"]


# See `STATISTICS_TILING`: the gradient of forward KL takes 48 registers a thread.
GRADIENT_TILING = Tiling(1024, 8)
_MOST_TEMPERATURES = 16


@dataclass(frozen=True)
class TritonRows:
    """`RowExecutor` on Triton kernels: raw outputs ``[N, V]`` with V > 0, one program per token.

    ``torch_rows`` computes blends, and gradients without a kernel.
    """

    raw: Mapping[Model, Tensor]
    rules: Mapping[Model, LogitRule]
    torch_rows: TorchRows

    @property
    def all_passes(self) -> None:
        """None: a kernel reads the logits of all tokens before the next one begins."""
        return None

    def blends(
        self,
        local: LocalStatistics,
        normalizers: Normalizers,
        group: dist.ProcessGroup | None,
        shared_class: Tensor | None,
    ) -> dict[str, Tensor]:
        """See `RowExecutor`. In torch: `head_share` has no kernel."""
        return self.torch_rows.blends(local, normalizers, group, shared_class)

    def measure(self, local: LocalStatistics) -> None:
        """See `RowExecutor`: one pass per temperature."""
        measure(local, self.raw, self.rules)

    def sum_slopes(self, local: LocalStatistics, normalizers: Normalizers) -> Tensor:
        """See `RowExecutor`."""
        found = []
        for term in local.spec.nonlinear:
            at = _TemperatureRow.of(local, normalizers, term.temperature)
            value, average, reference = self._sums_of(local, term, at).unbind()
            top_ratio = normalizers.top_ratios[term.temperature].squeeze(1)
            whole = local.made_whole(value, term, top_ratio, at.student_factor)
            # The sums of tokens near their teacher do not contain the top ratio.
            found += [torch.where(at.is_near > 0, value, whole), average, reference]
        return torch.stack(found)

    def _sums_of(
        self, local: LocalStatistics, term: WeightedDivergence, known: _TemperatureRow
    ) -> Tensor:
        """``[3, N]`` fp64 of a term; the value lacks the rounding error of the top ratio."""
        form = term.divergence.kernel
        assert form is not None
        student, teacher, statistics = self._student, self._teacher, local.rows
        sums = torch.empty_like(local.values[:1]).expand(3, -1).clone()
        self._launch(
            sum_slopes,
            student,
            teacher,
            student.stride(0),
            teacher.stride(0),
            *student.shape,
            statistics["student_peak"].float(),
            statistics["teacher_peak"].float(),
            torch.stack(known),
            local.top,
            sums,
            *form.parameters,
            1 / term.temperature,
            FORM=FORMS[form.name],
        )
        return sums

    def write_gradient(
        self,
        local: LocalStatistics,
        normalizers: Normalizers,
        weights: Sequence[SoftmaxWeights],
        out: Tensor,
    ) -> None:
        """See `RowExecutor`."""
        few = len(weights) <= _MOST_TEMPERATURES
        # The kernel handles one tail of a top-k.
        if not weights or not few or sum(len(softmax.tail_weights) for softmax in weights) > 1:
            self.torch_rows.write_gradient(local, normalizers, weights, out)
            return
        known = [_TemperatureRow.of(local, normalizers, one.temperature) for one in weights]
        student, teacher, statistics = self._student, self._teacher, local.rows
        slopes = _Slopes.of(weights)
        scatter = _Scatter.of(weights, student.device)
        numbers = [
            number
            for at, softmax in zip(known, weights, strict=True)
            for number in (*at, *_weights(softmax))
        ]
        self._launch(
            push_rows,
            out,
            out.stride(0),
            student,
            teacher,
            student.stride(0),
            teacher.stride(0),
            *student.shape,
            statistics["student_peak"].float(),
            statistics.get("teacher_peak", statistics["student_peak"]).float(),
            torch.stack(numbers),
            torch.stack(slopes.rows or numbers[:1]),
            _constants([*(1 / one.temperature for one in weights), *slopes.parameters], local),
            scatter.columns,
            scatter.values,
            scatter.topk_mask,
            scatter.columns.shape[1],
            TEMPERATURES=len(weights),
            HAS_TEACHER="teacher" in self.raw,
            HAS_TAIL=any(softmax.tail_weights for softmax in weights),
            NONLINEAR=len(slopes.parameters) // 2,
            FORMS=slopes.forms,
            HAS_SCATTER=scatter.columns.shape[1] > 0,
            SCATTER_BLOCK=power_of_two(max(scatter.columns.shape[1], 1)),
        )

    def _launch(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        launch(kernel, GRADIENT_TILING, self.raw, self.rules, *arguments, **constants)

    @property
    def _student(self) -> Tensor:
        return self.raw["student"]

    @property
    def _teacher(self) -> Tensor:
        return self.raw.get("teacher", self.raw["student"])


class _TemperatureRow(NamedTuple):
    """Statistics ``[N]`` of each token at one temperature; zeros where they are not needed.

    See `Normalizers`.
    """

    student_factor: Tensor
    teacher_factor: Tensor
    student_top: Tensor
    teacher_top: Tensor
    top_ratio: Tensor
    shift: Tensor
    shift_rounded_off: Tensor
    is_near: Tensor

    @classmethod
    def of(
        cls, local: LocalStatistics, normalizers: Normalizers, temperature: float
    ) -> _TemperatureRow:
        """The statistics at a temperature, in the dtype of the logits."""
        nothing = local.values.new_zeros(local.values.shape[1], 1, dtype=local.dtype)
        models: tuple[Model, Model] = ("student", "teacher")
        factors = normalizers.factors.unsqueeze(2)
        by_softmax = dict(zip(local.spec.softmaxes, factors, strict=True))
        of_models = (by_softmax.get((model, temperature), nothing) for model in models)
        tops = (normalizers.top.get(model, nothing) for model in models)
        ratio = normalizers.top_ratios.get(temperature, nothing)
        shift = normalizers.shifts.get(temperature, nothing.double())
        high = shift.to(local.dtype)
        near = normalizers.near.get(temperature, nothing)
        known = (*of_models, *tops, ratio, high, shift - high, near)
        return cls(*(one.to(local.dtype).squeeze(1) for one in known))


def _weights(softmax: SoftmaxWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Weights ``[N]`` of the student's probabilities, of ``q - p``, and of the top-k tails.

    The first is without the second.
    """
    student = softmax.student
    if softmax.teacher is not None:
        # Before the averages are subtracted: they may be small enough to be rounded off.
        student = student - softmax.teacher
    for one in softmax.nonlinear:
        assert one.average is not None
        student = student - torch.where(one.weight == 0, 0.0, one.weight * one.average)
    nothing = torch.zeros_like(student)
    teacher = nothing if softmax.teacher is None else softmax.teacher
    tail = softmax.tail_weights[0].weight if softmax.tail_weights else nothing
    return student.squeeze(1), teacher.squeeze(1), tail.squeeze(1)


@dataclass(frozen=True)
class _Slopes:
    """The terms with slopes: weight and reference ``[N]`` of each in turn.

    ``forms`` has eight bits per term for temperature and form, ``parameters`` two numbers per term.
    """

    rows: list[Tensor]
    forms: int
    parameters: list[float]

    @classmethod
    def of(cls, weights: Sequence[SoftmaxWeights]) -> _Slopes:
        rows: list[Tensor] = []
        parameters: list[float] = []
        forms = 0
        for number, softmax in enumerate(weights):
            for one in softmax.nonlinear:
                form = one.term.divergence.kernel
                assert form is not None
                assert one.reference is not None
                rows += [one.weight.squeeze(1), one.reference.squeeze(1)]
                place = len(parameters) // 2
                forms |= (number << 4 | FORMS[form.name]) << 8 * place
                parameters += form.parameters
        return cls(rows, forms, parameters)


@dataclass(frozen=True)
class _Scatter:
    """The scatter of all temperatures: columns, added gradients, and which the tail excludes."""

    columns: Tensor
    values: Tensor
    topk_mask: Tensor

    @classmethod
    def of(cls, weights: Sequence[SoftmaxWeights], device: torch.device) -> _Scatter:
        columns, values, topk_mask = [], [], []
        for softmax in weights:
            for at, added in softmax.scatter:
                columns.append(at)
                values.append(added)
                topk_mask.append(torch.zeros_like(at, dtype=torch.bool))
            for tail in softmax.tail_weights:
                columns.append(tail.columns)
                values.append(torch.zeros_like(tail.columns, dtype=torch.float32))
                topk_mask.append(tail.topk_mask)
        if not columns:
            none = torch.zeros(1, 0, dtype=torch.int64, device=device)
            return cls(none, none.float(), none.bool())
        return cls(torch.cat(columns, 1), torch.cat(values, 1).float(), torch.cat(topk_mask, 1))


def _constants(values: Sequence[float], local: LocalStatistics) -> Tensor:
    """A vector of these numbers, filled on the device: a copy from the host might synchronise."""
    return torch.cat([local.values.new_full((1,), one, dtype=torch.float32) for one in values])
