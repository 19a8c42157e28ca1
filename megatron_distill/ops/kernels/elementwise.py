"""Elementwise Triton functions of the row kernels: loads, log ratios, slopes and values.

Division and logarithm are rounded as IEEE requires, and no product is fused with a sum (see the
launch options): equal models give exactly zero.
"""

import triton
import triton.language as tl

__all__ = [
    "FORMS",
    "LOWEST",
    "compared",
    "exp_excess",
    "load_logits",
    "log_ratio",
    "scaled",
    "slope_and_value",
    "through_cap",
]

# Replaces -inf; differences of two are finite, at temperatures down to 1/2.
LOWEST: tl.constexpr = tl.constexpr(-8.507059e37)
_TINY: tl.constexpr = tl.constexpr(1.1754943508222875e-38)
# See `gap_beyond_top`.
_FAR: tl.constexpr = tl.constexpr(1e20)
_LOG_HALF: tl.constexpr = tl.constexpr(-0.6931471805599453)
# Log ratios up to which the part beyond first order comes from a series, accurate to 1e-7.
_NEAR: tl.constexpr = tl.constexpr(0.5)
# Below it tanh is a polynomial, since 1 - e^-2x would lose digits.
_SMALL: tl.constexpr = tl.constexpr(0.25)

# Numbers of the divergences in kernel arguments.
FORMS = {
    "reverse_kl": 1,
    "js_divergence": 2,
    "skewed_forward_kl": 3,
    "skewed_reverse_kl": 4,
    "total_variation": 5,
    "squared_hellinger": 6,
}


@triton.jit
def _log1p(x):
    # Kahan: the error of log(1 + x) comes from rounding 1 + x; the factor x / (u - 1) corrects it.
    u = 1.0 + x
    exact = u == 1.0
    return tl.where(exact, x, tl.log(u) * tl.div_rn(x, tl.where(exact, 1.0, u - 1.0)))


@triton.jit
def _tanh(x):
    size = tl.abs(x)
    square = x * x
    small = x * (
        1.0
        + square
        * (
            -0.3333333333333333
            + square * (0.13333333333333333 + square * (-0.05396825396825397 + square * 0.02186949))
        )
    )
    decay = tl.exp(-2.0 * size)
    large = tl.div_rn(1.0 - decay, 1.0 + decay)
    return tl.where(size < _SMALL, small, tl.where(x < 0, -large, large))


@triton.jit
def load_logits(pointer, mask, SCALE: tl.constexpr, CAP: tl.constexpr):
    """Raw outputs as fp32 logits; a cap of zero means none.

    -inf and masked entries become LOWEST.
    """
    logits = tl.load(pointer, mask=mask, other=-float("inf")).to(tl.float32) * SCALE
    if CAP > 0:
        logits = CAP * _tanh(tl.div_rn(logits, tl.full([], CAP, tl.float32)))
    # Not tl.maximum, which would hide NaN.
    return tl.where(mask & (logits != -float("inf")), logits, LOWEST)


@triton.jit
def scaled(weight, values):
    """The product; zero for weight zero, even if the values are not finite."""
    return tl.where(weight == 0.0, 0.0, weight * values)


@triton.jit
def through_cap(gradient, logits, SCALE: tl.constexpr, CAP: tl.constexpr):
    """The gradient on raw outputs from the gradient on logits."""
    if CAP > 0:
        inside = tl.div_rn(logits, tl.full([], CAP, tl.float32))
        gradient = gradient - scaled(gradient, inside * inside)
    return gradient * SCALE


@triton.jit
def _mixture(p, q, share, rest):
    """share p + rest q, computed from the model with the larger share.

    Both share and rest = 1 - share are given, because the subtraction would lose digits near one.
    """
    return tl.where(share <= 0.5, q + share * (p - q), p - rest * (p - q))


@triton.jit
def exp_excess(x):
    """e^x - 1 - x, with x clamped to the range of the series."""
    x = tl.minimum(tl.maximum(x, -_NEAR), _NEAR)
    series = 0.0001984126984126984 + x * 2.48015873015873e-05
    series = 0.008333333333333333 + x * (0.001388888888888889 + x * series)
    return x * x * (0.5 + x * (0.16666666666666666 + x * (0.041666666666666664 + x * series)))


@triton.jit
def log_ratio(z_t, z_s, shift, rounded_off, inverse):
    """(z_t - z_s - shift) / T without rounding loss.

    The difference includes its rounding error (Knuth's two-sum), the shift its part below fp32.
    """
    gap = z_t - z_s
    of_student = gap - z_t
    lost = (z_t - (gap - of_student)) - (z_s + of_student)
    return ((gap - shift) + (lost - rounded_off)) * inverse


@triton.jit
def compared(p, q, z_t, z_s, shift, rounded_off, inverse, is_near):
    """Log ratio d, e^d - 1 - d where the series is accurate, and p - q.

    For tokens near their teacher p - q is computed from d, else by subtraction.
    """
    d = log_ratio(z_t, z_s, shift, rounded_off, inverse)
    excess = exp_excess(d)
    exact = tl.where(is_near > 0.0, tl.abs(d), 1.0) <= _NEAR
    return d, excess, tl.where(exact, q * (d + excess), p - q)


@triton.jit
def _log_mixture_ratio(p, q, gap, share, rest):
    """log(m/q) in m = share p + rest q; the gap is p - q. See the torch function of this name."""
    mixture = _mixture(p, q, share, rest)
    size = _log1p(share * tl.div_rn(tl.abs(gap), tl.where(gap < 0, mixture, q)))
    return tl.where(gap < 0, -size, size)


