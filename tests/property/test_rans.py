"""The entropy coder: whatever goes in comes out, near the ideal size, and damaged words do no harm."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from kvalign.entropy.classes import (
    ALPHABET,
    CLASSES,
    ESCAPE,
    HIGHEST,
    LARGEST,
    LOWEST,
    Tables,
    fitted_tables,
    laplace_tables,
)
from kvalign.entropy.rans import CLASS_LIMIT, BlockCoder, count_symbols
from kvalign.errors import PayloadInvalid

CODER = BlockCoder(laplace_tables())
LARGEST_SYMBOL = 1 << 26
STATES_BYTES = 16

Pair = tuple[NDArray[np.int32], NDArray[np.int16]]


@st.composite
def blocks(draw: st.DrawFn) -> Pair:
    """Symbols and classes [T, R] of every kind: not coded, tabled, escaped, with raw low bits, extreme."""
    shape = draw(hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=12))
    classes = draw(hnp.arrays(np.int16, shape, elements=st.integers(LOWEST - 3, CLASS_LIMIT)))
    near, far = st.integers(-3, 3), st.integers(-LARGEST_SYMBOL, LARGEST_SYMBOL)
    edge = st.sampled_from([-LARGEST - 1, -LARGEST, LARGEST, LARGEST + 1, LARGEST_SYMBOL, -LARGEST_SYMBOL])
    symbols = draw(hnp.arrays(np.int32, shape, elements=st.one_of(near, far, edge)))
    symbols[classes < LOWEST] = 0
    return symbols, classes


@given(blocks())
@example((np.zeros((0, 5), np.int32), np.zeros((0, 5), np.int16)))
@example((np.zeros((5, 0), np.int32), np.zeros((5, 0), np.int16)))
@example((np.full((1, 1), -LARGEST_SYMBOL, np.int32), np.full((1, 1), LOWEST, np.int16)))
@example((np.full((1, 9), LARGEST_SYMBOL, np.int32), np.full((1, 9), CLASS_LIMIT, np.int16)))
@settings(max_examples=200)
def test_blocks_round_trip(block: Pair) -> None:
    symbols, classes = block
    data = CODER.encode(symbols, classes)
    assert data == CODER.encode(symbols.copy(), classes.copy())
    decoded = CODER.decode(data, classes)
    assert decoded.dtype == np.int32
    assert np.array_equal(decoded, symbols)


@given(blocks())
def test_the_size_is_the_ideal_and_the_states(block: Pair) -> None:
    """4 states of 32 bits that hold half of their bits; beyond them, rounding costs far less than a bit a symbol."""
    symbols, classes = block
    size = len(CODER.encode(symbols, classes))
    ideal_bytes = CODER.ideal_bits(symbols, classes) / 8
    assert ideal_bytes + STATES_BYTES / 2 - 4 <= size <= 1.01 * ideal_bytes + STATES_BYTES + 8


@pytest.mark.parametrize("cls", [LOWEST, LOWEST + 3, 0, HIGHEST, HIGHEST + 1, HIGHEST + 13])
def test_real_symbols_cost_within_a_percent_of_their_cross_entropy(cls: int) -> None:
    generator = np.random.default_rng(cls + 100)
    symbols = np.rint(generator.laplace(scale=2.0 ** (cls / 4), size=(128, 400))).astype(np.int32)
    classes = np.full(symbols.shape, cls, np.int16)
    size_bits = 8 * (len(CODER.encode(symbols, classes)) - STATES_BYTES)
    ideal = CODER.ideal_bits(symbols, classes)
    assert 0.99 * ideal - 64 < size_bits < 1.01 * ideal + 64
    if cls > LOWEST + 2:
        # And the tables are near the source itself: a rounded Laplace variable has log2(2 e b) bits when wide.
        shares = np.bincount((symbols - symbols.min()).ravel()) / symbols.size
        entropy = -(shares[shares > 0] * np.log2(shares[shares > 0])).sum() * symbols.size
        assert ideal < 1.1 * entropy + 0.06 * symbols.size


@given(blocks())
def test_ideal_bits_are_the_tables_logarithms(block: Pair) -> None:
    symbols, classes = block
    frequencies = laplace_tables().frequencies
    bits = 0.0
    for symbol, cls in zip(symbols.ravel().tolist(), classes.ravel().tolist(), strict=True):
        if cls < LOWEST:
            continue
        low = max(0, -(-(cls - HIGHEST) // 4))
        high = symbol >> low
        column = high + LARGEST if abs(high) <= LARGEST else ESCAPE
        if not frequencies[cls - 4 * low - LOWEST, column]:
            column = ESCAPE
        bits += low + 12 - np.log2(float(frequencies[cls - 4 * low - LOWEST, column])) + 32 * (column == ESCAPE)
    assert CODER.ideal_bits(symbols, classes) == pytest.approx(bits)


@given(blocks(), st.data())
def test_damaged_words_never_crash(block: Pair, data: st.DataObject) -> None:
    """They raise, or decode to other symbols of the right shape: the container's checksum tells."""
    symbols, classes = block
    words = bytearray(CODER.encode(symbols, classes))
    for _ in range(data.draw(st.integers(1, 4))):
        words[data.draw(st.integers(0, len(words) - 1))] ^= data.draw(st.integers(1, 255))
    _decoded_or_refused(bytes(words), classes)


