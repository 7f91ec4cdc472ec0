"""``Contents``: what belongs into the files. New bytes are written through a channel, read back, and compared."""

from __future__ import annotations

import functools
import time

import torch

from infinity.bench.passes import ALL, run_pass
from infinity.bench.pattern import Pattern
from infinity.bench.routes import Check, Request, Traffic
from infinity.bench.tiers import Tiers
from infinity.bench.volumes import Channel
from infinity.console.interrupt import StopRequest
from infinity.io.completion import call_in_thread

_WINDOW_BYTES = 16 << 20


class Contents:
    """The bytes of all files, which ``tiers.source`` holds as well.

    Args:
        tiers: the tiers.
        stop: ends any of this after the requests in flight.

    Attributes:
        check_seconds: how long it took to check all of the files the last time.
    """

    def __init__(self, tiers: Tiers, stop: StopRequest) -> None:
        self.check_seconds = 0.0
        self._tiers = tiers
        self._stop = stop
        self._generation = 0
        self._pattern = Pattern(0)
        self._window_start = 0

    async def make(self) -> None:
        """Fill the source for the first time."""
        await self._tiers.fill_source(self._pattern)

    async def restore(self, channel: Channel, traffic: Traffic) -> None:
        """Write all of the source to the files."""
        await self._write(channel, traffic, 0, self._tiers.share_bytes)

    async def verify_window(self, channel: Channel, traffic: Traffic) -> None:
        """New bytes in a part of each file, another one each time: at least a round of blocks.

        Raises:
            MismatchError: what came back is not what was written.
        """
        share_bytes = self._tiers.share_bytes
        num_bytes = min(share_bytes, max(_WINDOW_BYTES, traffic.point.round_bytes))
        start = self._window_start if self._window_start + num_bytes <= share_bytes else 0
        self._window_start = start + num_bytes
        await self._rewrite(channel, traffic, start, start + num_bytes)
        await self._check(channel, traffic, start, start + num_bytes)

    async def verify_all(self, channel: Channel, traffic: Traffic) -> None:
        """New bytes in all files.

        Raises:
            MismatchError: what came back is not what was written.
        """
        await self._rewrite(channel, traffic, 0, self._tiers.share_bytes)
        await self.check_all(channel, traffic)

    async def check_all(self, channel: Channel, traffic: Traffic) -> None:
        """Read all files, and compare them with what was written last; and a round of it by way of the device.

        Raises:
            MismatchError: what came back is not what was written.
        """
        began = time.perf_counter()
        await self._check(channel, traffic, 0, self._tiers.share_bytes)
        await run_pass(traffic.check_device(channel, self._check_of), ALL, self._stop)
        self.check_seconds = time.perf_counter() - began

    async def _rewrite(self, channel: Channel, traffic: Traffic, start: int, stop: int) -> None:
        self._generation += 1
        self._pattern = Pattern(self._generation)
        await self._tiers.fill_source(self._pattern, start, stop)
        await self._write(channel, traffic, start, stop)

    async def _write(self, channel: Channel, traffic: Traffic, start: int, stop: int) -> None:
        await run_pass(traffic.write_window(channel, start, stop), ALL, self._stop, channel.sync)

    async def _check(self, channel: Channel, traffic: Traffic, start: int, stop: int) -> None:
        await channel.drop_page_cache()
        await run_pass(traffic.check_window(channel, start, stop, self._check_of), ALL, self._stop)

    def _check_of(self, request: Request) -> Check:
        async def check(place: torch.Tensor, source: str) -> None:
            got, volume = place.numpy(), request.volume
            compare = functools.partial(self._pattern.check, path=volume.file, source=source)
            await call_in_thread(lambda: compare(got, volume.index, request.offset))

        return check
