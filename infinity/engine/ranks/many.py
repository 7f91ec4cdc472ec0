"""``ManyRanks``: what several ranks need in the place of the parts of an engine on one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from infinity.config import Config
from infinity.engine.budget import Plan
from infinity.engine.collectives import Collectives
from infinity.engine.gradients import GradientSink
from infinity.engine.meeting import meet, open_another, open_control
from infinity.engine.norms import Norms
from infinity.engine.persistence import agreement
from infinity.engine.prefetch import Orders, PrefetchScheduler
from infinity.engine.ranks.elementwise import check_elementwise
from infinity.engine.ranks.failures import different_values
from infinity.engine.ranks.gathers import PlannedGathers
from infinity.engine.ranks.gradients import ReducedGradients
from infinity.engine.ranks.job import Job, OneRank
from infinity.engine.ranks.lane import Lane
from infinity.engine.ranks.norms import RankNorms
from infinity.engine.ranks.reading import JoiningReader
from infinity.engine.ranks.scheduling import PlannedScheduler
from infinity.engine.ranks.watch import Watch
from infinity.engine.slicing import Slicing
from infinity.engine.stream import StepStream
from infinity.engine.weights import WeightReader
from infinity.errors import ConfigError, ModelError, RanksError
from infinity.rank_paths import nvme_for_rank, refuse_shared_paths
from infinity.store.device import DeviceTier
from infinity.store.loop import LoopThread
from infinity.store.store import TieredStore

_IN_FLIGHT_SHARE = 8
"""What part of host memory gradients may take that are being reduced."""

_PARAMETERS = frozenset({"params", "param_names"})
"""What a group of an optimizer has beside hyper-parameters."""

_OWN_FIELDS = frozenset({"nvme", "nvme_weights", "device", "debug", "resume"})
"""What may differ between ranks: where things are, and no more."""


class ManyRanks(Job):
    """A model on several ranks.

    Args:
        config: the user's; the same on all ranks, but for where things are.
        collectives: of all ranks; its own from now on.

    Raises:
        ConfigError: the ranks' configurations differ, or two would use one directory.
        RanksError: not all ranks came.
    """

    def __init__(self, config: Config, collectives: Collectives) -> None:
        self._reductions = collectives
        self.device = collectives.device
        self._leave = contextlib.ExitStack()
        self._leave.callback(collectives.close)
        self._stop = contextlib.ExitStack()
        self._lanes: list[Lane] = []
        self._planned: PlannedGathers | None = None
        try:
            host = collectives.hosts[collectives.job_rank]
            self._agree_on(config)
            own = nvme_for_rank(config, collectives.global_rank, collectives.job_size, collectives.local_rank, host)
            paths = collectives.exchange([str(path) for path in own.nvme], "telling each other where state is")
            refuse_shared_paths(collectives.hosts, paths)
            for path, given in zip(own.nvme, config.nvme, strict=True):
                if path.parent == given and given.is_dir() and not path.exists():
                    path.mkdir(mode=0o700)
                    self._leave.callback(_remove_empty, path)
            self.config = own.model_copy(update={"speculation": "off", "accumulation": "horizontal"})
            self.slicing = Slicing(collectives.rank, collectives.num_ranks, config.stage)
            seconds = config.ranks_timeout_seconds
            self._gathering = open_another(collectives, seconds=seconds)
            self._leave.callback(self._gathering.close)
            agreeing = open_control(collectives, seconds=seconds)
            self._leave.callback(agreeing.close)  # commits meet beside training, in an order of their own
            place = own.nvme[0] if own.nvme else Path()
            agreed = self.ranks = agreement.RanksAgreement(
                agreeing, rank=collectives.job_rank, num_ranks=collectives.job_size, path=place
            )
            self._gathers_lane = self._open_lane(self._gathering, "infinity-gathers")
            self._reductions_lane = self._open_lane(collectives, "infinity-reductions")
            watched = [*self._lanes, agreed]
            self._stop.callback(Watch(open_control(collectives, seconds=seconds), watched).close)
        except BaseException:
            self.stop()
            self.leave()
            raise

    def check_plan(self, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
        """See ``Job``."""
        layout = [
            [slot.name, list(slot.shape), slot.offset, str(part.dtype), part.num_elements, part.stepped]
            for part in plan.whole_parts
            for slot in part.slots
        ]
        here = self._reductions.job_rank
        mine = [type(optimizer).__name__, len(layout), xxhash.xxh3_64_hexdigest(repr(layout).encode())]
        for rank, other in enumerate(self._exchange(mine, "comparing models")):
            if other != mine:
                raise ModelError(
                    f"rank {rank} has another model or optimizer ({other[0]}, {other[1]} parameters) than rank "
                    f"{here} ({mine[0]}, {mine[1]} parameters), or divides it otherwise; build the same "
                    "on all ranks"
                )
        if self.slicing.cuts_states:
            check_elementwise(optimizer, self.slicing.stage)

    def share(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """See ``Job``: as ``DistributedDataParallel`` does it, in place."""
        shared, phase = value.to(self.device).contiguous(), f"sharing {name}"
        self._reductions_lane.run(phase, lambda: self._reductions.share(shared, phase=phase))
        return value if shared is value else value.copy_(shared)

    def common(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """See ``Job``."""
        return self.share(name, value.detach().to(self.device).clone(memory_format=torch.contiguous_format))

    def build_scheduler(self, *arguments: Any, **others: Any) -> PrefetchScheduler:
        """One that plans where units are all-gathered."""
        kind = PlannedScheduler if self.slicing.cuts_states else PrefetchScheduler
        return kind(*arguments, **others)

    def build_gathers(
        self,
        scheduler: PrefetchScheduler,
        plan: Plan,
        device: DeviceTier,
        store: TieredStore,
        orders: Orders,
        stream: StepStream,
    ) -> None:
        """See ``Job``."""
        if isinstance(scheduler, PlannedScheduler):
            self._planned = scheduler.gathers = PlannedGathers(
                plan.units,
                plan.parts,
                device,
                store,
                orders,
                stream,
                self._gathers_lane,
                self._gathering,
                budget_bytes=self.config.hbm,
                depth=self.config.prefetch,
                keeps=self.slicing.keeps_gathered,
            )

    async def before_step(self, device: DeviceTier, unit: int) -> None:
        """See ``Job``."""
        await (device.invalidate(unit) if self._planned is None else self._planned.forgotten(unit))

    async def after_change(self, device: DeviceTier, unit: int) -> None:
        """See ``Job``."""
        await (device.invalidate(unit) if self._planned is None else self._planned.invalidate(unit))

    def build_gradients(
        self, loop: LoopThread, store: TieredStore, scheduler: PrefetchScheduler, *, plan: Plan, **others: Any
    ) -> GradientSink:
        """See ``Job``."""
        waiting = plan.parts if self.slicing.cuts_gradients else plan.whole_parts
        needed = plan.smallest_ram(uploads=self._reductions.device.type != "cpu")
        spare = max(self.config.ram - needed, 0)
        return ReducedGradients(
            loop,
            store,
            scheduler,
            waiting,
            whole=plan.whole_parts,
            stored=plan.parts,
            lane=self._reductions_lane,
            collectives=self._reductions,
            widens=self.config.reduction_dtype == "fp32",
            names=[unit.name for unit in plan.units],
            in_flight_bytes=min(spare, self.config.ram // _IN_FLIGHT_SHARE),
            **others,
        )

    def build_norms(self, norm_type: float | None, *, plan: Plan, **others: Any) -> Norms[Any]:
        """Those of all ranks together."""
        slices = [part.cut(self.slicing.rank, self.slicing.num_ranks) for part in plan.whole_parts]

        def exchange(fact: Any) -> list[Any]:
            return self._reductions.sharing(self._exchange(fact, "joining norms of gradients"))

        return RankNorms(norm_type, slices=slices, exchange=exchange, **others)

    def build_reader(self, loop: LoopThread, store: TieredStore, *, plan: Plan, **others: Any) -> WeightReader:
        """See ``Job``."""
        if not self.slicing.cuts_states:
            return WeightReader(loop, store, plan.parts, **others)
        return JoiningReader(
            loop,
            store,
            plan.parts,
            whole=plan.whole_parts,
            lane=self._reductions_lane,
            collectives=self._reductions,
            **others,
        )

    def begin_step(self, num_steps: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """See ``Job``."""
        values = [{name: _short(value) for name, value in group.items() if name not in _PARAMETERS} for group in groups]
        phase = f"step {num_steps + 1}"
        digest = xxhash.xxh3_64_hexdigest(repr(values).encode())

        def compare() -> None:
            if len(set(self._reductions.exchange(digest, phase))) > 1:
                raise RanksError(f"{phase}: {different_values(self._reductions.exchange(values, phase))}")

        self._reductions_lane.run(phase, compare)

    def all_have(self, has: bool) -> bool:
        """See ``Job``."""
        return all(self._exchange(has, "taking the next batch"))

    @property
    def collective_bytes(self) -> dict[str, int]:
        """See ``Job``."""
        return dict(self._reductions.moved_bytes + self._gathering.moved_bytes)

    def stop(self) -> None:
        """See ``Job``."""
        self._stop.close()

    def leave(self) -> None:
        """See ``Job``."""
        if any(lane.is_stuck for lane in self._lanes):
            self._leave.pop_all()  # a group in which a thread waits cannot be left; the process' end does it
        self._leave.close()

    def _exchange(self, fact: Any, phase: str) -> list[Any]:
        """What each rank has to say, in the place of the program where all ranks call it."""
        return self._reductions_lane.run(phase, lambda: self._reductions.exchange(fact, phase))

    def _open_lane(self, collectives: Collectives, name: str) -> Lane:
        lane = Lane(collectives, name)
        self._lanes.append(lane)
        self._stop.callback(lambda: lane.close(self.why_closed))
        return lane

    def _agree_on(self, config: Config) -> None:
        here = self._reductions.job_rank
        document = config.model_dump(mode="json", exclude=set(_OWN_FIELDS))
        mine = {name: value for name, value in document.items() if not name.startswith("io_")}
        for rank, other in enumerate(self._reductions.exchange(mine, "comparing configurations")):
            different = [name for name in mine if other.get(name) != mine[name]]
            if different:
                name = different[0]
                raise ConfigError(
                    f"{name}: rank {here} has {mine[name]!r}, rank {rank} has {other.get(name)!r}; "
                    "give all ranks the same configuration, but for where state is"
                )
        if config.accumulation == "vertical":
            raise ConfigError("accumulation='vertical' is for one rank; leave it 'horizontal' on several")


def _remove_empty(path: Path) -> None:
    with contextlib.suppress(OSError):  # it holds something
        path.rmdir()


def _short(value: Any) -> str:
    """A hyper-parameter in words that are the same on all ranks where it is."""
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    return repr(value) if isinstance(value, (int, float, str, tuple, list, type(None))) else type(value).__name__


def join_job(config: Config, device: torch.device, group: Any = None) -> Job:
    """The job that this process is part of: of the ranks of ``group``, or of all that torchrun, or the user, started.

    Raises:
        ConfigError: the ranks' configurations differ, or there is no library for their devices.
        RanksError: not all ranks came.
    """
    seconds, num_sharing = config.ranks_timeout_seconds, config.shard_ranks
    ranks = meet(device, seconds=seconds, group=group, num_sharing=num_sharing)
    return OneRank(config, device) if ranks is None else ManyRanks(config, ranks)
