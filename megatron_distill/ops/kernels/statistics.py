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

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _store(pointer, stride, AT: tl.constexpr, value):
    """Store into row AT of the local statistics; none where AT is negative."""
    if AT >= 0:
        tl.store(pointer + AT * stride, value)


# fmt: off
@triton.jit
def _add_logits(
    z, mask, peak, mass, log, rate, MASKED: tl.constexpr, HAS_LOG: tl.constexpr,
):  # fmt: on
    """Each lane's peak, mass and sum of logarithms with one more logit, its exponential, the decay.

    One exponential is enough: of the new logit below the peak, or of the old peak below the logit.
    """
    gap = z - peak
    is_higher = gap > 0
    lower = tl.exp2(-tl.abs(gap) * rate)
    decay = tl.where(is_higher, lower, 1.0)
    e = tl.where(is_higher, 1.0, lower)
    if MASKED:
        e = tl.where(mask, e, 0.0)
    mass *= decay
    if HAS_LOG:
        log = log * decay + tl.where(is_higher, -mass, e) * gap
    return tl.maximum(peak, z), mass + e, log, e, decay


@triton.jit
def _merge_lanes(peak, mass, log, inverse_temperature):
    """Peak, mass and sum of logarithms of all lanes, in fp64, and each lane's decay."""
    highest = tl.max(peak, 0)
    decay = tl.exp((peak - highest) * inverse_temperature).to(tl.float64)
    # A row of -inf has no mass; that of a row of NaN stays NaN.
    decay = tl.where(highest > LOWEST, decay, 0.0)
    log = tl.sum((log + mass * (peak - highest)) * decay, 0)
    return highest, tl.sum(mass * decay, 0), log, decay


