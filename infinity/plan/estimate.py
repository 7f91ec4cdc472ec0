"""``make_plan``: from a model, a configuration and a machine to a ``Plan``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from infinity.config import Config
from infinity.engine import budget
from infinity.engine.budget import least_budgets, plan_for, plan_within
from infinity.engine.precision import precision_of
from infinity.engine.scaling import scaling_for
from infinity.engine.shadow import Traits, probe
from infinity.engine.slicing import Slicing
from infinity.engine.speculation import pays_to_speculate
from infinity.engine.summary import summarize
from infinity.engine.tiling import tile_for_budget
from infinity.engine.traffic import Work, moved, state_of
from infinity.engine.unit import GRAD, GRAD_SUM, MASTER, PARAM, RESIDUAL, SCRATCH, UPPER
from infinity.errors import BudgetError, ConfigError
from infinity.plan.figures import Simulated
from infinity.plan.machine import Machine
from infinity.plan.order import visits
from infinity.plan.result import Plan, Wear, tokens_to_hide, wear_of
from infinity.plan.settings import PlanSettings
from infinity.plan.simulate import Pace, simulate
from infinity.plan.sources import Source, optimizer_for
from infinity.plan.speeds import measure_flops

MOST_RANKS = 1024
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FORWARD_AND_BACKWARD, _WITH_RECOMPUTATION = 6, 8
"""Operations per parameter and token."""


class TooSmallError(BudgetError):
    """Budgets that cannot train the model.

    Attributes:
        smallest: the smallest budgets that can, ``"hbm"`` and ``"ram"``.
        short: by how many bytes each of the given ones is too small; 0: it is not.
        ranks_needed: the fewest ranks on which these budgets do; ``None``: no number that was tried.
        exit_code: what a command that ends with it returns.
    """

    exit_code = 1

    def __init__(
        self, message: str, *, smallest: Mapping[str, int], short: Mapping[str, int], ranks_needed: int | None
    ) -> None:
        super().__init__(message)
        self.smallest, self.short, self.ranks_needed = smallest, short, ranks_needed


@dataclass(frozen=True)
class Division:
    """How the engine divides a model, for any number of ranks.

    Attributes:
        model: the user's.
        config: the budgets.
        device: where it trains.
        traits: of the optimizer.
        num_ranks: how many share the state.
    """

    model: nn.Module
    config: Config
    device: torch.device
    traits: Traits
    num_ranks: int

    def planner(self, num_ranks: int) -> Callable[[Config], budget.Plan]:
        """The engine's own arithmetic."""
        slicing = Slicing(0, num_ranks, self.config.stage)
        return functools.partial(self._plan, slicing)

    def _plan(self, slicing: Slicing, config: Config) -> budget.Plan:
        params = set(self.model.parameters())
        return plan_for(self.model, params, self.traits.states, config, self.device, slicing)

    def plan(self) -> budget.Plan:
        """As the engine would divide it.

        Raises:
            TooSmallError: it does not fit; the message is the engine's.
        """
        try:
            return plan_within(self.model, self.config, self.device, self.planner(self.num_ranks))
        except BudgetError as error:
            smallest = self.smallest()
            short = {name: max(size - int(getattr(self.config, name)), 0) for name, size in smallest.items()}
            needed = self.ranks_needed()
            words = ", ".join(f"{name} is {size:,} bytes too small" for name, size in short.items() if size)
            on_ranks = f"; these budgets do on {needed} ranks" if needed is not None else ""
            raise TooSmallError(
                f"{error} ({words}{on_ranks})", smallest=smallest, short=short, ranks_needed=needed
            ) from error

    def smallest(self) -> dict[str, int]:
        """The smallest budgets that can train it."""
        planner = self.planner(self.num_ranks)
        least = planner(least_budgets(self.model, self.config, self.device, planner))
        hbm, ram = least.needs(self.model, self.config, self.device)
        return {"hbm": hbm, "ram": ram}

    def fits(self, num_ranks: int) -> bool:
        """Whether the budgets do on so many ranks."""
        try:
            plan_within(self.model, self.config, self.device, self.planner(num_ranks))
        except BudgetError:
            return False
        return True

    def ranks_needed(self) -> int | None:
        """The fewest ranks on which they do."""
        most = 1
        while not self.fits(most):
            most *= 2
            if most > MOST_RANKS:
                return None
        least = most // 2 + 1
        while least < most:
            middle = (least + most) // 2
            least, most = (least, middle) if self.fits(middle) else (middle + 1, most)
        return most


