"""Interleaved range-variant ANS over classed symbols, compiled by Numba. Knows tables, not what they describe.

Four 32-bit states take the operations of a block in turn; each keeps its state in [2^16, 2^32) and moves 16-bit
words. An operation is a symbol under its class's table, or up to 8 raw bits under a flat one. Encoding runs backwards
so that decoding runs forwards. Duda 2013, arXiv 1311.2540; interleaving: Giesen 2014, arXiv 1402.3392.
Compiled code holds the class limits: a change of classes.py is a change here.
"""

import numpy as np
from numpy.typing import NDArray

from kvalign.compiled import njit
from kvalign.entropy.classes import CLASSES, ESCAPE, HIGHEST, LARGEST, LOWEST, PRECISION_BITS, Tables
from kvalign.errors import PayloadInvalid

_LANES = 4
_MASK = (1 << PRECISION_BITS) - 1
_STATE_FLOOR = 1 << 16
_RAW_CHUNK = 8
_MAX_LOW_BITS = 20
_MOST_OPERATIONS = 1 + 32 // _RAW_CHUNK + -(-_MAX_LOW_BITS // _RAW_CHUNK)

CLASS_LIMIT = HIGHEST + 4 * _MAX_LOW_BITS


class BlockCoder:
    """Codes blocks of symbols under one set of tables. Symbols fit in 28 bits with their sign."""

    def __init__(self, tables: Tables) -> None:
        self._frequencies = tables.frequencies
        self._cumulative = tables.cumulative()
        self._slots = tables.slots()

    def encode(self, symbols: NDArray[np.int32], classes: NDArray[np.int16]) -> bytes:
        """symbols [T, R], classes [T, R]; symbols of classes below LOWEST must be zero. About 3 ns a symbol."""
        return _encode(symbols.ravel(), classes.ravel(), self._frequencies, self._cumulative).tobytes()

    def decode(self, payload: bytes, classes: NDArray[np.int16]) -> NDArray[np.int32]:
        """Symbols [T, R] for the classes [T, R] they were encoded under. Raises PayloadInvalid when damaged."""
        if len(payload) % 2 or len(payload) < 4 * _LANES:
            raise PayloadInvalid("A coded block is cut short.", "Fetch the payload again.")
        words = np.frombuffer(payload, dtype="<u2")
        symbols = np.zeros(classes.size, dtype=np.int32)
        if not _decode(words, classes.ravel(), self._frequencies, self._cumulative, self._slots, symbols):
            raise PayloadInvalid("A coded block does not end where its symbols do.", "Fetch the payload again.")
        return symbols.reshape(classes.shape)

    def ideal_bits(self, symbols: NDArray[np.int32], classes: NDArray[np.int16]) -> float:
        """Cross-entropy of the symbols under the tables, in bits: what a perfect coder would need."""
        return float(_ideal_bits(symbols.ravel(), classes.ravel(), self._frequencies))


@njit(cache=True, nogil=True)
def _low_bits(cls):  # type: ignore[no-untyped-def]
    """Raw bits of a symbol whose class passes HIGHEST: one for each octave, rounded up."""
    return 0 if cls <= HIGHEST else (cls - HIGHEST + 3) // 4


@njit(cache=True, nogil=True)
def _column(high, frequencies, row):  # type: ignore[no-untyped-def]
    """Where a symbol stands in its class's table: at its own column, or at the escape's when it has no frequency."""
    if -LARGEST <= high <= LARGEST and frequencies[row, high + LARGEST] > 0:
        return high + LARGEST
    return ESCAPE


@njit(cache=True, nogil=True)
def _encode(symbols, classes, frequencies, cumulative):  # type: ignore[no-untyped-def]
    # Room for the worst case; pages that nothing is written to cost nothing.
    freq = np.empty(symbols.size * _MOST_OPERATIONS, np.uint16)
    start = np.empty(symbols.size * _MOST_OPERATIONS, np.uint16)
    n = 0
    for i in range(symbols.size):
        cls = classes[i]
        if cls < LOWEST:
            continue
        bits = _low_bits(cls)
        row = cls - 4 * bits - LOWEST
        high = symbols[i] >> bits
        column = _column(high, frequencies, row)
        freq[n] = frequencies[row, column]
        start[n] = cumulative[row, column]
        n += 1
        if column == ESCAPE:
            folded = np.uint32((high << 1) ^ (high >> 31))
            for shift in range(0, 32, _RAW_CHUNK):
                freq[n] = 1 << (PRECISION_BITS - _RAW_CHUNK)
                start[n] = ((folded >> np.uint32(shift)) & np.uint32(255)) << np.uint32(PRECISION_BITS - _RAW_CHUNK)
                n += 1
        low = symbols[i] & ((1 << bits) - 1)
        while bits > 0:
            take = min(bits, _RAW_CHUNK)
            freq[n] = 1 << (PRECISION_BITS - take)
            start[n] = (low & ((1 << take) - 1)) << (PRECISION_BITS - take)
            n += 1
            low >>= take
            bits -= take
    inverse = np.empty(_MASK + 2, np.float64)
    inverse[0] = 0.0
    for frequency in range(1, _MASK + 2):
        inverse[frequency] = 1.0 / frequency
    state = np.full(_LANES, _STATE_FLOOR, np.uint64)
    words = np.empty(n + 2 * _LANES, np.uint16)
    at = words.size
    for i in range(n - 1, -1, -1):
        lane = i % _LANES
        x = state[lane]
        f = np.uint64(freq[i])
        if x >= f << np.uint64(32 - PRECISION_BITS):
            at -= 1
            words[at] = np.uint16(x & np.uint64(0xFFFF))
            x >>= np.uint64(16)
        # A product by the inverse is far quicker than a division; below 2^32 it is off by one at most.
        quotient = np.int64(np.float64(x) * inverse[freq[i]])
        rest = np.int64(x) - quotient * np.int64(f)
        if rest < 0:
            quotient -= 1
            rest += np.int64(f)
        elif rest >= np.int64(f):
            quotient += 1
            rest -= np.int64(f)
        state[lane] = np.uint64((quotient << PRECISION_BITS) + rest + np.int64(start[i]))
    for lane in range(_LANES - 1, -1, -1):
        at -= 1
        words[at] = np.uint16(state[lane] >> np.uint64(16))
        at -= 1
        words[at] = np.uint16(state[lane] & np.uint64(0xFFFF))
    return words[at:].copy()


