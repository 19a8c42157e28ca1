"""What the row kernels do with one logit, as Triton functions.

Division and logarithm are rounded as IEEE asks, and no product is fused with a sum (see the launch
options): equal models leave exactly nothing.
"""

import triton
import triton.language as tl

__all__ = ["FORMS", "LOWEST", "load_logits", "scaled", "slope_and_value", "through_cap"]

# What stands for -inf; differences of two are finite, at temperatures down to 1/2.
LOWEST: tl.constexpr = tl.constexpr(-8.507059e37)
_TINY: tl.constexpr = tl.constexpr(1.1754943508222875e-38)
# See `gap_beyond_top`.
_FAR: tl.constexpr = tl.constexpr(1e20)
_LOG_HALF: tl.constexpr = tl.constexpr(-0.6931471805599453)
# Where tanh is a polynomial: there, 1 - e^-2x would have lost digits.
_SMALL: tl.constexpr = tl.constexpr(0.25)

# Numbers by which a kernel knows the rows of the table of divergences.
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
    # Kahan: the error of log(1 + x) is that of rounding 1 + x, which x / (u - 1) takes back.
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
    """Raw outputs as fp32 logits, a cap of zero being none; -inf and what is masked become the
    lowest number."""
    logits = tl.load(pointer, mask=mask, other=-float("inf")).to(tl.float32) * SCALE
    if CAP > 0:
        logits = CAP * _tanh(tl.div_rn(logits, tl.full([], CAP, tl.float32)))
    # A maximum would swallow NaN, which has to be seen.
    return tl.where(mask & (logits != -float("inf")), logits, LOWEST)


@triton.jit
def scaled(weight, values):
    """The product; of weight zero it is zero whatever the values are."""
    return tl.where(weight == 0.0, 0.0, weight * values)


@triton.jit
def through_cap(gradient, logits, SCALE: tl.constexpr, CAP: tl.constexpr):
    """The gradient on raw outputs from that on logits."""
    if CAP > 0:
        inside = tl.div_rn(logits, tl.full([], CAP, tl.float32))
        gradient = gradient - scaled(gradient, inside * inside)
    return gradient * SCALE


@triton.jit
def _mixture(p, q, share, rest):
    """share p + rest q, from the model with the larger share. Of share and rest, which sum to one,
    each is given: one minus the other would have few digits where that is near one."""
    return tl.where(share <= 0.5, q + share * (p - q), p - rest * (p - q))


@triton.jit
def _surprise(p, q, share, rest):
    """See `_surprise` of the mixtures: log(m/q) in m = share p + rest q."""
    gap = p - q
    mixture = _mixture(p, q, share, rest)
    size = _log1p(share * tl.div_rn(tl.abs(gap), tl.where(gap < 0, mixture, q)))
    return tl.where(gap < 0, -size, size)


@triton.jit
def _anchored(surprise, of_teacher, share, rest, anchor):
    """See `_anchored` of the mixtures."""
    excess = tl.log(rest) - _LOG_HALF
    beyond = tl.maximum(surprise - excess, 0.0)
    exact = beyond - _log1p(tl.maximum(of_teacher * -share, -0.5))
    return tl.where(anchor > 0.0, surprise, exact)


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
def _share(p, q, mixture, rest, anchor):
    """See `_share` of the mixtures."""
    of_teacher = tl.div_rn(p, mixture)
    return tl.where(anchor > 0.0, rest * tl.div_rn(p - q, mixture), of_teacher)


@triton.jit
def slope_and_value(p, q, log_ratio, top_ratio, parameter, rest, FORM: tl.constexpr):
    """Slope (a constant apart) and summand of the value, as in the table of divergences; ``rest``
    is one minus the parameter, and log ratios are those of `Classes`."""
    anchor = tl.where(top_ratio > _LOG_HALF, 1.0, 0.0)
    # As above, not by a maximum.
    p = tl.where(p < _TINY, _TINY, p)
    q = tl.where(q < _TINY, _TINY, q)
    if FORM == 1:
        bounded = tl.where(log_ratio > _FAR, _FAR, log_ratio)
        slope = -tl.where(bounded < -_FAR, -_FAR, bounded)
        value = (slope - top_ratio) * q
    elif FORM == 2:
        surprise = _surprise(p, q, parameter, rest)
        value = -(parameter * (_surprise(q, p, rest, parameter) * p) + rest * (surprise * q))
        of_teacher = tl.div_rn(p, _mixture(p, q, parameter, rest))
        slope = -rest * _anchored(surprise, of_teacher, parameter, rest, anchor)
    elif FORM == 3:
        mixture = _mixture(p, q, parameter, rest)
        value = -(_surprise(q, p, rest, parameter) * p) - rest * (p - q)
        slope = -rest * _share(p, q, mixture, rest, anchor)
    elif FORM == 4:
        mixture = _mixture(p, q, rest, parameter)
        surprise = _surprise(p, q, rest, parameter)
        value = rest * (p - q) - surprise * q
        share = rest * tl.div_rn(tl.where(anchor > 0.0, p - q, p), mixture)
        surprise -= tl.where(anchor > 0.0, 0.0, tl.log(parameter))
        slope = -_log1p_beyond(surprise, share) - anchor * (rest * share)
    elif FORM == 5:
        gap = q - p
        value = 0.5 * tl.abs(gap)
        slope = tl.where(gap > 0, 0.5, tl.where(gap < 0, -0.5, 0.0))
    else:
        tl.static_assert(FORM == 6, "no such divergence")
        root = tl.sqrt_rn(q)
        of_teacher = tl.sqrt_rn(p)
        value = 0.5 * (of_teacher - root) * (of_teacher - root)
        slope = -0.5 * (tl.div_rn(of_teacher, root) - anchor)
    return slope, value
