"""Attention straight on compressed codes. reference.py says what is right; cpu.py and cuda.py are quick.

This file picks by where the tensors are: `encode` and `coefficients` take the same whoever computes them.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from torch import Tensor

from kvalign.kernels import cpu, reference
from kvalign.resident.layout import PAGE_TOKENS
from kvalign.resident.plan import SidePlan


def encode(side: SidePlan, x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole pages of tokens as codes; see reference.encode."""
    if x.shape[-2] % PAGE_TOKENS:
        raise ValueError(f"{x.shape[-2]} tokens are not whole pages of {PAGE_TOKENS}")
    return (cpu if x.device.type == "cpu" else reference).encode(side, x)


def coefficients(side: SidePlan, pages: Tensor, scales: Tensor) -> Tensor:
    """What pages stand for; see reference.coefficients."""
    kernel = cpu if pages.device.type == "cpu" else triton_kernels() if pages.device.type == "cuda" else None
    return (kernel or reference).coefficients(side, pages, scales)


@cache
def triton_kernels() -> ModuleType | None:
    """cuda.py; None where Triton is not installed, whose import it needs."""
    return import_module("kvalign.kernels.cuda") if find_spec("triton") else None
