"""Elementwise Triton functions of the row kernels: loads, log ratios, slopes and values.

No product is fused with a sum (see the launch options): equal models give exactly zero. A quotient
may be off by two units in the last place.
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

# Replaces -inf: sums over a row of differences of two are finite.
LOWEST: tl.constexpr = tl.constexpr(-1e34)
_TINY: tl.constexpr = tl.constexpr(1.1754943508222875e-38)
# See `gap_beyond_top`.
_FAR: tl.constexpr = tl.constexpr(1e20)
# Log ratio beyond which the smaller probability is zero in fp32.
_APART: tl.constexpr = tl.constexpr(200.0)
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
def _atanh_series(square):
    """The series in ``log(1 + x) = 2 r + r^3 (2/3 + 2/5 r^2 + ...)``, r = x / (2 + x), of r^2.

    For r from -1/3 to 1/5: x from -1/2 to 1/2.
    """
    series = 0.28236619805320796 + square * 0.2685149802278186
    return 0.6666664033669923 + square * (0.4000756064491075 + square * series)


@triton.jit
def _log1p_near(x):
    """log(1 + x) for x from -1/2 to 1/2."""
    ratio = x / (2.0 + x)
    square = ratio * ratio
    return ratio * (2.0 + square * _atanh_series(square))


@triton.jit
def _log1p(x):
    """log(1 + x) for x from -1/2."""
    near = tl.minimum(x, _NEAR)
    return tl.where(near != x, tl.log(1.0 + x), _log1p_near(near))


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
    large = (1.0 - decay) / (1.0 + decay)
    return tl.where(size < _SMALL, small, tl.where(x < 0, -large, large))


@triton.jit
def load_logits(pointer, mask, SCALE: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr):
    """Raw outputs as fp32 logits; a cap of zero means none.

    -inf becomes LOWEST, and so do the entries outside the mask where there is one: a mask keeps
    loads from being wide.
    """
    if MASKED:
        logits = tl.load(pointer, mask=mask, other=-float("inf")).to(tl.float32) * SCALE
    else:
        logits = tl.load(pointer).to(tl.float32) * SCALE
    if CAP > 0:
        logits = CAP * _tanh(logits / CAP)
        if MASKED:
            logits = tl.where(mask, logits, LOWEST)
    return tl.maximum(logits, LOWEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scaled(weight, values):
    """The product; zero for weight zero, even if the values are not finite."""
    return tl.where(weight == 0.0, 0.0, weight * values)


@triton.jit
def through_cap(gradient, logits, SCALE: tl.constexpr, CAP: tl.constexpr):
    """The gradient on raw outputs from the gradient on logits."""
    if CAP > 0:
        inside = logits / CAP
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
def compared(p, q, z_t, z_s, shift, rounded_off, inverse, is_near, NEAR: tl.constexpr):
    """Log ratio d, e^d - 1 - d where the series is accurate, and p - q.

    For tokens near their teacher p - q is computed from d, else by subtraction. Without NEAR no
    token is near, and zeros stand for the series.
    """
    d = log_ratio(z_t, z_s, shift, rounded_off, inverse)
    gap = p - q
    excess = tl.zeros_like(gap)
    if NEAR:
        excess = exp_excess(d)
        exact = tl.where(is_near > 0.0, tl.abs(d), 1.0) <= _NEAR
        gap = tl.where(exact, q * (d + excess), gap)
    return d, excess, gap


@triton.jit
def _log_mixture_ratio(p, q, gap, share, rest):
    """log(m/q) in m = share p + rest q; the gap is p - q. See the torch function of this name."""
    mixture = _mixture(p, q, share, rest)
    size = _log1p(share * (tl.abs(gap) / tl.where(gap < 0, mixture, q)))
    return tl.where(gap < 0, -size, size)


@triton.jit
def _log_mixture_ratios(p, q, d, share, rest):
    """log(m/p) and log(m/q) in m = share p + rest q, of tokens that are not near.

    From one logarithm: the smaller ratio is ``log(m / max(p, q))``, the other one is |d| larger.
    """
    larger = tl.maximum(p, q)
    of_teacher = p > q
    of_smaller = tl.where(of_teacher, rest, share)
    ratio = tl.minimum(p, q) / larger
    missing = of_smaller * (1.0 - ratio)
    log = tl.log(tl.where(of_teacher, share, rest) + of_smaller * ratio)
    log = tl.where(missing > _NEAR, log, _log1p_near(-tl.minimum(missing, _NEAR)))
    # Beyond it a probability is zero.
    further = log + tl.minimum(tl.abs(d), _APART)
    return tl.where(of_teacher, log, further), tl.where(of_teacher, further, log)


@triton.jit
def _log_excess(x, log1p):
    """x - log(1 + x), given the logarithm: with s = x/(2 + x) it is x s - 2 s^3 (1/3 + ...)."""
    near = tl.minimum(tl.maximum(x, -_NEAR), _NEAR)
    ratio = near / (2.0 + near)
    square = ratio * ratio
    return tl.where(near != x, x - log1p, ratio * (near - square * _atanh_series(square)))


@triton.jit
def _shifted_log_ratio(log_mixture_ratio, of_teacher, share, rest, near_equal):
    """See the torch function of this name."""
    excess = tl.log(rest) - _LOG_HALF
    beyond = tl.maximum(log_mixture_ratio - excess, 0.0)
    exact = beyond - _log1p_near(tl.maximum(of_teacher * -share, -0.5))
    return tl.where(near_equal > 0.0, log_mixture_ratio, exact)


@triton.jit
def _log1p_beyond(log1p, share):
    """See `_log1p_beyond` of the mixtures."""
    near = tl.minimum(tl.maximum(share, -1.0), 0.5)
    ratio = near / (2.0 - near)
    square = ratio * ratio
    series = ratio * (near + square * _atanh_series(square))
    return tl.where(near != share, log1p - share, series)


@triton.jit
def _share(p, gap, mixture, rest, near_equal):
    """See `_share` of the mixtures."""
    of_teacher = p / mixture
    return tl.where(near_equal > 0.0, rest * (gap / mixture), of_teacher)


@triton.jit
def _hellinger(p, q, d, has_series, near_equal, NEAR: tl.constexpr):
    """Slope and summand of the squared Hellinger distance; see `slope_and_value`."""
    root = tl.sqrt_rn(q)
    of_teacher = tl.sqrt_rn(p)
    value = 0.5 * (of_teacher - root) * (of_teacher - root)
    ratio = of_teacher / root - near_equal
    if NEAR:
        rise = 0.5 * d + exp_excess(0.5 * d)
        value = tl.where(has_series, 0.5 * (rise * rise * q), value)
        ratio = tl.where(has_series, rise + (1.0 - near_equal), ratio)
    return -0.5 * ratio, value


# fmt: off
@triton.jit
def slope_and_value(
    p, q, d, excess, gap, is_near, log_ratio, top_ratio, parameter, rest,
    FORM: tl.constexpr, NEAR: tl.constexpr,
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
        if NEAR:
            value = tl.where(near, tl.where(has_series, excess * q, gap - d * q), value)
            # Log ratios are exact for tokens near their teacher, and so is a difference from a
            # small one.
            is_small = tl.where(near, tl.abs(top_ratio), 1.0) <= _NEAR
            slope = tl.where(is_small, top_ratio - d, slope)
    elif FORM == 2:
        if NEAR:
            log_mixture_ratio = _log_mixture_ratio(p, q, gap, parameter, rest)
            of_teacher = _log_mixture_ratio(q, p, -gap, rest, parameter)
        else:
            of_teacher, log_mixture_ratio = _log_mixture_ratios(p, q, d, parameter, rest)
        value = -(parameter * (of_teacher * p) + rest * (log_mixture_ratio * q))
        if NEAR:
            beyond = parameter * (_log_excess(rest * (-gap / p), of_teacher) * p)
            beyond += rest * (_log_excess(parameter * (gap / q), log_mixture_ratio) * q)
            value = tl.where(has_series, beyond, value)
        share = p / _mixture(p, q, parameter, rest)
        slope = -rest * _shifted_log_ratio(log_mixture_ratio, share, parameter, rest, near_equal)
    elif FORM == 3:
        mixture = _mixture(p, q, parameter, rest)
        of_teacher = _log_mixture_ratio(q, p, -gap, rest, parameter)
        value = -(of_teacher * p) - rest * gap
        if NEAR:
            value = tl.where(near, _log_excess(rest * (-gap / p), of_teacher) * p, value)
        slope = -rest * _share(p, gap, mixture, rest, near_equal)
    elif FORM == 4:
        mixture = _mixture(p, q, rest, parameter)
        log_mixture_ratio = _log_mixture_ratio(p, q, gap, rest, parameter)
        value = rest * gap - log_mixture_ratio * q
        if NEAR:
            value = tl.where(near, _log_excess(rest * (gap / q), log_mixture_ratio) * q, value)
        share = rest * (tl.where(near_equal > 0.0, gap, p) / mixture)
        log_mixture_ratio -= tl.where(near_equal > 0.0, 0.0, tl.log(parameter))
        slope = -_log1p_beyond(log_mixture_ratio, share) - near_equal * (rest * share)
    elif FORM == 5:
        value = 0.5 * tl.abs(gap)
        slope = tl.where(gap < 0, 0.5, tl.where(gap > 0, -0.5, 0.0))
    else:
        tl.static_assert(FORM == 6, "no such divergence")
        slope, value = _hellinger(p, q, d, has_series, near_equal, NEAR)
    return slope, value
