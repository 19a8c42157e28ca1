"""CRC-32 of a whole from its parts."""

from __future__ import annotations

import math
import zlib
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_distill.train.checkpoint.checksums import (
    joined,
    register_of,
    register_of_whole,
    shifted,
)


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=6))
def test_parts_have_the_checksum_of_the_whole(content: bytes, cuts: list[int]) -> None:
    places = sorted({0, len(content), *(cut for cut in cuts if cut < len(content))})
    register = 0
    for start, stop in pairwise(places):
        register ^= shifted(register_of(content[start:stop]), len(content) - stop)
    assert register == register_of_whole(zlib.crc32(content), len(content))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 7), st.data())
def test_a_grid_of_parts_is_as_if_zeros_were_between(
    shape: list[int], width: int, data: st.DataObject
) -> None:
    gaps = data.draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    strides, stride = [0] * len(shape), width
    for axis in reversed(range(len(shape))):
        strides[axis] = stride + gaps[axis]
        stride = strides[axis] * shape[axis]
    whole = bytearray(stride)
    registers = np.empty(math.prod(shape), np.int64)
    end = 0
    for number, index in enumerate(np.ndindex(*shape)):
        part = data.draw(st.binary(min_size=width, max_size=width))
        start = sum(at * n for at, n in zip(index, strides, strict=True))
        end = start + width
        whole[start:end] = part
        registers[number] = register_of(part)
    assert joined(registers.reshape(shape), strides) == register_of(whole[:end])