@given(blocks(), st.data())
def test_cut_or_longer_words_are_refused(block: Pair, data: st.DataObject) -> None:
    symbols, classes = block
    words = CODER.encode(symbols, classes)
    cut = words[: data.draw(st.integers(0, len(words) - 1))]
    with pytest.raises(PayloadInvalid):
        CODER.decode(cut, classes)
    with pytest.raises(PayloadInvalid):
        CODER.decode(words + data.draw(st.binary(min_size=1, max_size=5)), classes)


@given(st.binary(max_size=200), blocks())
def test_random_words_never_crash(words: bytes, block: Pair) -> None:
    _decoded_or_refused(words, block[1])


@given(blocks(), blocks())
def test_other_classes_never_crash(block: Pair, other: Pair) -> None:
    _decoded_or_refused(CODER.encode(*block), other[1])


def _decoded_or_refused(words: bytes, classes: NDArray[np.int16]) -> None:
    try:
        decoded = CODER.decode(words, classes)
    except PayloadInvalid:
        return
    assert decoded.shape == classes.shape
    assert not decoded[classes < LOWEST].any()


@given(blocks())
def test_memory_beside_the_arrays_is_left_alone(block: Pair) -> None:
    """Compiled loops check no bounds: slices of larger arrays full of rubbish give what copies give."""
    symbols, classes = block
    rubbish = np.iinfo(np.int32).max
    wide = np.full((symbols.shape[0] + 2, symbols.shape[1] + 4), rubbish, np.int32)
    wide[1:-1, 2:-2] = symbols
    wide_classes = np.full(wide.shape, CLASS_LIMIT, np.int16)
    wide_classes[1:-1, 2:-2] = classes
    view, class_view = wide[1:-1, 2:-2], wide_classes[1:-1, 2:-2]
    assert CODER.encode(view, class_view) == CODER.encode(symbols, classes)
    assert np.array_equal(CODER.decode(CODER.encode(view, class_view), class_view), symbols)
    assert (wide[0] == rubbish).all()


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_fitted_tables_code_too(seed: int) -> None:
    generator = np.random.default_rng(seed)
    symbols = np.rint(generator.laplace(scale=3, size=(40, 30))).astype(np.int32)
    classes = generator.integers(LOWEST, HIGHEST + 8, symbols.shape).astype(np.int16)
    coder = BlockCoder(fitted_tables(count_symbols(symbols, classes)))
    assert np.array_equal(coder.decode(coder.encode(symbols, classes), classes), symbols)
    assert coder.ideal_bits(symbols, classes) <= CODER.ideal_bits(symbols, classes)


def test_the_least_likely_table_codes() -> None:
    """One symbol has nearly everything, and all others one slot of 4096 each."""
    frequencies = np.ones((CLASSES, ALPHABET), np.uint16)
    frequencies[:, 0] = 4096 - ESCAPE
    coder = BlockCoder(Tables(frequencies))
    symbols = np.arange(-LARGEST, LARGEST + 1, dtype=np.int32)[None].repeat(3, 0)
    classes = np.zeros(symbols.shape, np.int16)
    assert np.array_equal(coder.decode(coder.encode(symbols, classes), classes), symbols)


@given(blocks(), blocks())
def test_counts_add(block: Pair, other: Pair) -> None:
    counts = count_symbols(*block)
    assert counts.sum() == (block[1] >= LOWEST).sum()
    together = count_symbols(*other, counts.copy())
    assert np.array_equal(together, counts + count_symbols(*other))
    for symbol, cls in zip(block[0].ravel().tolist(), block[1].ravel().tolist(), strict=True):
        if LOWEST <= cls <= HIGHEST and abs(symbol) <= LARGEST:
            assert counts[cls - LOWEST, symbol + LARGEST] > 0
