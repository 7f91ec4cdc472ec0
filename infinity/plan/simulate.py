"""Some training steps in virtual time, by the engine's own scheduler, over tiers that hold nothing.

``Residency`` decides what stays and what leaves, ``Orders`` knows what comes when, ``PrefetchScheduler`` looks ahead,
``StepStream`` steps sub-groups beside training: all are the engine's. What is written anew here is what the engine does
on its other threads: the hooks of forward and backward (``_Training``) and the step of a sub-group (``stepping.py``),
which fetch and release the same shards in the same order, and take time instead of computing.

One rank, micro-batches one after the other. The first steps fill the tiers; the mean of the last ones is the figure.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from infinity.config import Config
from infinity.engine.budget import Plan
from infinity.engine.prefetch import BACKLOG_SHARE, TRAINING, Orders, PrefetchScheduler
from infinity.engine.stream import StepStream
from infinity.engine.unit import GRAD, GRAD_SUM, PARAM, PartGradients, Unit
from infinity.errors import BudgetError
from infinity.plan.figures import Mark, Simulated, mean_step
from infinity.plan.machine import Machine
from infinity.plan.order import Visit, visits
from infinity.plan.phantom import Hardware, PhantomAccelerator, PhantomArena, PhantomStore
from infinity.plan.stepping import PhantomStep, PhantomStepper
from infinity.plan.virtual import run_virtually
from infinity.store.device import Piece
from infinity.store.order import Use

NUM_STEPS, NUM_COUNTED = 6, 3
FORWARD_SHARE, RECOMPUTED_SHARE = 1 / 3, 1 / 4
"""Forward's part of the arithmetic of a micro-batch; where backward computes the forward again, too."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How a step is taken, and what it costs beside the bytes.

    Attributes:
        compute_seconds: forward and backward of all micro-batches of a step.
        num_backwards: micro-batches.
        overlaps: whether steps run beside training.
        under_backward: whether they begin there.
    """

    compute_seconds: float
    num_backwards: int = 1
    overlaps: bool = True
    under_backward: bool = True


def simulate(
    plan: Plan, model: nn.Module, config: Config, device: torch.device, machine: Machine, pace: Pace
) -> Simulated:
    """Take some steps.

    Args:
        plan: the engine's, of one rank.
        model: the user's.
        config: the budgets.
        device: where it trains.
        machine: how fast everything is.
        pace: how a step is taken.
    """
    return run_virtually(_Training(plan, model, config, device, machine, pace).run())


class _Scheduler(PrefetchScheduler):
    """The engine's, called from its own loop. Its training thread is a task there."""

    async def gather_here(self, unit: int, *, in_backward: bool) -> list[tuple[str, float]]:
        """As ``gather``; what was waited for, until when."""
        causes: list[tuple[str, float]] = []
        await self._gather(unit, causes, in_backward=in_backward)
        return causes

    def release_here(self, unit: int) -> None:
        """As ``release``."""
        self._release(unit, None)

    def begin_here(self) -> None:
        """As ``begin_forward``."""
        self._begin_forward(True)


