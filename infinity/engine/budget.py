"""The arithmetic of start-up: what a model's state takes, and the smallest budgets that can train it.

The smallest budgets are also the deadlock argument's (``store/pool.py``): they are the most that one holder can need
while it waits for nobody else.

* ``hbm``: the units that a module and those around it use at the same time, for the worst path down the module tree.
* ``ram``: the larger of a step's need (all shards of one sub-group, and what its weights are made in) and a backward's
  (the gradients of one unit; while a second backward promotes them, both forms of one part's), plus one parameter shard
  to upload where the device is not host memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import ByteSize
from torch import nn

from infinity.config import Config
from infinity.engine.formats import FormatOf, with_masters
from infinity.engine.partition import lay_out_units
from infinity.engine.planar import with_planes
from infinity.engine.precision import Precision, precision_of
from infinity.engine.slicing import ALONE, Slicing
from infinity.engine.states import StateFormatOf, scratch_kind, states_as
from infinity.engine.tiling import advice
from infinity.engine.unit import GATHERED, GRAD, GRAD_SUM, Part, Unit, state_kind
from infinity.engine.wrap import plan_compiled_units, plan_units
from infinity.errors import BudgetError
from infinity.store.shard import ShardKey

PLANES_PAY_BELOW = 2
"""State over host memory from which on planes are worth their arithmetic. Two cores, 2.5 GB/s, 116M parameters, a step
in planes over one with masters, at few and at many tokens: 1.26 and 1.04 with memory for three quarters of the state,
1.0 and 1.08 for half of it, 0.91 and 1.07 for a quarter."""

_MIN_SUB_GROUP_BYTES, _MAX_SUB_GROUP_BYTES = 32 << 20, 256 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of everything, before anything is stored.

    Attributes:
        units: all units.
        parts: all parts as this rank stores them, numbered across units.
        precision: the dtypes.
        format_of: how the weights of each part are stored.
        state_format_of: how its optimizer states are.
        slicing: what of the state this rank has.
    """

    units: Sequence[Unit]
    parts: Sequence[Part]
    precision: Precision
    format_of: FormatOf
    state_format_of: StateFormatOf
    slicing: Slicing = ALONE

    @property
    def whole_parts(self) -> list[Part]:
        """All parts, whole."""
        return [part for unit in self.units for part in unit.parts]

    def whole(self, part: Part) -> Part:
        """The whole of a part."""
        return self.units[part.unit].parts[part.position]

    def shard_bytes(self, part: Part) -> dict[str, int]:
        """The shards that a part may have: bytes by kind."""
        return self.format_of(part).at_most(part) | self._other_bytes(part)

    def step_keys(self, part: Part) -> list[ShardKey]:
        """The shards whose bytes a step of this part needs, as far as they exist; others are only written."""
        return [part.key(kind) for kind in [*self.format_of(part).read_by_step(part), *self._other_bytes(part)]]

    def part_state_bytes(self, part: Part) -> int:
        """All state of a part, as a rule; gradients count once, as one backward leaves them."""
        others = sum(size for kind, size in self._other_bytes(part).items() if kind != GRAD_SUM)
        return sum(self.format_of(part).shards(part).values()) + others

    def _other_bytes(self, part: Part) -> dict[str, int]:
        """The shards that a part may have beside its weights."""
        if not part.stepped:
            return {}
        waiting = part if self.slicing.cuts_gradients else self.whole(part)
        sizes = {GRAD: waiting.param_bytes}
        if part.sum_dtype != part.compute_dtype:
            sizes[GRAD_SUM] = waiting.num_bytes(part.sum_dtype)
        state_bytes = self.state_format_of(part, part.step_dtype).num_bytes(part)
        return sizes | {state_kind(name): state_bytes for name in part.state_names}

    @property
    def state_bytes(self) -> int:
        """All state of the model: parameters, master weights, gradients and optimizer states."""
        return sum(self.part_state_bytes(part) for part in self.parts)

    @property
    def nvme_bytes(self) -> int:
        """The most that NVMe may have to hold."""
        beside = sum(sum(self.slicing.beside(part).values()) for part in self.whole_parts)
        return sum(sum(self.shard_bytes(part).values()) for part in self.parts) + beside

    @property
    def committed_bytes(self) -> int:
        """The most that one commit may hold: all of it but gradients."""
        gradients = (GRAD, GRAD_SUM)
        return sum(
            size for part in self.parts for kind, size in self.shard_bytes(part).items() if kind not in gradients
        )

    def step_bytes(self, part: Part) -> int:
        """Host memory that a step of one sub-group needs."""
        return sum(self._in_step(part).values())

    def _in_step(self, part: Part) -> dict[str, int]:
        """What a step holds, by kind; gradients are there in one form."""
        sizes = self._other_bytes(part)
        narrower = min([kind for kind in (GRAD, GRAD_SUM) if kind in sizes], key=sizes.__getitem__, default=None)
        if GRAD_SUM in sizes and narrower is not None:
            del sizes[narrower]
        scratch_bytes = self.state_format_of(part, part.step_dtype).scratch_bytes
        if scratch_bytes:
            sizes |= {scratch_kind(name): scratch_bytes for name in part.state_names}
        return self.format_of(part).in_step(part) | sizes

    def backward_bytes(self, unit: Unit) -> int:
        """Host memory that the gradients of one unit need at the same time."""
        kept = promoting = 0
        for part in (self.parts[whole.index] for whole in unit.parts):
            sizes = self.shard_bytes(part)
            kept += max(sizes.get(GRAD, 0), sizes.get(GRAD_SUM, 0))
            promoting = max(promoting, min(sizes.get(GRAD, 0), sizes.get(GRAD_SUM, 0)))
        return kept + promoting + self.slicing.own_bytes(unit.parts)

    def smallest_hbm(self, model: nn.Module) -> tuple[int, list[Unit]]:
        """The smallest device budget, and the units that need it at the same time."""
        by_module: dict[int, list[Unit]] = {}
        for unit in self.units:
            for _, module in unit.triggers:
                by_module.setdefault(id(module), []).append(unit)
        worst: tuple[int, list[Unit]] = (0, [])

        def walk(module: nn.Module, around: dict[int, Unit]) -> None:
            nonlocal worst
            here = around | {unit.index: unit for unit in by_module.get(id(module), [])}
            total = sum(unit.num_bytes for unit in here.values())
            if total > worst[0]:
                worst = total, list(here.values())
            for child in module.children():
                walk(child, here)

        walk(model, {})
        return worst

    def smallest_ram(self, *, uploads: bool) -> int:
        """The smallest host budget; ``uploads`` when the device is not host memory."""
        step = max((self.step_bytes(part) for part in self.parts if part.stepped), default=0)
        backward = max((self.backward_bytes(unit) for unit in self.units), default=0)
        upload = max((part.param_bytes for part in self.parts), default=0)
        start = max((sum(self.format_of(part).at_most(part).values()) for part in self.parts), default=0)
        return max(step, backward, start) + (upload if uploads else 0)

    def can_overlap(self, ram_bytes: int, *, uploads: bool) -> bool:
        """Whether host memory holds what a step and a backward need at the same time; else one waits for the other."""
        step = max((self.step_bytes(part) for part in self.parts if part.stepped), default=0)
        backward = max((self.backward_bytes(unit) for unit in self.units), default=0)
        upload = max((part.param_bytes for part in self.parts), default=0) if uploads else 0
        return step + backward + upload <= ram_bytes

    def complaints(self, model: nn.Module, config: Config, device: torch.device) -> list[str]:
        """Why the budgets of ``config`` cannot train the model divided like this; nothing if they can.

        Args:
            model: the user's model.
            config: the budgets.
            device: where it trains.
        """
        hbm, units = self.smallest_hbm(model)
        ram = self.smallest_ram(uploads=device.type != "cpu")
        complaints = []
        if hbm > config.hbm:
            names = " + ".join(f"{unit.name} {_size(unit.num_bytes)}" for unit in units)
            complaints.append(f"hbm={_size(config.hbm)}, but units in use at the same time need {_size(hbm)} ({names})")
        if ram > config.ram:
            complaints.append(f"ram={_size(config.ram)}, but {self._ram_arithmetic(ram)}")
        resident = self._resident_bytes + config.activation_bytes
        if not config.nvme and resident > config.ram:
            of_it = f", activation_bytes {_size(config.activation_bytes)} of it" if config.activation_bytes else ""
            complaints.append(
                f"ram={_size(config.ram)} and no nvme, but all state takes {_size(resident)}{of_it}; "
                "give nvme= directories or more ram"
            )
        return complaints

    def needs(self, model: nn.Module, config: Config, device: torch.device) -> tuple[int, int]:
        """The smallest device and host budgets for this plan."""
        ram = self.smallest_ram(uploads=device.type != "cpu")
        resident = self._resident_bytes + config.activation_bytes
        return self.smallest_hbm(model)[0], ram if config.nvme else max(ram, resident)

    @property
    def _resident_bytes(self) -> int:
        """Host memory for everything when there is no tier below, sums of several backwards included."""
        return (
            sum(self.step_bytes(part) for part in self.parts)
            + max((self.backward_bytes(unit) for unit in self.units), default=0)
            + sum(self.slicing.beside(part).get(GATHERED, 0) for part in self.whole_parts)
        )

    def _ram_arithmetic(self, ram: int) -> str:
        parts = [part for part in self.parts if part.stepped]
        largest = max(parts, key=self.step_bytes, default=None)
        if largest is None or self.step_bytes(largest) < max(self.backward_bytes(unit) for unit in self.units):
            unit = max(self.units, key=self.backward_bytes)
            return f"gradients of unit {unit.name} need {_size(self.backward_bytes(unit))}, {_size(ram)} in all"
        sizes = ", ".join(f"{kind} {_size(size)}" for kind, size in self._in_step(largest).items())
        names = ", ".join(slot.name for slot in largest.slots[:3]) + (", ..." if len(largest.slots) > 3 else "")
        return f"one step of sub-group {largest.index} ({names}) needs {_size(ram)}: {sizes}"


