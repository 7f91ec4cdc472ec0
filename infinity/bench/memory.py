"""What the engine does with bytes in host memory: copy them, step an optimizer on them, checksum them.

The figures say what the tiers are up against: a disk faster than ``optimizer`` waits for the processor. One thread
calls; ``memcpy`` and ``optimizer`` then use as many threads as PyTorch does, a checksum has no helpers. The memory is
the benchmark's own, larger than processor caches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import xxhash

from infinity.io.memory import as_bytes

_PIECE_BYTES = 32 << 20
_PARAMETER_ELEMENTS = 1 << 20
OPTIMIZER_BYTES_PER_PARAMETER = 16
"""fp32: a parameter, its gradient and AdamW's two moments."""


@dataclass(frozen=True, slots=True)
class MemoryRoute:
    """One kind of work.

    Attributes:
        name: as people write it.
        words: what does it, and with how many threads.
        piece_bytes: bytes of one piece of it.
        size_bytes: bytes that it goes through in turn.
        start: prepares the memory, which others use as well, and returns what does the next piece: the bytes of it.
    """

    name: str
    words: str
    piece_bytes: int
    size_bytes: int
    start: Callable[[], Callable[[], int]]


def memory_routes(source: torch.Tensor, target: torch.Tensor) -> list[MemoryRoute]:
    """All of them.

    Args:
        source: host ``uint8``, which is read.
        target: host ``uint8``, which is overwritten; page aligned.
    """
    return [_memcpy(source, target), _optimizer(target), _checksum(source)]


def _pieces(memory: torch.Tensor, num_bytes: int) -> list[torch.Tensor]:
    return [memory[start : start + num_bytes] for start in range(0, memory.numel() - num_bytes + 1, num_bytes)]


def _memcpy(source: torch.Tensor, target: torch.Tensor) -> MemoryRoute:
    piece_bytes = min(_PIECE_BYTES, source.numel(), target.numel())

    def start() -> Callable[[], int]:
        sources = itertools.cycle(_pieces(source, piece_bytes))
        targets = itertools.cycle(_pieces(target, piece_bytes))
        return lambda: next(targets).copy_(next(sources)).numel()

    return MemoryRoute("memcpy", f"torch x {torch.get_num_threads()}", piece_bytes, target.numel(), start)


def _optimizer(memory: torch.Tensor) -> MemoryRoute:
    """AdamW on parameters, gradients and moments that lie in ``memory``."""
    num_elements = min(_PARAMETER_ELEMENTS, memory.numel() // OPTIMIZER_BYTES_PER_PARAMETER)
    piece_bytes = num_elements * OPTIMIZER_BYTES_PER_PARAMETER

    def step_on(piece: torch.Tensor) -> Callable[[], object]:
        # Values of ordinary size: arithmetic on the tiny ones that any bytes may hold is slow on some processors.
        value, gradient, first, second = piece.view(torch.float32).split(num_elements)
        for tensor in (value, gradient, first, second):
            tensor.fill_(0.01)
        parameter = torch.nn.Parameter(value)
        parameter.grad = gradient
        optimizer = torch.optim.AdamW([parameter], lr=1e-4)
        optimizer.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": first, "exp_avg_sq": second}
        return optimizer.step

    def start() -> Callable[[], int]:
        steps = itertools.cycle([step_on(piece) for piece in _pieces(memory, piece_bytes)])

        def step() -> int:
            next(steps)()
            return piece_bytes

        return step

    return MemoryRoute("optimizer", f"AdamW x {torch.get_num_threads()}", piece_bytes, memory.numel(), start)


def _checksum(memory: torch.Tensor) -> MemoryRoute:
    piece_bytes = min(_PIECE_BYTES, memory.numel())

    def start() -> Callable[[], int]:
        pieces = itertools.cycle([as_bytes(piece) for piece in _pieces(memory, piece_bytes)])

        def checksum() -> int:
            piece = next(pieces)
            xxhash.xxh3_64_intdigest(piece)
            return len(piece)

        return checksum

    return MemoryRoute("checksum", "xxh3 x 1", piece_bytes, memory.numel(), start)