@triton.jit
def _log_excess(x, log1p):
    """x - log(1 + x), given the logarithm: with s = x/(2 + x) it is x s - 2 s^3 (1/3 + ...)."""
    near = tl.minimum(tl.maximum(x, -_NEAR), _NEAR)
    ratio = tl.div_rn(near, 2.0 + near)
    square = ratio * ratio
    series = 0.28236619805320796 + square * 0.2685149802278186
    series = 0.6666664033669923 + square * (0.4000756064491075 + square * series)
    return tl.where(near != x, x - log1p, ratio * (near - square * series))


@triton.jit
def _shifted_log_ratio(log_mixture_ratio, of_teacher, share, rest, near_equal):
    """See the torch function of this name."""
    excess = tl.log(rest) - _LOG_HALF
    beyond = tl.maximum(log_mixture_ratio - excess, 0.0)
    exact = beyond - _log1p(tl.maximum(of_teacher * -share, -0.5))
    return tl.where(near_equal > 0.0, log_mixture_ratio, exact)


@triton.jit
def _log1p_beyond(log1p, share):
    """See `_log1p_beyond` of the mixtures."""
    near = tl.minimum(tl.maximum(share, -1.0), 0.5)
    ratio = tl.div_rn(near, 2.0 - near)
    square = ratio * ratio
    series = 0.28236619805320796 + square * 0.2685149802278186
    series = 0.6666664033669923 + square * (0.4000756064491075 + square * series)
    return tl.where(near != share, log1p - share, ratio * (near + square * series))


@triton.jit
def _share(p, gap, mixture, rest, near_equal):
    """See `_share` of the mixtures."""
    of_teacher = tl.div_rn(p, mixture)
    return tl.where(near_equal > 0.0, rest * tl.div_rn(gap, mixture), of_teacher)


# fmt: off
@triton.jit
def slope_and_value(
    p, q, d, excess, gap, is_near, log_ratio, top_ratio, parameter, rest, FORM: tl.constexpr
):  # fmt: on
    """Slope (up to a constant) and summand of the value, as in the table of divergences.

    ``rest`` is one minus the parameter, ``log_ratio`` and ``top_ratio`` are as in `Classes`, and
    the remaining arguments come from `compared`.

    For tokens near their teacher, values are of second order. The part of a summand linear in ``p -
    q``, whose sum is zero, is left out.
    """
    near_equal = tl.where(top_ratio > _LOG_HALF, 1.0, 0.0)
    near = is_near > 0.0
    has_series = tl.where(near, tl.abs(d), 1.0) <= _NEAR
    # As in `load_logits`, not tl.maximum, which would hide NaN.
    p = tl.where(p < _TINY, _TINY, p)
    q = tl.where(q < _TINY, _TINY, q)
    if FORM == 1:
        bounded = tl.where(log_ratio > _FAR, _FAR, log_ratio)
        slope = -tl.where(bounded < -_FAR, -_FAR, bounded)
        value = (slope - top_ratio) * q
        value = tl.where(near, tl.where(has_series, excess * q, gap - d * q), value)
        # Log ratios are exact for tokens near their teacher, and so is a difference from a small
        # one.
        is_small = tl.where(near, tl.abs(top_ratio), 1.0) <= _NEAR
        slope = tl.where(is_small, top_ratio - d, slope)
    elif FORM == 2:
        log_mixture_ratio = _log_mixture_ratio(p, q, gap, parameter, rest)
        of_teacher = _log_mixture_ratio(q, p, -gap, rest, parameter)
        value = -(parameter * (of_teacher * p) + rest * (log_mixture_ratio * q))
        beyond = parameter * (_log_excess(rest * tl.div_rn(-gap, p), of_teacher) * p)
        beyond += rest * (_log_excess(parameter * tl.div_rn(gap, q), log_mixture_ratio) * q)
        value = tl.where(has_series, beyond, value)
        share = tl.div_rn(p, _mixture(p, q, parameter, rest))
        slope = -rest * _shifted_log_ratio(log_mixture_ratio, share, parameter, rest, near_equal)
    elif FORM == 3:
        mixture = _mixture(p, q, parameter, rest)
        of_teacher = _log_mixture_ratio(q, p, -gap, rest, parameter)
        beyond = _log_excess(rest * tl.div_rn(-gap, p), of_teacher) * p
        value = tl.where(near, beyond, -(of_teacher * p) - rest * gap)
        slope = -rest * _share(p, gap, mixture, rest, near_equal)
    elif FORM == 4:
        mixture = _mixture(p, q, rest, parameter)
        log_mixture_ratio = _log_mixture_ratio(p, q, gap, rest, parameter)
        beyond = _log_excess(rest * tl.div_rn(gap, q), log_mixture_ratio) * q
        value = tl.where(near, beyond, rest * gap - log_mixture_ratio * q)
        share = rest * tl.div_rn(tl.where(near_equal > 0.0, gap, p), mixture)
        log_mixture_ratio -= tl.where(near_equal > 0.0, 0.0, tl.log(parameter))
        slope = -_log1p_beyond(log_mixture_ratio, share) - near_equal * (rest * share)
    elif FORM == 5:
        value = 0.5 * tl.abs(gap)
        slope = tl.where(gap < 0, 0.5, tl.where(gap > 0, -0.5, 0.0))
    else:
        tl.static_assert(FORM == 6, "no such divergence")
        root = tl.sqrt_rn(q)
        of_teacher = tl.sqrt_rn(p)
        half = 0.5 * d
        rise = half + exp_excess(half)
        value = 0.5 * (of_teacher - root) * (of_teacher - root)
        value = tl.where(has_series, 0.5 * (rise * rise * q), value)
        far = tl.div_rn(of_teacher, root) - near_equal
        rise = tl.where(has_series, rise + (1.0 - near_equal), far)
        slope = -0.5 * rise
    return slope, value
