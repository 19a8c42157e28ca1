"""Row statistics of one temperature in one pass, and sums of slopes in a second."""

import triton
import triton.language as tl

from megatron_distill.ops.kernels.elementwise import (
    LOWEST,
    compared,
    exp_excess,
    load_logits,
    log_ratio,
    slope_and_value,
)

__all__ = ["measure_rows", "sum_slopes"]


@triton.jit
def _store(pointer, stride, AT: tl.constexpr, value):
    """Store into row AT of the local statistics; none where AT is negative."""
    if AT >= 0:
        tl.store(pointer + AT * stride, value)


@triton.jit
def _add_tile(z, mask, peak, mass, log, inverse_temperature):
    """Peak, mass and sum of logarithms with one more tile, its exponentials, and the decay."""
    raised = tl.maximum(peak, tl.max(z, 0))
    gap = z - raised
    decay = tl.exp((peak - raised) * inverse_temperature).to(tl.float64)
    e = tl.where(mask, tl.exp(gap * inverse_temperature), 0.0)
    log = (log + mass * (peak - raised)) * decay + tl.sum(e * gap, 0)
    return raised, mass * decay + tl.sum(e, 0), log, e, decay


@triton.jit
def _near_tile(z_t, z_s, e, decay, shift, peak_t, gap, second, inverse_temperature):
    """Sums of e' - e and of e (h + e'/e - 1) with one more tile.

    Here e are exponentials of the teacher, h log ratios relative to the shift, and e' = e e^-h
    exponentials of the student.
    """
    h = log_ratio(z_t, z_s, shift, 0.0, inverse_temperature)
    has_series = tl.abs(h) <= 0.5
    excess = exp_excess(-h)
    far = tl.exp((z_s - peak_t + shift) * inverse_temperature) - e
    gap = gap * decay + tl.sum(tl.where(has_series, e * (excess - h), far), 0)
    return gap, second * decay + tl.sum(tl.where(has_series, e * excess, e * h + far), 0)


@triton.jit
def _settled(
    mass_s, mass_t, gaps, apart, shift, near_gap, second, inverse_temperature, NEAR_KL: tl.constexpr
):
    """The student's mass and the sum of log ratios.

    For similar models both come from the teacher's mass and sums of second order, which are as
    accurate as the value.
    """
    inverse = tl.full([], 1.0, tl.float64) * inverse_temperature
    apart = apart.to(tl.float64)
    is_near = (gaps / mass_t - apart) * inverse - tl.log(mass_t / mass_s) < NEAR_KL
    mass = (mass_t + near_gap) * tl.exp((apart - shift) * inverse)
    total = (second - near_gap) / inverse + shift * mass_t
    return tl.where(is_near, mass, mass_s), tl.where(is_near, total, gaps)


# fmt: off
@triton.jit
def measure_rows(
    student, teacher, student_stride, teacher_stride, width, local, local_stride, top,
    inverse_temperature,
    STUDENT_SCALE: tl.constexpr, STUDENT_CAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr, TEACHER_CAP: tl.constexpr,
    STUDENT_PEAK: tl.constexpr, STUDENT_MASS: tl.constexpr, STUDENT_LOG: tl.constexpr,
    TEACHER_PEAK: tl.constexpr, TEACHER_MASS: tl.constexpr, TEACHER_LOG: tl.constexpr,
    RATIO: tl.constexpr, AT_TOP: tl.constexpr, HAS_TOP: tl.constexpr, BLOCK: tl.constexpr,
    NEAR_KL: tl.constexpr,
):  # fmt: on
    """One program per token. Constants are row numbers in ``local``, -1 for absent statistics."""
    row = tl.program_id(0)
    student_row = student + row.to(tl.int64) * student_stride
    teacher_row = teacher + row.to(tl.int64) * teacher_stride
    peak_s = tl.full([], LOWEST, tl.float32)
    peak_t = tl.full([], LOWEST, tl.float32)
    best = tl.full([], -float("inf"), tl.float32)
    column = tl.full([], 0, tl.int32)
    shift = tl.full([], 0.0, tl.float32)
    # Scalars per token, in fp64 so that adding a tile does not round.
    zero = tl.full([], 0.0, tl.float64)
    mass_s, mass_t, log_s, log_t = zero, zero, zero, zero
    gaps, near_gap, second = zero, zero, zero
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < width
        z_s = load_logits(student_row + columns, mask, STUDENT_SCALE, STUDENT_CAP)
        if HAS_TOP:
            highest, where = tl.max(z_s, 0, return_indices=True)
            column = tl.where(highest > best, first + where, column)
            best = tl.maximum(best, highest)
        peak_s, mass_s, log_s, _, _ = _add_tile(
            z_s, mask, peak_s, mass_s, log_s, inverse_temperature
        )
        if TEACHER_MASS >= 0:
            z_t = load_logits(teacher_row + columns, mask, TEACHER_SCALE, TEACHER_CAP)
            peak_t, mass_t, log_t, e, decay = _add_tile(
                z_t, mask, peak_t, mass_t, log_t, inverse_temperature
            )
            if RATIO >= 0:
                gaps = gaps * decay + tl.sum(e * (z_t - z_s), 0)
                # The first tile's estimate of the log normalisers' difference; any is correct.
                odds = tl.log((mass_t / mass_s).to(tl.float32)) / inverse_temperature
                shift = tl.where(first == 0, odds + (peak_t - peak_s), shift)
                near_gap, second = _near_tile(z_t, z_s, e, decay, shift, peak_t, near_gap, second,
                                              inverse_temperature)  # fmt: skip
    if RATIO >= 0:
        mass_s, gaps = _settled(mass_s, mass_t, gaps, peak_t - peak_s, shift, near_gap, second,
                                inverse_temperature, NEAR_KL)  # fmt: skip
    _store(local + row, local_stride, STUDENT_PEAK, peak_s)
    _store(local + row, local_stride, STUDENT_MASS, mass_s)
    _store(local + row, local_stride, STUDENT_LOG, log_s)
    _store(local + row, local_stride, TEACHER_PEAK, peak_t)
    _store(local + row, local_stride, TEACHER_MASS, mass_t)
    _store(local + row, local_stride, TEACHER_LOG, log_t)
    _store(local + row, local_stride, RATIO, gaps)
    if HAS_TOP:
        tl.store(top + row, column.to(tl.int64))
    if AT_TOP >= 0:
        at_top = load_logits(teacher_row + column, width > 0, TEACHER_SCALE, TEACHER_CAP)
        _store(local + row, local_stride, AT_TOP, at_top)


