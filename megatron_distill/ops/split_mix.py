"""SplitMix64's hash of whole numbers, on tensors and on integers.

Its increment and its mixing function are those of Steele, Lea and Flood (OOPSLA 2014). Multiples of
the increment, mixed, are 64 bits that look independent.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

__all__ = ["INCREMENT", "mix_", "mixed_integer", "shifted", "signed"]

INCREMENT: Final = 0x9E3779B97F4A7C15
_FACTORS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS: Final = (30, 27, 31)
_MASK: Final = 2**64 - 1


def mixed_integer(value: int) -> int:
    """Return the mixing function of an integer modulo 2^64, from 0 to 2^64 - 1."""
    value &= _MASK
    for factor, shift in zip(_FACTORS, _SHIFTS[:2], strict=True):
        value = (value ^ (value >> shift)) * factor & _MASK
    return value ^ (value >> _SHIFTS[2])


def mix_(values: Tensor) -> Tensor:
    """Apply the mixing function to int64 numbers, whose products wrap around, in place."""
    for factor, shift in zip(_FACTORS, _SHIFTS[:2], strict=True):
        values.bitwise_xor_(shifted(values, shift)).mul_(signed(factor))
    return values.bitwise_xor_(shifted(values, _SHIFTS[2]))


def shifted(values: Tensor, bits: int) -> Tensor:
    """Return a logical shift to the right of int64 numbers; torch's is arithmetic."""
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def signed(value: int) -> int:
    """Return 64 bits, given from 0 to 2^64 - 1, as the number that int64 has for them."""
    return value - 2**64 if value >= 2**63 else value