def make_plan(source: Source, config: Config, settings: PlanSettings, machine: Machine) -> Plan:
    """Plan a step.

    Args:
        source: the model.
        config: the budgets and how it trains; directories need not exist.
        settings: the batch, the optimizer, the ranks.
        machine: how fast everything is; ``flops`` counts unless the settings say how long a step computes, or nothing.

    Raises:
        ConfigError: a setting cannot be used.
        ModelError: the model cannot be planned.
        TooSmallError: the budgets cannot train it.
    """
    model, device = source.model, device_of(config)
    optimizer = optimizer_for(model, settings.optimizer)
    precision = precision_of(config)
    precision.check(model)
    if config.tile_large_layers:
        if not source.is_ours:
            raise ConfigError(
                "tile_large_layers: would change the model; plan infinity.tile_large_layers(model) itself"
            )
        tile_for_budget(model, optimizer, config, precision)
        optimizer = optimizer_for(model, settings.optimizer)
    traits = probe(optimizer)
    num_ranks = min(config.shard_ranks or settings.num_ranks, settings.num_ranks)
    division = Division(model, config, device, traits, num_ranks)
    plan = division.plan()
    compute_seconds = _compute_seconds(source, plan, config, settings, machine, device)
    pace = _pace(plan, config, device, traits, settings, compute_seconds)
    step = (_simulated if num_ranks == 1 else _by_formula)(plan, model, config, device, machine, pace)
    wear: Wear | None = None
    if settings.endurance is not None:
        wear = wear_of(settings.endurance, step.moved["nvme write"], step.seconds)
    return Plan(
        name=source.name,
        summary=summarize(plan, model, config, device),
        smallest=division.smallest(),
        placed={} if step.simulated is None else _placed(step.simulated.places),
        moved=step.moved,
        simulated=step.simulated is not None,
        peaks={}
        if step.simulated is None
        else {"device": step.simulated.device_peak_bytes, "host": step.simulated.host_peak_bytes},
        seconds=step.seconds,
        busy=step.busy,
        bottleneck=_bottleneck(step, device),
        num_tokens=settings.num_tokens,
        tokens_to_hide_disk=tokens_to_hide(step.busy["disk"], compute_seconds, settings.num_tokens),
        ranks_needed=division.ranks_needed(),
        wear=wear,
        machine=machine,
        config=config.model_dump(mode="json", exclude_defaults=True),
    )


def device_of(config: Config) -> torch.device:
    """Where it will train; an accelerator that is named need not be here.

    Raises:
        ConfigError: torch knows no such device.
    """
    if config.device == "auto":
        return config.torch_device()
    try:
        return torch.device(torch.device(config.device).type)
    except RuntimeError as error:
        raise ConfigError(f"device: torch does not know {config.device!r}: {error}") from error


@dataclass(frozen=True, slots=True)
class _StepCost:
    """What a step moves and takes."""

    moved: Mapping[str, int]
    seconds: float
    busy: Mapping[str, float]
    simulated: Simulated | None = None


def _compute_seconds(
    source: Source, plan: budget.Plan, config: Config, settings: PlanSettings, machine: Machine, device: torch.device
) -> float:
    """Of forward and backward of a step."""
    if settings.compute_seconds is not None:
        return settings.compute_seconds
    flops = machine.flops
    if settings.flops is None:
        here = device.type == "cpu" or (torch.accelerator.is_available() and config.device in ("auto", device.type))
        if not here:
            raise ConfigError(f"--flops: needed, since {device} is not here to be measured; or give --compute-seconds")
        tokens = settings.batch_size * settings.seq_length
        flops = measure_flops(source.model, device, _DTYPES[config.precision], tokens)
    return operations_of(source, plan, config, settings) / flops


def operations_of(source: Source, plan: budget.Plan, config: Config, settings: PlanSettings) -> float:
    """Of forward and backward of a step: matrices that are multiplied, and attention where its size is known."""
    per_token = _WITH_RECOMPUTATION if config.recompute else _FORWARD_AND_BACKWARD
    matrices = sum(param.numel() * times for param, times in _multiplied(source.model).items())
    attention = source.attention * settings.seq_length  # causal: half of all pairs, in two products
    return float(per_token * settings.num_tokens * (matrices + attention))


def _multiplied(model: nn.Module) -> dict[nn.Parameter, int]:
    """The matrices of a model, and how often each is multiplied with a token; embeddings are looked up."""
    found: dict[nn.Parameter, int] = {}
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        for param in module._parameters.values():
            if param is not None and param.dim() > 1:
                found[param] = found.get(param, 0) + 1
    return found


