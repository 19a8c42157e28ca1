"""The gradient on the student's raw outputs, of all terms at all temperatures, in one pass."""

import triton
import triton.language as tl

from megatron_distill.ops.kernels.elementwise import (
    compared,
    load_logits,
    scaled,
    slope_and_value,
    through_cap,
)

__all__ = ["KNOWN", "push_rows"]

# Numbers per token and temperature: the fields of `_TemperatureRow`, and three weights.
KNOWN = 11
_KNOWN: tl.constexpr = tl.constexpr(KNOWN)


# fmt: off
@triton.jit
def _gradient(
    z_s, z_t, row, rows, in_top_k, peak_s, peak_t, known, slopes, constants,
    TEMPERATURES: tl.constexpr, HAS_TEACHER: tl.constexpr, HAS_TAIL: tl.constexpr,
    NONLINEAR: tl.constexpr, FORMS: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: on
    """Gradient of all softmaxes of a token on logits ``z_s`` of any shape."""
    total = tl.zeros_like(z_s)
    for t in tl.static_range(TEMPERATURES):
        at = known + t * _KNOWN * rows + row
        inverse = tl.load(constants + t)
        q = tl.exp((z_s - peak_s) * inverse) * tl.load(at)
        rest_s = tl.load(at + 8 * rows)
        if HAS_TEACHER:
            p = tl.exp((z_t - peak_t) * inverse) * tl.load(at + rows)
            weight_t = tl.load(at + 9 * rows)
            shift, rounded_off = tl.load(at + 5 * rows), tl.load(at + 6 * rows)
            is_near = tl.load(at + 7 * rows)
            d, excess, gap = compared(p, q, z_t, z_s, shift, rounded_off, inverse, is_near, NEAR)
            # For equal models the gap is exactly zero.
            total += scaled(rest_s, q) - scaled(weight_t, gap)
            for c in tl.static_range(NONLINEAR):
                # Eight bits per term: four for its temperature, four for its form.
                if (FORMS >> (8 * c + 4)) % 16 == t:
                    top_s, top_t = tl.load(at + 2 * rows), tl.load(at + 3 * rows)
                    log_ratio = ((z_t - top_t) - (z_s - top_s)) * inverse
                    top_ratio = tl.load(at + 4 * rows)
                    parameter = tl.load(constants + TEMPERATURES + 2 * c)
                    rest = tl.load(constants + TEMPERATURES + 2 * c + 1)
                    slope, _ = slope_and_value(
                        p, q, d, excess, gap, is_near, log_ratio, top_ratio, parameter, rest,
                        (FORMS >> (8 * c)) % 16, NEAR,
                    )  # fmt: skip
                    weight = tl.load(slopes + 2 * c * rows + row)
                    reference = tl.load(slopes + (2 * c + 1) * rows + row)
                    total += scaled(weight, (slope - reference) * q)
        else:
            total += scaled(rest_s, q)
        if HAS_TAIL:
            total += tl.where(in_top_k, 0.0, scaled(tl.load(at + 10 * rows), q))
    return total


@triton.jit
def _is_near(known, row, rows, TEMPERATURES: tl.constexpr):
    """Whether a token is near its teacher at one of the temperatures."""
    near = 0.0
    for t in tl.static_range(TEMPERATURES):
        near += tl.load(known + (t * _KNOWN + 7) * rows + row)
    return near > 0.0


# fmt: off
@triton.jit
def _push_tile(
    columns, width, out_row, student_row, teacher_row, row, rows, peak_s, peak_t,
    known, slopes, constants,
    STUDENT_SCALE: tl.constexpr, STUDENT_CAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr, TEACHER_CAP: tl.constexpr,
    TEMPERATURES: tl.constexpr, HAS_TEACHER: tl.constexpr, HAS_TAIL: tl.constexpr,
    NONLINEAR: tl.constexpr, FORMS: tl.constexpr, NEAR: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: on
    """Write the gradient on the raw outputs of a tile."""
    mask = columns < width
    z_s = load_logits(student_row + columns, mask, STUDENT_SCALE, STUDENT_CAP, MASKED)
    z_t = z_s
    if HAS_TEACHER:
        z_t = load_logits(teacher_row + columns, mask, TEACHER_SCALE, TEACHER_CAP, MASKED)
    total = _gradient(
        z_s, z_t, row, rows, columns < 0, peak_s, peak_t, known, slopes, constants,
        TEMPERATURES, HAS_TEACHER, HAS_TAIL, NONLINEAR, FORMS, NEAR,
    )  # fmt: skip
    total = through_cap(total, z_s, STUDENT_SCALE, STUDENT_CAP).to(out_row.dtype.element_ty)
    if MASKED:
        tl.store(out_row + columns, total, mask=mask)
    else:
        tl.store(out_row + columns, total)


# fmt: off
@triton.jit
def _push_tiles(
    width, out_row, student_row, teacher_row, row, rows, peak_s, peak_t, known, slopes, constants,
    STUDENT_SCALE: tl.constexpr, STUDENT_CAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr, TEACHER_CAP: tl.constexpr,
    TEMPERATURES: tl.constexpr, HAS_TEACHER: tl.constexpr, HAS_TAIL: tl.constexpr,
    NONLINEAR: tl.constexpr, FORMS: tl.constexpr, NEAR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: on
    """Write the gradient on the raw outputs of a row, without the scattered values."""
    lanes = tl.arange(0, BLOCK)
    whole = width // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        _push_tile(
            first + lanes, width, out_row, student_row, teacher_row, row, rows, peak_s, peak_t,
            known, slopes, constants, STUDENT_SCALE, STUDENT_CAP, TEACHER_SCALE, TEACHER_CAP,
            TEMPERATURES, HAS_TEACHER, HAS_TAIL, NONLINEAR, FORMS, NEAR, MASKED=False,
        )  # fmt: skip
    if whole < width:
        _push_tile(
            whole + lanes, width, out_row, student_row, teacher_row, row, rows, peak_s, peak_t,
            known, slopes, constants, STUDENT_SCALE, STUDENT_CAP, TEACHER_SCALE, TEACHER_CAP,
            TEMPERATURES, HAS_TEACHER, HAS_TAIL, NONLINEAR, FORMS, NEAR, MASKED=True,
        )  # fmt: skip


# fmt: off
@triton.jit
def push_rows(
    out, out_stride, student, teacher, student_stride, teacher_stride, rows, width,
    student_peak, teacher_peak, known, slopes, constants,
    scatter_columns, scatter_values, scatter_topk_mask, entries,
    STUDENT_SCALE: tl.constexpr, STUDENT_CAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr, TEACHER_CAP: tl.constexpr,
    TEMPERATURES: tl.constexpr, HAS_TEACHER: tl.constexpr, HAS_TAIL: tl.constexpr,
    NONLINEAR: tl.constexpr, FORMS: tl.constexpr, HAS_SCATTER: tl.constexpr,
    BLOCK: tl.constexpr, SCATTER_BLOCK: tl.constexpr,
):  # fmt: on
    """One program per token. ``out`` may alias the student's raw outputs.

    Scattered values are added before the sum is rounded to the dtype of ``out``. Their columns are
    computed first and written last, without a second pass over the row.
    """
    row = tl.program_id(0)
    out_row = out + row.to(tl.int64) * out_stride
    student_row = student + row.to(tl.int64) * student_stride
    teacher_row = teacher + row.to(tl.int64) * teacher_stride
    peak_s, peak_t = tl.load(student_peak + row), tl.load(teacher_peak + row)
    if HAS_SCATTER:
        each = tl.arange(0, SCATTER_BLOCK)
        is_entry = each < entries
        first_entry = row.to(tl.int64) * entries
        at_columns = tl.load(scatter_columns + first_entry + each, mask=is_entry, other=0)
        added = tl.full([SCATTER_BLOCK], 0.0, tl.float32)
        is_top_k = tl.full([SCATTER_BLOCK], 0, tl.int32)
        # A column may occur more than once (a label among the top-k ids): its entries are added up.
        for number in range(0, entries):
            same = at_columns == tl.load(scatter_columns + first_entry + number)
            added += tl.where(same, tl.load(scatter_values + first_entry + number), 0.0)
            if HAS_TAIL:
                masked = tl.load(scatter_topk_mask + first_entry + number).to(tl.int32)
                is_top_k = tl.maximum(is_top_k, tl.where(same, masked, 0))
        entry_s = load_logits(
            student_row + at_columns, is_entry, STUDENT_SCALE, STUDENT_CAP, True
        )
        entry_t = entry_s
        if HAS_TEACHER:
            entry_t = load_logits(
                teacher_row + at_columns, is_entry, TEACHER_SCALE, TEACHER_CAP, True
            )
        of_columns = added + _gradient(
            entry_s, entry_t, row, rows, is_top_k > 0, peak_s, peak_t, known, slopes, constants,
            TEMPERATURES, HAS_TEACHER, HAS_TAIL, NONLINEAR, FORMS, NEAR=HAS_TEACHER,
        )  # fmt: skip
        of_columns = through_cap(of_columns, entry_s, STUDENT_SCALE, STUDENT_CAP)
    # Most tokens are not near their teacher, and what these need doubles the arithmetic.
    if HAS_TEACHER and _is_near(known, row, rows, TEMPERATURES):
        _push_tiles(
            width, out_row, student_row, teacher_row, row, rows, peak_s, peak_t,
            known, slopes, constants, STUDENT_SCALE, STUDENT_CAP, TEACHER_SCALE, TEACHER_CAP,
            TEMPERATURES, HAS_TEACHER, HAS_TAIL, NONLINEAR, FORMS, HAS_TEACHER, BLOCK,
        )  # fmt: skip
    else:
        _push_tiles(
            width, out_row, student_row, teacher_row, row, rows, peak_s, peak_t,
            known, slopes, constants, STUDENT_SCALE, STUDENT_CAP, TEACHER_SCALE, TEACHER_CAP,
            TEMPERATURES, HAS_TEACHER, HAS_TAIL, NONLINEAR, FORMS, False, BLOCK,
        )  # fmt: skip
    if HAS_SCATTER:
        # Wait until all threads have written the row.
        tl.debug_barrier()
        tl.store(out_row + at_columns, of_columns.to(out.dtype.element_ty), mask=is_entry)