# fmt: off
@triton.jit
def _measure_tile(
    first, lanes, width, student_row, teacher_row, rate, of_student, of_teacher, column, gaps,
    STUDENT_SCALE: tl.constexpr, STUDENT_CAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr, TEACHER_CAP: tl.constexpr,
    STUDENT_LOG: tl.constexpr, TEACHER_MASS: tl.constexpr, TEACHER_LOG: tl.constexpr,
    RATIO: tl.constexpr, HAS_TOP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: on
    """The sums of each lane with one more tile."""
    columns = first + lanes
    mask = columns < width
    peak_s, mass_s, log_s = of_student
    peak_t, mass_t, log_t = of_teacher
    z_s = load_logits(student_row + columns, mask, STUDENT_SCALE, STUDENT_CAP, MASKED)
    if HAS_TOP:
        column = tl.where(z_s > peak_s, columns, column)
    peak_s, mass_s, log_s, _, _ = _add_logits(
        z_s, mask, peak_s, mass_s, log_s, rate, MASKED, STUDENT_LOG >= 0
    )
    if TEACHER_MASS >= 0:
        z_t = load_logits(teacher_row + columns, mask, TEACHER_SCALE, TEACHER_CAP, MASKED)
        peak_t, mass_t, log_t, e, decay = _add_logits(
            z_t, mask, peak_t, mass_t, log_t, rate, MASKED, TEACHER_LOG >= 0
        )
        if RATIO >= 0:
            gaps = gaps * decay + e * (z_t - z_s)
    return (peak_s, mass_s, log_s), (peak_t, mass_t, log_t), column, gaps


# fmt: off
@triton.jit
def _near_tile(
    first, lanes, width, student_row, teacher_row, inverse_temperature, shift, peak_t, gap, second,
    STUDENT_SCALE: tl.constexpr, STUDENT_CAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr, TEACHER_CAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: on
    """Each lane's sums of e' - e and of e (h + e'/e - 1) with one more tile.

    Here e are exponentials of the teacher, h log ratios relative to the shift, and e' = e e^-h
    exponentials of the student.
    """
    columns = first + lanes
    mask = columns < width
    z_s = load_logits(student_row + columns, mask, STUDENT_SCALE, STUDENT_CAP, MASKED)
    z_t = load_logits(teacher_row + columns, mask, TEACHER_SCALE, TEACHER_CAP, MASKED)
    h = log_ratio(z_t, z_s, shift, 0.0, inverse_temperature)
    has_series = tl.abs(h) <= 0.5
    excess = exp_excess(-h)
    e = tl.exp((z_t - peak_t) * inverse_temperature)
    far = tl.exp((z_s - peak_t + shift) * inverse_temperature) - e
    if MASKED:
        e = tl.where(mask, e, 0.0)
        far = tl.where(mask, far, 0.0)
    gap += tl.where(has_series, e * (excess - h), far)
    return gap, second + tl.where(has_series, e * excess, e * h + far)


# fmt: off
@triton.jit
def _near_sums(
    width, student_row, teacher_row, inverse_temperature, shift, peak_t,
    STUDENT_SCALE: tl.constexpr, STUDENT_CAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr, TEACHER_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: on
    """The sums of `_near_tile` over a row, in fp64."""
    lanes = tl.arange(0, BLOCK)
    gap = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    whole = width // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        gap, second = _near_tile(
            first, lanes, width, student_row, teacher_row, inverse_temperature, shift, peak_t,
            gap, second, STUDENT_SCALE, STUDENT_CAP, TEACHER_SCALE, TEACHER_CAP, MASKED=False,
        )  # fmt: skip
    if whole < width:
        gap, second = _near_tile(
            whole, lanes, width, student_row, teacher_row, inverse_temperature, shift, peak_t,
            gap, second, STUDENT_SCALE, STUDENT_CAP, TEACHER_SCALE, TEACHER_CAP, MASKED=True,
        )  # fmt: skip
    return tl.sum(gap.to(tl.float64), 0), tl.sum(second.to(tl.float64), 0)


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
    """One program per token. Constants are row numbers in ``local``, -1 for absent statistics.

    Each lane sums over its columns, relative to its own peak: a sum over lanes in every tile would
    make the program wait. For a token near its teacher a second pass over the row computes the
    student's mass and the sum of log ratios. They come from the teacher's mass and sums of second
    order, which are as accurate as the value.
    """
    row = tl.program_id(0)
    student_row = student + row.to(tl.int64) * student_stride
    teacher_row = teacher + row.to(tl.int64) * teacher_stride
    rate = inverse_temperature * _LOG2_E
    lanes, column = tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.int32)
    zeros = tl.zeros([BLOCK], tl.float32)
    of_student = (zeros + LOWEST, zeros, zeros)
    of_teacher, gaps = of_student, zeros
    whole = width // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        of_student, of_teacher, column, gaps = _measure_tile(
            first, lanes, width, student_row, teacher_row, rate, of_student, of_teacher, column,
            gaps, STUDENT_SCALE, STUDENT_CAP, TEACHER_SCALE, TEACHER_CAP,
            STUDENT_LOG, TEACHER_MASS, TEACHER_LOG, RATIO, HAS_TOP, MASKED=False,
        )  # fmt: skip
    if whole < width:
        of_student, of_teacher, column, gaps = _measure_tile(
            whole, lanes, width, student_row, teacher_row, rate, of_student, of_teacher, column,
            gaps, STUDENT_SCALE, STUDENT_CAP, TEACHER_SCALE, TEACHER_CAP,
            STUDENT_LOG, TEACHER_MASS, TEACHER_LOG, RATIO, HAS_TOP, MASKED=True,
        )  # fmt: skip
    peak_s, mass_s, log_s, _ = _merge_lanes(*of_student, inverse_temperature)
    peak_t, mass_t, log_t, decay = _merge_lanes(*of_teacher, inverse_temperature)
    if RATIO >= 0:
        ratio = tl.sum(gaps * decay, 0)
        inverse = tl.full([], 1.0, tl.float64) * inverse_temperature
        # In fp64: of models that differ by a constant, fp32 would round it.
        apart = peak_t.to(tl.float64) - peak_s
        odds = tl.log(mass_t / mass_s)
        if ((ratio / mass_t - apart) * inverse - odds < NEAR_KL) & (mass_s > 0.0):
            shift = (odds / inverse + apart).to(tl.float32)
            near_gap, second = _near_sums(
                width, student_row, teacher_row, inverse_temperature, shift, peak_t,
                STUDENT_SCALE, STUDENT_CAP, TEACHER_SCALE, TEACHER_CAP, BLOCK,
            )  # fmt: skip
            mass_s = (mass_t + near_gap) * tl.exp((apart - shift) * inverse)
            ratio = (second - near_gap) / inverse + shift * mass_t
        _store(local + row, local_stride, RATIO, ratio)
    _store(local + row, local_stride, STUDENT_PEAK, peak_s)
    _store(local + row, local_stride, STUDENT_MASS, mass_s)
    _store(local + row, local_stride, STUDENT_LOG, log_s)
    _store(local + row, local_stride, TEACHER_PEAK, peak_t)
    _store(local + row, local_stride, TEACHER_MASS, mass_t)
    _store(local + row, local_stride, TEACHER_LOG, log_t)
    if HAS_TOP:
        at = tl.min(tl.where(of_student[0] == peak_s, column, width), 0)
        tl.store(top + row, at.to(tl.int64))
        if AT_TOP >= 0:
            at_top = load_logits(teacher_row + at, width > 0, TEACHER_SCALE, TEACHER_CAP, True)
            _store(local + row, local_stride, AT_TOP, at_top)


