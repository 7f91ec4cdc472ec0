"""Some training steps in virtual time, by the engine's own scheduler, over tiers that hold nothing.

``Residency`` decides what stays and what leaves, ``Orders`` knows what comes when, ``PrefetchScheduler`` looks ahead,
``StepStream`` steps sub-groups beside training: all are the engine's. What is written anew here is what the engine does
on its other threads: the hooks of forward and backward (``_Training``) and the arithmetic of a sub-group (``_Step``),
which fetch and release the same shards in the same order, and take time instead of computing.

One rank, micro-batches one after the other. The first steps fill the tiers; the mean of the last ones is the figure.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from infinity.config import Config
from infinity.engine.budget import Plan
from infinity.engine.prefetch import BACKLOG_SHARE, TRAINING, Orders, PrefetchScheduler
from infinity.engine.stream import Job, StepStream
from infinity.engine.substep import OPTIMIZER
from infinity.engine.unit import GRAD, GRAD_SUM, PARAM, RESIDUAL, SCRATCH, Part, PartGradients, Unit, state_kind
from infinity.errors import BudgetError
from infinity.plan.machine import Machine
from infinity.plan.order import Visit, visits
from infinity.plan.phantom import Hardware, PhantomAccelerator, PhantomArena, PhantomStore
from infinity.plan.virtual import run_virtually
from infinity.store.device import Piece
from infinity.store.order import Access, Use
from infinity.store.shard import ShardKey

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


@dataclass(frozen=True, slots=True)
class Simulated:
    """One step, once training repeats itself.

    Attributes:
        seconds: how long it takes.
        read_bytes: from NVMe.
        written_bytes: to NVMe.
        to_device: bytes from host memory to an accelerator.
        from_device: and back.
        stall_seconds: for which training waits, by cause: ``"disk"``, ``"optimizer"``.
        processor_seconds: for which the processor works.
        disk_seconds: for which the disk moves something.
        optimizer_seconds: of the processor, for the optimizer's arithmetic.
        device_peak_bytes: the most that device memory holds.
        host_peak_bytes: the most that host memory holds.
        traffic: bytes read and written by kind of shard.
    """

    seconds: float
    read_bytes: int
    written_bytes: int
    to_device: int
    from_device: int
    stall_seconds: Mapping[str, float]
    processor_seconds: float
    disk_seconds: float
    optimizer_seconds: float
    device_peak_bytes: int
    host_peak_bytes: int
    traffic: Mapping[str, tuple[int, int]]


def simulate(plan: Plan, model: nn.Module, config: Config, device: torch.device, machine: Machine, pace: Pace) -> Simulated:
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


@dataclass(frozen=True, slots=True)
class _Step(Job):
    """One sub-group: the shards that the engine's own step fetches and changes (``engine/substep.py``)."""

    training: _Training

    async def run(self, stepper: Any, pinned: Callable[[], None]) -> None:
        """Fetch them, take the time of the arithmetic, release them."""
        await self.training.step_part(self.gradients, pinned)


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
        self._states: set[ShardKey] = set()
        self._stalls = {"disk": 0.0, "optimizer": 0.0}
        self._optimizer_seconds = 0.0

    async def run(self) -> Simulated:
        """All steps; the mean of the last."""
        self._build()
        await self._load()
        marks = []
        for _ in range(NUM_STEPS):
            await self._step()
            marks.append(self._mark())
        first, last = marks[-1 - NUM_COUNTED], marks[-1]
        self._stream.withdraw()
        await self._stream.drain()
        return self._result(first, last)

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
        tier = PhantomAccelerator if self._on_accelerator else PhantomArena
        self._device = tier(int(config.hbm), self._store, distance=self._orders.unit_distance)
        for unit in plan.units:
            pieces = [Piece(part.key(PARAM), part.start, part.stop) for part in unit.parts]
            self._device.register(unit.index, unit.num_bytes, pieces)
        self._stream = StepStream(
            cast(Any, None), self._device.invalidate, unit_distance=self._orders.next_in_training
        )
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
        for position in visit.gradients:
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
                await asyncio.sleep(part.param_bytes / self._machine.from_device)
                store.counters.from_device += part.param_bytes
            store.release(part.key(kind), owner=TRAINING, dirty=True)

    async def _begin(self, units: list[Unit]) -> None:
        """Step what is final while backward goes on, or waits."""
        self._stream.submit(self._take(units), in_order_of_need=False)
        await asyncio.sleep(0)
        if not self._pace.overlaps:
            await self._wait_for(self._stream.drain())

    def _take(self, units: Any) -> list[_Step]:
        jobs = []
        for whole in (part for unit in units for part in unit.parts):
            part = self._plan.parts[whole.index]
            kind = self._gradients.pop(part.index, None)
            if kind is not None:
                jobs.append(_Step(PartGradients(part, kind, frozenset()), self))
        return jobs

    async def step_part(self, gradients: PartGradients, pinned: Callable[[], None]) -> None:
        """One sub-group, as ``SubGroupStepper.step`` does it."""
        part, store, plan = gradients.part, self._store, self._plan
        sizes = plan.format_of(part).shards(part)
        in_planes = RESIDUAL in sizes
        scratch = {SCRATCH: plan.format_of(part).in_step(part)[SCRATCH]} if in_planes else {}
        states = plan.state_format_of(part, part.step_dtype)
        names = [part.key(state_kind(name)) for name in part.state_names]
        known = [key for key in names if key in self._states]
        if states.scratch_bytes:
            scratch |= {f"{SCRATCH}.{key.kind}": states.scratch_bytes for key in known}
        read = [RESIDUAL, PARAM] if in_planes else list(plan.format_of(part).read_by_step(part))
        others = [kind for kind in sizes if kind not in read]

        async def pin_weights() -> None:
            if SCRATCH in scratch:
                await store.put(_scratch(SCRATCH), scratch[SCRATCH], owner=OPTIMIZER)
            if in_planes:
                await asyncio.gather(*(self._fetch(part.key(kind)) for kind in read))
                return
            await self._fetch(part.key(read[0]))
            for kind in others:
                await store.put(part.key(kind), sizes[kind], owner=OPTIMIZER)

        await asyncio.gather(
            pin_weights(),
            *(
                store.put(_scratch(kind), num_bytes, owner=OPTIMIZER)
                for kind, num_bytes in scratch.items()
                if kind != SCRATCH
            ),
            *(self._fetch(key) for key in [gradients.key, *known]),
        )
        pinned()
        await self._arithmetic(part, gradients, in_planes=in_planes)
        for key in names:
            if key not in self._states:
                await store.put(key, states.num_bytes(part), owner=OPTIMIZER)
                self._states.add(key)
        for kind, num_bytes in scratch.items():
            store.release(_scratch(kind), owner=OPTIMIZER)
            store.prepare(_scratch(kind), num_bytes)
        store.release(gradients.key, owner=OPTIMIZER)
        for key in [*names, *(part.key(kind) for kind in sizes)]:
            store.release(key, owner=OPTIMIZER, dirty=True)
        await store.delete(gradients.key)

    async def _fetch(self, key: ShardKey) -> None:
        await self._store.fetch(key, owner=OPTIMIZER, update=True)

    async def _arithmetic(self, part: Part, gradients: PartGradients, *, in_planes: bool) -> None:
        machine = self._machine
        state_bytes = self._plan.part_state_bytes(part)
        seconds = machine.part_seconds + state_bytes / (machine.planes if in_planes else machine.optimizer)
        self._optimizer_seconds += seconds
        await self._hardware.processor.work(seconds)

    def _mark(self) -> dict[str, Any]:
        store, hardware = self._store, self._hardware
        traffic: dict[str, tuple[int, int]] = {}
        for (_, kind), moved in store.traffic().items():
            read, written = traffic.get(kind, (0, 0))
            traffic[kind] = (read + moved.read_bytes, written + moved.written_bytes)
        return {
            "seconds": asyncio.get_running_loop().time(),
            "read": store.counters.read,
            "written": store.counters.written,
            "to_device": store.counters.to_device,
            "from_device": store.counters.from_device,
            "stalls": dict(self._stalls),
            "processor": hardware.processor.busy_seconds,
            "disk": hardware.disk.moving_seconds,
            "optimizer": self._optimizer_seconds,
            "traffic": traffic,
        }

    def _result(self, first: Mapping[str, Any], last: Mapping[str, Any]) -> Simulated:
        def mean(name: str) -> float:
            return float(last[name] - first[name]) / NUM_COUNTED

        return Simulated(
            seconds=mean("seconds"),
            read_bytes=round(mean("read")),
            written_bytes=round(mean("written")),
            to_device=round(mean("to_device")),
            from_device=round(mean("from_device")),
            stall_seconds={
                cause: (seconds - first["stalls"][cause]) / NUM_COUNTED for cause, seconds in last["stalls"].items()
            },
            processor_seconds=mean("processor"),
            disk_seconds=mean("disk"),
            optimizer_seconds=mean("optimizer"),
            device_peak_bytes=self._device.usage().peak_bytes,
            host_peak_bytes=self._store.host.usage().peak_bytes,
            traffic={
                kind: tuple(
                    round((after - before) / NUM_COUNTED)
                    for after, before in zip(moved, first["traffic"].get(kind, (0, 0)), strict=True)
                )
                for kind, moved in last["traffic"].items()
            },
        )


def _scratch(kind: str) -> ShardKey:
    return ShardKey(0, 0, kind)
