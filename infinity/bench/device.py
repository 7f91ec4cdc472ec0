"""The device tier as the benchmark sees it: memory, and copies between it and host memory.

Where the device is the CPU, its tier is a bounded part of host memory. NVMe reads then go straight into it, and a
resident shard is copied into it by the host tier's copying thread: the same calls as the engine's. The way back is
measured with the same thread. (The engine lets PyTorch copy gradients, with as many threads as that has; on a busy
machine such a team's pace says more about its neighbours than about memory, and its waiting shows as CPU time.)
On an accelerator copies run from and to pinned memory on a stream for each direction, since links carry both at once;
an event says when each has ended, and is polled at the engine's pace.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

import torch

from infinity.io.memory import allocate
from infinity.store.host import HostTier

_POLL_SECONDS = 0.0002


class Device(ABC):
    """Device memory and the way to it.

    Attributes:
        name: for people.
        copies: how bytes get there, in words.
        copier: the same in a word or two, for a table.
        memory: ``uint8``, shape ``(num_bytes,)``.
        in_host_memory: whether files can be read straight into it.
    """

    name: str
    copies: str
    copier: str
    memory: torch.Tensor
    in_host_memory: bool

    @abstractmethod
    async def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy host memory to device memory; neither is touched after the end, even when cancelled."""

    @abstractmethod
    async def download(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy device memory to host memory; neither is touched after the end, even when cancelled."""


class HostArena(Device):
    """The CPU: the device tier is an arena in host memory.

    Args:
        num_bytes: size of the memory.
        host: the host tier.
    """

    in_host_memory = True
    copies = "copies within host memory"
    copier = "copy thread"

    def __init__(self, num_bytes: int, host: HostTier) -> None:
        self.name = "cpu, whose device tier is host memory"
        self.memory = allocate(num_bytes)
        self._host = host

    async def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """What a gather does with a resident shard."""
        await self._host.copy(source, target)

    async def download(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """The same way back."""
        await self._host.copy(source, target)


class Accelerator(Device):
    """Any accelerator that ``torch.accelerator`` names.

    Args:
        num_bytes: size of the memory.
        device: the accelerator.
    """

    in_host_memory = False

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.name = f"{device} {name}".strip()
        self.copies = "pinned copies with events" if device.type == "cuda" else "copies with events"
        self.copier = "pinned copies" if device.type == "cuda" else "copies"
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._device = device
        self._upward, self._downward = torch.Stream(device=device), torch.Stream(device=device)
        # The memory may still be in use by whoever had it before, on the current stream.
        torch.accelerator.synchronize(device)

    async def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """As the engine gathers."""
        await self._copy(source, target, self._upward)

    async def download(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """The same way back, on the other stream."""
        await self._copy(source, target, self._downward)

    async def _copy(self, source: torch.Tensor, target: torch.Tensor, stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)
        target.copy_(source, non_blocking=True)
        event = torch.Event(device=self._device)
        event.record(stream)
        cancelled = False
        while not event.query():
            try:
                await asyncio.sleep(_POLL_SECONDS)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError


def open_device(device: torch.device, num_bytes: int, host: HostTier) -> Device:
    """The device tier of the engine on ``device``, with ``num_bytes`` of memory."""
    return HostArena(num_bytes, host) if device.type == "cpu" else Accelerator(num_bytes, device)
