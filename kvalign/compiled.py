"""Numba's compiler as kvalign uses it: vectors of 512 bits where the processor runs them at full clock.

LLVM keeps to 256 bits for the sake of processors that slow down with wider ones. From the generation with float16
arithmetic in its vectors on they do not, and attention on codes is 15 % quicker with 512 (docs/log.md). The setting is
Numba's, so other code that it compiles in this process, after this import, has wide vectors too; what a user set by
NUMBA_CPU_FEATURES stands.
"""

import numba
from llvmlite import binding
from numba import njit, prange

__all__ = ["WIDE_VECTORS", "njit", "numba", "prange"]

_FEATURES = binding.get_host_cpu_features()

WIDE_VECTORS: bool = (
    numba.config.CPU_FEATURES is None and bool(numba.config.ENABLE_AVX) and bool(_FEATURES.get("avx512fp16"))
)
"""Whether compiled code uses vectors of 512 bits."""

if WIDE_VECTORS:
    numba.config.CPU_FEATURES = f"{_FEATURES.flatten()},-prefer-256-bit"