class _Training:
    """What the training thread and the optimizer do, in virtual time."""

    def __init__(
        self, plan: Plan, model: nn.Module, config: Config, device: torch.device, machine: Machine, pace: Pace
    ) -> None:
        self._plan, self._config, self._machine, self._pace = plan, config, machine, pace
        self._visits = visits(model, plan.units)
        self._on_accelerator = device.type != "cpu"
        seconds = pace.compute_seconds / pace.num_backwards
        forward = RECOMPUTED_SHARE if config.recompute else FORWARD_SHARE
        self._seconds = (seconds * forward, seconds * (1 - forward))
        self._gradients: dict[int, str] = {}
        self._come: set[int] = set()  # the parts that got gradients in this backward
        self._stalls = {"disk": 0.0, "optimizer": 0.0}

    async def run(self) -> Simulated:
        """All steps; the mean of the last."""
        self._build()
        try:
            await self._load()
            marks = []
            for _ in range(NUM_STEPS):
                await self._step()
                marks.append(self._mark())
            return mean_step(
                marks[-1 - NUM_COUNTED],
                marks[-1],
                NUM_COUNTED,
                device_peak_bytes=self._device.usage().peak_bytes,
                host_peak_bytes=self._store.host.usage().peak_bytes,
            )
        finally:
            await self._stream.aclose()
            await self._device.aclose()
            await self._store.aclose()

    def _build(self) -> None:
        plan, config, pace = self._plan, self._config, self._pace
        hardware = self._hardware = Hardware(self._machine, block_bytes=int(config.io_block_bytes))
        self._orders = Orders(plan.units, plan.parts, plan.step_keys, under_backward=pace.under_backward)
        self._store = PhantomStore(
            int(config.ram),
            hardware,
            has_nvme=bool(config.nvme),
            distance=self._orders.shard_distance,
            on_room=lambda: self._orders.look_ahead(),
        )
        self._stepper = PhantomStepper(plan, self._store)
        tier = PhantomAccelerator if self._on_accelerator else PhantomArena
        self._device = tier(int(config.hbm), self._store, distance=self._orders.unit_distance)
        for unit in plan.units:
            pieces = [Piece(part.key(PARAM), part.start, part.stop) for part in unit.parts]
            self._device.register(unit.index, unit.num_bytes, pieces)
        self._stream = StepStream(cast(Any, None), self._device.invalidate, unit_distance=self._orders.next_in_training)
        reads_ahead = pace.overlaps or not pace.under_backward
        step_bytes = [plan.step_bytes(part) for part in plan.parts if part.stepped]
        self._scheduler = _Scheduler(
            cast(Any, None),
            self._store,
            self._device,
            self._orders,
            plan.units,
            plan.parts,
            self._stream,
            cast(Any, None),
            depth=config.prefetch,
            ahead_bytes=max(step_bytes, default=0) if reads_ahead else 0,
            backlog_bytes=int(config.ram) // BACKLOG_SHARE,
        )

    async def _load(self) -> None:
        """Weights get their first values, part by part."""
        for part in self._plan.parts:
            sizes = self._plan.format_of(part).shards(part)
            for kind, num_bytes in sizes.items():
                await self._store.put(part.key(kind), num_bytes, owner="start")
            for kind in sizes:
                self._store.release(part.key(kind), owner="start", dirty=True)
        self._scheduler.start()

    async def _step(self) -> None:
        pace = self._pace
        for number in range(pace.num_backwards):
            self._scheduler.begin_here()
            await self._forward()
            await self._backward(is_final=number == pace.num_backwards - 1)
        if not pace.under_backward:
            await self._wait_for(self._stream.drain())
        await asyncio.sleep(self._machine.step_seconds)
        self._stream.submit(self._take(self._plan.units), in_order_of_need=pace.overlaps)
        self._scheduler.end_cycle()
        if not pace.overlaps:
            await self._wait_for(self._stream.drain())

    async def _forward(self) -> None:
        for visit in self._visits:
            if visit.begins:
                await self._gather(visit.unit, in_backward=False)
                await self._work(self._seconds[0] * visit.share)
            else:
                self._scheduler.release_here(visit.unit.index)

    async def _backward(self, *, is_final: bool) -> None:
        late: list[Unit] = []
        ahead: Visit | None = None
        self._come.clear()
        backward = self._visits[::-1]
        for visit, following in zip(backward, [*backward[1:], None], strict=True):
            if not visit.begins:
                if visit.reads_backward and visit is not ahead:
                    await self._gather(visit.unit, in_backward=True)
                continue
            await self._work(self._seconds[1] * visit.share)
            await self._take_gradients(visit)
            # The gradient of what a module gets is that of what the one before returns, whose hook comes first.
            if following is not None and not following.begins and following.reads_backward:
                with contextlib.suppress(BudgetError):  # then what is held so is given up first
                    await self._gather(following.unit, in_backward=True)
                    ahead = following
            if visit.reads_backward:
                self._scheduler.release_here(visit.unit.index)
                if visit.is_last and is_final and self._pace.under_backward:
                    await self._begin([visit.unit])
            elif visit.is_last:
                late.append(visit.unit)
        if is_final and self._pace.under_backward:
            await self._begin(late)

    async def _gather(self, unit: Unit, *, in_backward: bool) -> None:
        clock = asyncio.get_running_loop().time
        begun = clock()
        pending = asyncio.get_running_loop().create_task(self._note_optimizer(unit))
        await self._scheduler.gather_here(unit.index, in_backward=in_backward)
        optimizer_seconds = await pending
        self._stalls["optimizer"] += optimizer_seconds
        self._stalls["disk"] += max(clock() - begun - optimizer_seconds, 0.0)
        await asyncio.sleep(0)
        await self._work(self._machine.gather_seconds)

    async def _note_optimizer(self, unit: Unit) -> float:
        """For how long a unit waits for its own step."""
        clock = asyncio.get_running_loop().time
        begun = clock()
        await self._stream.ready(unit.index)
        return clock() - begun

    async def _wait_for(self, what: Any) -> None:
        clock = asyncio.get_running_loop().time
        begun = clock()
        await what
        self._stalls["optimizer"] += clock() - begun

    async def _work(self, seconds: float) -> None:
        """Training's own arithmetic. On the CPU the optimizer's waits for it, and it for the optimizer's."""
        server = self._hardware.accelerator if self._on_accelerator else self._hardware.processor
        await server.work(seconds)

    async def _take_gradients(self, visit: Visit) -> None:
        """The gradients of a module come, those of its last part first (``engine/gradients.py``)."""
        store = self._store
        for position, num_elements in visit.gradients:
            part = self._plan.parts[visit.unit.parts[position].index]
            if not part.stepped:
                continue
            self._scheduler.touch(Use.GRADIENT, part.index)
            kind = self._gradients.get(part.index)
            if part.index in self._come:  # more of the same backward
                assert kind is not None
                await store.fetch(part.key(kind), owner=TRAINING, update=True)
            elif kind is None:
                kind = GRAD
                await store.put(part.key(GRAD), part.param_bytes, owner=TRAINING)
            elif kind == GRAD and part.sum_dtype != part.compute_dtype:
                await store.fetch(part.key(GRAD), owner=TRAINING, update=True)
                kind = GRAD_SUM
                await store.put(part.key(kind), part.num_bytes(part.sum_dtype), owner=TRAINING)
                store.release(part.key(GRAD), owner=TRAINING, dirty=True)
                await store.delete(part.key(GRAD))
            else:
                await store.fetch(part.key(kind), owner=TRAINING, update=True)
            self._gradients[part.index] = kind
            self._come.add(part.index)
            if self._on_accelerator:
                num_bytes = num_elements * part.compute_dtype.itemsize
                await asyncio.sleep(num_bytes / self._machine.from_device)
                store.counters.from_device += num_bytes
            store.release(part.key(kind), owner=TRAINING, dirty=True)

    async def _begin(self, units: list[Unit]) -> None:
        """Step what is final while backward goes on, or waits."""
        self._stream.submit(self._take(units), in_order_of_need=False)
        await asyncio.sleep(0)
        if not self._pace.overlaps:
            await self._wait_for(self._stream.drain())

    def _take(self, units: Any) -> list[PhantomStep]:
        jobs = []
        for whole in (part for unit in units for part in unit.parts):
            part = self._plan.parts[whole.index]
            kind = self._gradients.pop(part.index, None)
            if kind is not None:
                jobs.append(PhantomStep(PartGradients(part, kind, frozenset()), self._stepper))
        return jobs

    def _mark(self) -> Mark:
        store, hardware = self._store, self._hardware
        traffic: dict[str, tuple[int, int]] = {}
        for (_, kind), moved in store.traffic().items():
            read, written = traffic.get(kind, (0, 0))
            traffic[kind] = (read + moved.read_bytes, written + moved.written_bytes)
        totals = {
            "seconds": asyncio.get_running_loop().time(),
            "read_bytes": store.counters.read,
            "written_bytes": store.counters.written,
            "to_device": store.counters.to_device,
            "from_device": store.counters.from_device,
            "processor_seconds": hardware.processor.busy_seconds,
            "disk_seconds": hardware.disk.moving_seconds,
            "optimizer_seconds": self._stepper.busy_seconds,
        }
        return Mark(totals, dict(self._stalls), traffic, store.places())