@njit(cache=True, nogil=True)
def _decode(words, classes, frequencies, cumulative, slots, symbols):  # type: ignore[no-untyped-def]
    state = np.empty(_LANES, np.uint64)
    at = 0
    for lane in range(_LANES):
        state[lane] = np.uint64(words[at]) | (np.uint64(words[at + 1]) << np.uint64(16))
        if state[lane] < np.uint64(_STATE_FLOOR):
            return False
        at += 2
    lane = 0
    for i in range(symbols.size):
        cls = classes[i]
        if cls < LOWEST:
            continue
        bits = _low_bits(cls)
        row = cls - 4 * bits - LOWEST
        x = state[lane]
        slot = x & np.uint64(_MASK)
        column = slots[row, slot]
        x = np.uint64(frequencies[row, column]) * (x >> np.uint64(PRECISION_BITS)) + slot
        x -= np.uint64(cumulative[row, column])
        if x < np.uint64(_STATE_FLOOR):
            if at >= words.size:
                return False
            x = (x << np.uint64(16)) | np.uint64(words[at])
            at += 1
        state[lane] = x
        lane = (lane + 1) % _LANES
        high = np.int64(column) - LARGEST
        raw = 32 if column == ESCAPE else 0
        escaped = np.uint32(0)
        low = np.int64(0)
        done = 0
        while raw > 0 or done < bits:
            take = _RAW_CHUNK if raw > 0 else min(bits - done, _RAW_CHUNK)
            x = state[lane]
            chunk = (x & np.uint64(_MASK)) >> np.uint64(PRECISION_BITS - take)
            x = ((x >> np.uint64(PRECISION_BITS)) << np.uint64(PRECISION_BITS - take)) + (
                x & np.uint64((1 << (PRECISION_BITS - take)) - 1)
            )
            if x < np.uint64(_STATE_FLOOR):
                if at >= words.size:
                    return False
                x = (x << np.uint64(16)) | np.uint64(words[at])
                at += 1
            state[lane] = x
            lane = (lane + 1) % _LANES
            if raw > 0:
                escaped = np.uint32(escaped | (np.uint32(chunk) << np.uint32(32 - raw)))
                raw -= _RAW_CHUNK
            else:
                low |= np.int64(chunk) << done
                done += take
        if column == ESCAPE:
            high = np.int64(escaped >> np.uint32(1)) ^ -np.int64(escaped & np.uint32(1))
        symbols[i] = np.int32((high << bits) | low)
    if at != words.size:
        return False
    return np.all(state == np.uint64(_STATE_FLOOR))


@njit(cache=True, nogil=True)
def _ideal_bits(symbols, classes, frequencies):  # type: ignore[no-untyped-def]
    bits = 0.0
    for i in range(symbols.size):
        cls = classes[i]
        if cls < LOWEST:
            continue
        low = _low_bits(cls)
        high = symbols[i] >> low
        row = cls - 4 * low - LOWEST
        column = _column(high, frequencies, row)
        bits += low + PRECISION_BITS - np.log2(frequencies[row, column])
        if column == ESCAPE:
            bits += 32
    return bits


def count_symbols(
    symbols: NDArray[np.int32], classes: NDArray[np.int16], counts: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """How often each column of each class occurs, [CLASSES, 2 * LARGEST + 2], added to `counts` when given."""
    if counts is None:
        counts = np.zeros((CLASSES, ESCAPE + 1), dtype=np.int64)
    _count_symbols(symbols.ravel(), classes.ravel(), counts)
    return counts


@njit(cache=True, nogil=True)
def _count_symbols(symbols, classes, counts):  # type: ignore[no-untyped-def]
    for i in range(symbols.size):
        cls = classes[i]
        if cls < LOWEST:
            continue
        low = _low_bits(cls)
        high = symbols[i] >> low
        column = high + LARGEST if -LARGEST <= high <= LARGEST else ESCAPE
        counts[cls - 4 * low - LOWEST, column] += 1