def plan_for(
    model: nn.Module,
    stepped: set[nn.Parameter],
    states: Mapping[nn.Parameter, Sequence[str]],
    config: Config,
    device: torch.device,
    slicing: Slicing = ALONE,
) -> Plan:
    """Divide a model for the budgets of a configuration.

    Args:
        model: the user's model.
        stepped: the parameters that the optimizer holds.
        states: the names of its states of each parameter's shape.
        config: budgets, precision and units.
        device: where it trains.
        slicing: what of the state this rank has.

    Raises:
        ConfigError: ``config.units`` names a class of which the model has no module, or there is nothing to compile.
    """
    precision = precision_of(config)
    divide = plan_compiled_units if config.compile else plan_units
    units = lay_out_units(
        divide(model, config.units, max_unit_bytes=max(config.hbm // 2, 1)),
        stepped,
        precision,
        device,
        states=states,
        sub_group_bytes=sub_group_bytes(config),
        largest_bytes=config.ram // 2 if config.sub_group_bytes is None else 0,
        num_slices=slicing.num_ranks,
    )
    parts = [slicing.stored(part) for unit in units for part in unit.parts]
    plan = Plan(units, parts, precision, with_masters, states_as(config.optimizer_states, parts), slicing)
    # What stays in host memory is not written, so that fewer bytes would be more arithmetic for nothing.
    if not config.nvme or plan.state_bytes <= PLANES_PAY_BELOW * config.ram:
        return plan
    in_planes = dataclasses.replace(plan, format_of=with_planes(parts))
    uploads = device.type != "cpu"
    fits = in_planes.smallest_ram(uploads=uploads) <= config.ram  # a step in planes takes more memory than with masters
    return in_planes if fits else plan


def plan_within(model: nn.Module, config: Config, device: torch.device, plan: Callable[[Config], Plan]) -> Plan:
    """Divide a model so that it trains within the budgets: as coarsely as they suggest, or else as finely as can be.

    So no budget is refused where a smaller one does.

    Args:
        model: the user's model.
        config: the budgets.
        device: where it trains.
        plan: makes the plan for any budgets.

    Raises:
        BudgetError: with the arithmetic and the smallest budgets that would do.
    """
    coarse = plan(config)
    if not coarse.complaints(model, config, device):
        return coarse
    fine = plan(least_budgets(model, config, device, plan))
    complaints = fine.complaints(model, config, device)
    if not complaints:
        return fine
    hbm, ram = fine.needs(model, config, device)
    largest = max(fine.smallest_hbm(model)[1], key=lambda unit: unit.num_bytes)
    tiles = advice(model, largest, config, fine.precision) if largest.num_bytes > config.hbm else ""
    raise BudgetError(
        f"budgets too small for this model: {'; '.join(complaints)}. "
        f"Smallest budgets that would do: hbm={hbm}, ram={ram} (bytes){tiles}"
    )


def least_budgets(model: nn.Module, config: Config, device: torch.device, plan: Callable[[Config], Plan]) -> Config:
    """Budgets grown from nothing, as little as can be, until a plan fits its own: larger ones may mean larger units."""
    config = config.model_copy(update={"hbm": ByteSize(1), "ram": ByteSize(1)})
    while True:
        hbm, ram = plan(config).needs(model, config, device)
        if hbm <= config.hbm and ram <= config.ram:
            return config
        config = config.model_copy(
            update={"hbm": ByteSize(max(hbm, config.hbm)), "ram": ByteSize(max(ram, config.ram))}
        )


def sub_group_bytes(config: Config) -> int:
    """The largest state that a sub-group of several parameters may have."""
    if config.sub_group_bytes is not None:
        return int(config.sub_group_bytes)
    return min(config.ram // 4, max(config.ram // 16, _MIN_SUB_GROUP_BYTES), _MAX_SUB_GROUP_BYTES)


def _size(num_bytes: int) -> str:
    """Bytes as people write them, and exactly: the largest unit in which one decimal says it all."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size and num_bytes * 10 % size == 0:
            return f"{num_bytes / size:.1f}".removesuffix(".0") + unit
    return f"{num_bytes}B"