def _pace(
    plan: budget.Plan,
    config: Config,
    device: torch.device,
    traits: Traits,
    settings: PlanSettings,
    compute_seconds: float,
) -> Pace:
    """As the engine will step (``engine/assembly.py``), where it is told the number of backwards."""
    may_overlap = config.overlap and not traits.is_serial
    overlaps = may_overlap and plan.can_overlap(int(config.ram), uploads=device.type != "cpu")
    waits = config.max_grad_norm is not None or scaling_for(config).must_check() or config.on_nonfinite != "continue"
    told = may_overlap and config.accumulation_steps is not None
    on_trial = waits and overlaps and told and pays_to_speculate(plan, config)
    return Pace(compute_seconds, settings.num_micro_batches, overlaps, told and (on_trial or not waits))


def _simulated(
    plan: budget.Plan, model: nn.Module, config: Config, device: torch.device, machine: Machine, pace: Pace
) -> _StepCost:
    step = simulate(plan, model, config, device, machine, pace)
    return _StepCost(
        moved={
            "nvme read": step.read_bytes,
            "nvme write": step.written_bytes,
            "host to device": step.to_device,
            "device to host": step.from_device,
        },
        seconds=step.seconds,
        busy={
            "compute": pace.compute_seconds,
            "optimizer": step.optimizer_seconds,
            "disk": step.disk_seconds,
            "pcie": step.to_device / machine.to_device + step.from_device / machine.from_device,
            "network": 0.0,
        },
        simulated=step,
    )


def _by_formula(
    plan: budget.Plan, model: nn.Module, config: Config, device: torch.device, machine: Machine, pace: Pace
) -> _StepCost:
    """Several ranks: the most that a step moves (``engine/traffic.py``), and the longest of what takes time."""
    slicing = plan.slicing
    state = state_of(plan.whole_parts, plan.format_of, plan.state_format_of)
    in_hbm = sum(unit.num_bytes for unit in plan.units) <= config.hbm
    gathers = 1 if in_hbm else sum(visit.begins for visit in visits(model, plan.units)) * 2 // len(plan.units)
    gathers = min(gathers, 2) * (1 if in_hbm else pace.num_backwards)
    work = Work(gathers, pace.num_backwards, reduces_sums=config.reduction_dtype == "fp32")
    step = moved(state, slicing.stage, slicing.num_ranks, work)
    read, written = step.beyond(int(config.ram)) if config.nvme else (0, 0)
    both = min(read, written)
    disk = 2 * both / machine.mixed + (read - both) / machine.read + (written - both) / machine.write
    step_bytes = sum(plan.part_state_bytes(part) for part in plan.parts if part.stepped)
    uploads = device.type != "cpu"
    busy = {
        "compute": pace.compute_seconds,
        "optimizer": step_bytes / machine.optimizer,
        "disk": disk,
        "pcie": step.to_device / machine.to_device + step.from_device / machine.from_device if uploads else 0.0,
        "network": sum(step.sent.values()) / machine.network,
    }
    processor = busy["optimizer"] if uploads else busy["optimizer"] + busy["compute"]
    return _StepCost(
        moved={
            "nvme read": read,
            "nvme write": written,
            "host to device": step.to_device if uploads else 0,
            "device to host": step.from_device if uploads else 0,
            **step.sent,
        },
        seconds=max(processor, *busy.values()),
        busy=busy,
    )


def _placed(places: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """What is where, by the names of ``Summary.kept``; memory that nothing stays in is left out."""
    names = {PARAM: "parameters", GRAD: "gradients", GRAD_SUM: "gradients"}
    names |= dict.fromkeys((MASTER, RESIDUAL, UPPER), "master weights")
    placed: dict[str, dict[str, int]] = {}
    for tier, kinds in places.items():
        found = placed.setdefault(tier, {})
        for kind, num_bytes in kinds.items():
            if not kind.startswith(SCRATCH):
                name = names.get(kind, "optimizer states")
                found[name] = found.get(name, 0) + num_bytes
    return placed


def _bottleneck(step: _StepCost, device: torch.device) -> str:
    """What works longest; on the CPU arithmetic and the optimizer share the processor."""
    busy = dict(step.busy)
    processor = {name: busy[name] for name in ("compute", "optimizer")}
    if device.type == "cpu":
        name = max(processor, key=lambda each: processor[each])
        busy = {each: seconds for each, seconds in busy.items() if each not in processor}
        busy[name] = sum(processor.values())
    longest = max(busy, key=lambda each: busy[each])
    if longest != "disk":
        return {"pcie": "PCIe", "optimizer": "optimizer arithmetic"}.get(longest, longest)
    read, written = step.moved["nvme read"], step.moved["nvme write"]
    if min(read, written) * 4 >= read + written:
        return "disk, both ways"
    return "disk, reads" if read > written else "disk, writes"
