"""CRC-32 of a whole from parts that are read in any order, by any rank.

Before its constants are added, a CRC-32 is linear. That of a whole is the XOR of those of its
parts, each shifted by the bytes after it. Those are its registers, which begin at zero.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

Registers = TypeVar("Registers", int, NDArray[np.int64])

_ONES = 0xFFFFFFFF
_POLYNOMIAL = 0xEDB88320  # the lowest bit is the highest power


def register_of(content: Buffer) -> int:
    """Return the register after some bytes."""
    return zlib.crc32(content, _ONES) ^ _ONES


def register_of_whole(checksum: int, nbytes: int) -> int:
    """Return the register of bytes whose CRC-32 is known."""
    return checksum ^ _ONES ^ shifted(_ONES, nbytes)


def shifted(register: int, nbytes: int) -> int:
    """Return the register after that many further bytes of zero."""
    return _product(_power(nbytes), register)


def joined(registers: NDArray[np.int64], strides: Sequence[int]) -> int:
    """Return the register of a grid of parts, at the end of the last one.

    `strides`: along each axis, the bytes from the end of a part to the end of the next.
    """
    for stride in reversed(strides):
        power = _power(stride)
        while registers.shape[-1] > 1:
            if registers.shape[-1] % 2:
                registers = np.insert(registers, 0, 0, axis=-1)
            registers = _product(power, registers[..., ::2]) ^ registers[..., 1::2]
            power = _product(power, power)
        registers = registers[..., 0]
    return int(registers)


def _product(factor: int, registers: Registers) -> Registers:
    """Return products of polynomials over bits, modulo that of CRC-32."""
    product = registers & 0
    for bit in reversed(range(32)):
        if factor >> bit & 1:
            product = product ^ registers
        registers = (registers >> 1) ^ (registers & 1) * _POLYNOMIAL
    return product


@lru_cache(maxsize=4096)
def _power(nbytes: int) -> int:
    """Return the polynomial by which a number of bytes shifts a register."""
    power, square = 1 << 31, 1 << 23  # x^0, x^8
    while nbytes:
        if nbytes & 1:
            power = _product(square, power)
        square = _product(square, square)
        nbytes >>= 1
    return power