# fmt: off
@triton.jit
def sum_slopes(
    student, teacher, student_stride, teacher_stride, rows, width, student_peak, teacher_peak,
    known, top, sums, parameter, rest, inverse_temperature,
    STUDENT_SCALE: tl.constexpr, STUDENT_CAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr, TEACHER_CAP: tl.constexpr,
    FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: on
    """Value, slope average and reference of a divergence; one program per token.

    Writes to ``sums [3, N]`` the value, ``sum q (s - reference)``, and the reference, the slope at
    this shard's top column. ``known [8, N]`` is one `_TemperatureRow` of the launch.
    """
    row = tl.program_id(0)
    student_row = student + row.to(tl.int64) * student_stride
    teacher_row = teacher + row.to(tl.int64) * teacher_stride
    peak_s, peak_t = tl.load(student_peak + row), tl.load(teacher_peak + row)
    factor_s, factor_t = tl.load(known + row), tl.load(known + rows + row)
    top_s, top_t = tl.load(known + 2 * rows + row), tl.load(known + 3 * rows + row)
    top_ratio = tl.load(known + 4 * rows + row)
    shift, rounded_off = tl.load(known + 5 * rows + row), tl.load(known + 6 * rows + row)
    is_near = tl.load(known + 7 * rows + row)
    column = tl.load(top + row)
    own_s = load_logits(student_row + column, width > 0, STUDENT_SCALE, STUDENT_CAP)
    own_t = load_logits(teacher_row + column, width > 0, TEACHER_SCALE, TEACHER_CAP)
    own_q = tl.exp((own_s - peak_s) * inverse_temperature) * factor_s
    own_p = tl.exp((own_t - peak_t) * inverse_temperature) * factor_t
    own_ratio = ((own_t - top_t) - (own_s - top_s)) * inverse_temperature
    own_d, own_excess, own_gap = compared(
        own_p, own_q, own_t, own_s, shift, rounded_off, inverse_temperature, is_near
    )
    reference, _ = slope_and_value(
        own_p, own_q, own_d, own_excess, own_gap, is_near, own_ratio, top_ratio, parameter, rest,
        FORM,
    )  # fmt: skip
    value = tl.full([], 0.0, tl.float64)
    average = tl.full([], 0.0, tl.float64)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < width
        z_s = load_logits(student_row + columns, mask, STUDENT_SCALE, STUDENT_CAP)
        z_t = load_logits(teacher_row + columns, mask, TEACHER_SCALE, TEACHER_CAP)
        q = tl.exp((z_s - peak_s) * inverse_temperature) * factor_s
        p = tl.exp((z_t - peak_t) * inverse_temperature) * factor_t
        relative = ((z_t - top_t) - (z_s - top_s)) * inverse_temperature
        d, excess, gap = compared(
            p, q, z_t, z_s, shift, rounded_off, inverse_temperature, is_near
        )
        slope, summand = slope_and_value(
            p, q, d, excess, gap, is_near, relative, top_ratio, parameter, rest, FORM
        )
        value += tl.sum(tl.where(mask, summand, 0.0), 0)
        average += tl.sum(tl.where(mask, (slope - reference) * q, 0.0), 0)
    tl.store(sums + row, value)
    tl.store(sums + rows + row, average)
    tl.store(sums + 2 * rows + row, reference)