# fmt: off
@triton.jit
def _slope_tile(
    first, lanes, width, student_row, teacher_row, peak_s, peak_t, factor_s, factor_t,
    top_s, top_t, top_ratio, shift, rounded_off, is_near, reference, parameter, rest,
    inverse_temperature,
    STUDENT_SCALE: tl.constexpr, STUDENT_CAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr, TEACHER_CAP: tl.constexpr,
    FORM: tl.constexpr, NEAR: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: on
    """Each lane's summand of the value and ``q (s - reference)`` in a tile."""
    columns = first + lanes
    mask = columns < width
    z_s = load_logits(student_row + columns, mask, STUDENT_SCALE, STUDENT_CAP, MASKED)
    z_t = load_logits(teacher_row + columns, mask, TEACHER_SCALE, TEACHER_CAP, MASKED)
    q = tl.exp((z_s - peak_s) * inverse_temperature) * factor_s
    p = tl.exp((z_t - peak_t) * inverse_temperature) * factor_t
    relative = ((z_t - top_t) - (z_s - top_s)) * inverse_temperature
    d, excess, gap = compared(
        p, q, z_t, z_s, shift, rounded_off, inverse_temperature, is_near, NEAR
    )
    slope, summand = slope_and_value(
        p, q, d, excess, gap, is_near, relative, top_ratio, parameter, rest, FORM, NEAR
    )
    deviation = (slope - reference) * q
    if MASKED:
        summand = tl.where(mask, summand, 0.0)
        deviation = tl.where(mask, deviation, 0.0)
    return summand, deviation


# fmt: off
@triton.jit
def _slope_tiles(
    width, student_row, teacher_row, peak_s, peak_t, factor_s, factor_t, top_s, top_t,
    top_ratio, shift, rounded_off, is_near, reference, parameter, rest, inverse_temperature,
    STUDENT_SCALE: tl.constexpr, STUDENT_CAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr, TEACHER_CAP: tl.constexpr,
    FORM: tl.constexpr, NEAR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: on
    """Value and ``sum q (s - reference)`` of a row, in fp64."""
    lanes = tl.arange(0, BLOCK)
    value = tl.zeros([BLOCK], tl.float32)
    average = tl.zeros([BLOCK], tl.float32)
    whole = width // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        summand, deviation = _slope_tile(
            first, lanes, width, student_row, teacher_row, peak_s, peak_t, factor_s, factor_t,
            top_s, top_t, top_ratio, shift, rounded_off, is_near, reference, parameter, rest,
            inverse_temperature, STUDENT_SCALE, STUDENT_CAP, TEACHER_SCALE, TEACHER_CAP, FORM,
            NEAR, MASKED=False,
        )  # fmt: skip
        value += summand
        average += deviation
    if whole < width:
        summand, deviation = _slope_tile(
            whole, lanes, width, student_row, teacher_row, peak_s, peak_t, factor_s, factor_t,
            top_s, top_t, top_ratio, shift, rounded_off, is_near, reference, parameter, rest,
            inverse_temperature, STUDENT_SCALE, STUDENT_CAP, TEACHER_SCALE, TEACHER_CAP, FORM,
            NEAR, MASKED=True,
        )  # fmt: skip
        value += summand
        average += deviation
    return tl.sum(value.to(tl.float64), 0), tl.sum(average.to(tl.float64), 0)


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
    own_s = load_logits(student_row + column, width > 0, STUDENT_SCALE, STUDENT_CAP, True)
    own_t = load_logits(teacher_row + column, width > 0, TEACHER_SCALE, TEACHER_CAP, True)
    own_q = tl.exp((own_s - peak_s) * inverse_temperature) * factor_s
    own_p = tl.exp((own_t - peak_t) * inverse_temperature) * factor_t
    own_ratio = ((own_t - top_t) - (own_s - top_s)) * inverse_temperature
    own_d, own_excess, own_gap = compared(
        own_p, own_q, own_t, own_s, shift, rounded_off, inverse_temperature, is_near, NEAR=True
    )
    reference, _ = slope_and_value(
        own_p, own_q, own_d, own_excess, own_gap, is_near, own_ratio, top_ratio, parameter, rest,
        FORM, NEAR=True,
    )  # fmt: skip
    if is_near > 0.0:
        value, average = _slope_tiles(
            width, student_row, teacher_row, peak_s, peak_t, factor_s, factor_t, top_s, top_t,
            top_ratio, shift, rounded_off, is_near, reference, parameter, rest,
            inverse_temperature, STUDENT_SCALE, STUDENT_CAP, TEACHER_SCALE, TEACHER_CAP, FORM,
            True, BLOCK,
        )  # fmt: skip
    else:
        value, average = _slope_tiles(
            width, student_row, teacher_row, peak_s, peak_t, factor_s, factor_t, top_s, top_t,
            top_ratio, shift, rounded_off, is_near, reference, parameter, rest,
            inverse_temperature, STUDENT_SCALE, STUDENT_CAP, TEACHER_SCALE, TEACHER_CAP, FORM,
            False, BLOCK,
        )  # fmt: skip
    tl.store(sums + row, value)
    tl.store(sums + rows + row, average)
    tl.store(sums + 2 * rows + row, reference)
