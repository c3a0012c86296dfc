"""Small unsigned integers packed bit by bit, first number in the lowest bits. Knows no method."""

import numpy as np
from numpy.typing import NDArray


def pack_bits(codes: NDArray[np.uint8], bits: int) -> bytes:
    """All numbers of an array in C order, `bits` each (1 to 8); the last byte is filled with zeros.

    >>> pack_bits(np.array([1, 2, 3], dtype=np.uint8), 2).hex()
    '39'
    """
    if bits == 8:
        return codes.tobytes()
    planes = (codes.reshape(-1, 1) >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(planes.ravel(), bitorder="little").tobytes()


def unpack_bits(data: bytes, bits: int, count: int) -> NDArray[np.uint8]:
    """Inverse of pack_bits: [count]."""
    if bits == 8:
        return np.frombuffer(data, dtype=np.uint8, count=count)
    planes = np.unpackbits(np.frombuffer(data, dtype=np.uint8), count=count * bits, bitorder="little")
    return (planes.reshape(count, bits) << np.arange(bits, dtype=np.uint8)).sum(axis=1, dtype=np.uint8)


def packed_bytes(bits: int, count: int) -> int:
    """Length of what pack_bits makes of `count` numbers."""
    return (bits * count + 7) // 8
