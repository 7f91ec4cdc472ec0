"""Runs the same training script in plain PyTorch and under the engine, and compares everything that it leaves, bitwise.

A *script* is a function of a ``Trainer``: it trains as a user would and returns what it saw (losses, outputs). Both
runs begin with the same seed. What is compared: what the script returned, weights at full precision and in the
precision that computes, optimizer state, buffers, and the state of the random generator.

The reference for ``precision="bf16"`` has fp32 master copies: ``model.to(bfloat16)``, an optimizer of the masters,
gradients of the first backward as ``p.grad.float()`` and of later ones added to them, and the masters copied to the
parameters after each step. That for ``"fp16"`` is the same with fp16, and a ``GradScaler`` around it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from pydantic import ByteSize
from torch import nn
from torch.utils import _pytree as pytree

import infinity
from infinity.config import Config
from infinity.engine import budget, saved
from infinity.engine.budget import Plan, plan_for
from infinity.engine.filled import filled
from infinity.engine.shadow import probe
from infinity.engine.slicing import ALONE, Slicing

MakeModel = Callable[[], nn.Module]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
ComputeLoss = Callable[[Any], torch.Tensor]
CPU = torch.device("cpu")
ENOUGH: dict[str, Any] = {"device": "cpu", "hbm": "1MiB", "ram": "8MiB"}
"""Room for everything that any of the tiny models has."""

_SCALER_FIELDS = {"init_scale": "initial_loss_scale", "growth_interval": "loss_scale_window"}
"""What the configuration calls the settings of ``GradScaler``."""


@pytest.fixture(autouse=True)
def tiny_scale(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For each test of a file that imports it: one thread suffices, only vectors are small, planes always pay."""
    monkeypatch.setattr(saved, "_SMALL_BYTES", 128)
    monkeypatch.setattr(budget, "PLANES_PAY_BELOW", 1)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class Trainer(Protocol):
    """What a script trains with. ``optimizer`` is one that schedulers may be made for and ``step`` called on."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def grad_norm(self) -> torch.Tensor | None: ...
    @property
    def loss_scale(self) -> float: ...
    def backward(self, loss: torch.Tensor) -> None: ...
    def clip(self, max_norm: float, norm_type: float = 2.0, params: Sequence[nn.Parameter] = ()) -> torch.Tensor: ...
    def accumulate(self, micro_batches: Sequence[Any], compute_loss: ComputeLoss) -> list[torch.Tensor]: ...
    def step(self) -> None: ...
    def zero_grad(self) -> None: ...


Script = Callable[[Trainer], Any]


@dataclass
class Outcome:
    """What a run leaves."""

    returned: Any
    weights: dict[str, Any]
    computing: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    random_state: torch.Tensor


class Plain:
    """Plain PyTorch. As under the engine, a step consumes the gradients, and clips them first if ``max_grad_norm``."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: str,
        scaler: dict[str, Any] | None = None,
        keep_fp32: tuple[str, ...] = (),
        accumulation_dtype: str = "fp32",
        max_grad_norm: float | None = None,
    ) -> None:
        self._sums_alike = accumulation_dtype == "same"
        self.model = model
        self.optimizer = optimizer
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        self.scaler = torch.amp.GradScaler("cpu", **(scaler or {}), enabled=precision == "fp16")
        self._is_unscaled = False
        self._max_grad_norm = max_grad_norm
        self._grad_norm: torch.Tensor | None = None
        if precision != "fp32":
            named = (*model.named_parameters(), *model.named_buffers())
            kept = {id(each) for name, each in named if any(fnmatch(name, pattern) for pattern in keep_fp32)}
            for group in optimizer.param_groups:
                group["params"] = [param if id(param) in kept else self._master(param) for param in group["params"]]
            compute = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
            model._apply(lambda t: t.to(compute) if t.is_floating_point() and id(t) not in kept else t)
            model.register_forward_pre_hook(functools.partial(_cast_inputs, compute), with_kwargs=True)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        return self._grad_norm

    @property
    def loss_scale(self) -> float:
        return self.scaler.get_scale()

    def _master(self, param: nn.Parameter) -> nn.Parameter:
        master = nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
        vars(master).update(vars(param))
        if param in self.optimizer.state:
            self.optimizer.state[master] = self.optimizer.state.pop(param)
        return self.masters.setdefault(param, master)

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()
        if not self._sums_alike:
            self._take_gradients()

    def _take_gradients(self) -> None:
        for param, master in self.masters.items():
            if param.grad is not None:
                if master.grad is None:
                    master.grad = param.grad.float()
                else:
                    master.grad.add_(param.grad)
                param.grad = None

    def accumulate(self, micro_batches: Sequence[Any], compute_loss: ComputeLoss) -> list[torch.Tensor]:
        """What ``engine.accumulate`` promises: each micro-batch begins with a seed of its own."""
        seeds = torch.randint(2**63 - 1, (len(micro_batches),)).tolist()
        state, losses = torch.get_rng_state(), []
        for micro_batch, seed in zip(micro_batches, seeds, strict=True):
            torch.manual_seed(seed)
            loss = compute_loss(micro_batch)
            self.backward(loss)
            losses.append(loss.detach())
        torch.set_rng_state(state)
        return losses

    def clip(self, max_norm: float, norm_type: float = 2.0, params: Sequence[nn.Parameter] = ()) -> torch.Tensor:
        """Clip what is stepped, of all parameters or some."""
        self._unscale()
        stepped = [self.masters.get(param, param) for param in params or self.model.parameters()]
        self._grad_norm = torch.nn.utils.clip_grad_norm_(stepped, max_norm, norm_type)
        return self._grad_norm

    def _unscale(self) -> None:
        self._take_gradients()
        if self.scaler.is_enabled() and not self._is_unscaled:
            self.scaler.unscale_(self.optimizer)
            self._is_unscaled = True

    def step(self) -> None:
        self._unscale()
        if self._max_grad_norm is not None:
            self.clip(self._max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._is_unscaled = False
        with torch.no_grad():
            for param, master in self.masters.items():
                param.copy_(master)
        self.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.model.zero_grad()

    def outcome(self, returned: Any) -> Outcome:
        computing = dict(self.model.state_dict())
        with filled(self.model.modules(), self.masters.get):
            weights = dict(self.model.state_dict())
        return Outcome(returned, weights, computing, self.optimizer.state_dict(), torch.get_rng_state())


class Tiered:
    """The engine, used through its own methods; ``user`` is the optimizer that it was made with."""

    def __init__(self, engine: infinity.Engine, user: torch.optim.Optimizer) -> None:
        self.engine = engine
        self.user = user
        self.model = engine.module
        self.optimizer: torch.optim.Optimizer = engine.optimizer

    @property
    def grad_norm(self) -> torch.Tensor | None:
        return self.engine.grad_norm

    @property
    def loss_scale(self) -> float:
        return self.engine.loss_scale

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def accumulate(self, micro_batches: Sequence[Any], compute_loss: ComputeLoss) -> list[torch.Tensor]:
        return self.engine.accumulate(micro_batches, compute_loss)

    def clip(self, max_norm: float, norm_type: float = 2.0, params: Sequence[nn.Parameter] = ()) -> torch.Tensor:
        return self.engine.clip_grad_norm_(max_norm, norm_type, parameters=params or None)

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self) -> None:
        self.engine.zero_grad()

    def outcome(self, returned: Any) -> Outcome:
        computing = dict(self.model.state_dict())
        state = self.optimizer.state_dict()
        return Outcome(returned, dict(self.engine.state_dict()), computing, state, torch.get_rng_state())


class TieredByUsersOptimizer(Tiered):
    """The engine, used through the optimizer that the user has made."""

    def __init__(self, engine: infinity.Engine, user: torch.optim.Optimizer) -> None:
        super().__init__(engine, user)
        self.optimizer = user


def _cast_inputs(compute: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.to(compute) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf,
        (args, kwargs),
    )


def build(make_model: MakeModel, make_optimizer: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = make_model()
    optimizer = make_optimizer(model)
    torch.manual_seed(1)
    return model, optimizer


@dataclass
class Parity:
    """A model, its optimizer and a script, run in plain PyTorch once and under the engine as often as one likes."""

    make_model: MakeModel
    make_optimizer: MakeOptimizer
    script: Script
    precision: str = "fp32"
    scaler: dict[str, Any] | None = None
    keep_fp32: tuple[str, ...] = ()
    accumulation_dtype: str = "fp32"
    max_grad_norm: float | None = None
    expected: Outcome = field(init=False)

    def __post_init__(self) -> None:
        made = build(self.make_model, self.make_optimizer)
        plain = Plain(*made, self.precision, self.scaler, self.keep_fp32, self.accumulation_dtype, self.max_grad_norm)
        self.expected = plain.outcome(self.script(plain))

    def check(self, config: Config, make_trainer: type[Tiered] = Tiered) -> infinity.Engine:
        """Run under the engine and compare; the (closed) engine."""
        model, optimizer = build(self.make_model, self.make_optimizer)
        with infinity.initialize(model, optimizer, config) as engine:
            tiered = make_trainer(engine, optimizer)
            got = tiered.outcome(self.script(tiered))
            for name, usage in engine.usage().items():
                assert usage.peak_bytes <= usage.budget_bytes, name
        assert_same(got.returned, self.expected.returned, "returned")
        assert_same(got.weights, self.expected.weights, "weights")
        assert_same(got.computing, self.expected.computing, "state_dict")
        assert_same(got.optimizer, self.expected.optimizer, "optimizer")
        assert_same(got.random_state, self.expected.random_state, "random state")
        return engine

    def smallest(self, nvme: Path, **fields: Any) -> Config:
        """The smallest budgets that can train the model from NVMe."""
        return smallest(self.make_model, self.make_optimizer, nvme=nvme, **{**self._numbers, **fields})

    def blockwise(self, nvme: Path, **fields: Any) -> Config:
        """Room for two of the largest units and two sub-groups: everything else is on NVMe."""
        whole = self._fitting(nvme=nvme, **{**self._numbers, **fields})
        return whole.model_copy(update={"hbm": ByteSize(2 * whole.hbm), "ram": ByteSize(2 * whole.ram)})

    def half(self, nvme: Path, **fields: Any) -> Config:
        """Host memory for half of the state, or less: with less memory parts are smaller, and padding is more of it."""
        whole = self._fitting(nvme=nvme, **{**self._numbers, **fields})
        config = whole.model_copy(update={"hbm": ByteSize(2 * whole.hbm), "ram": ByteSize(1 << 40)})
        while True:
            model, optimizer = build(self.make_model, self.make_optimizer)
            plan = plan_of(model, optimizer, config)
            ram = max(plan.state_bytes // 2, plan.needs(model, config, CPU)[1])
            if ram >= config.ram:
                return config
            config = config.model_copy(update={"ram": ByteSize(ram)})

    def resident(self, nvme: Path | None = None, **fields: Any) -> Config:
        """Memory for everything."""
        return Config(**{**ENOUGH, **self._numbers, "nvme": () if nvme is None else nvme, **fields})

    @property
    def _numbers(self) -> dict[str, Any]:
        """The fields of the configuration that change numbers."""
        names = ("precision", "keep_fp32", "accumulation_dtype", "max_grad_norm")
        scaling = {_SCALER_FIELDS[name]: value for name, value in (self.scaler or {}).items()}
        return {name: getattr(self, name) for name in names} | scaling

    def _fitting(self, **fields: Any) -> Config:
        """Budgets for whole blocks: the largest with all around it, and its step."""
        model, optimizer = build(self.make_model, self.make_optimizer)
        config = Config(device="cpu", **fields)
        hbm, ram = plan_of(model, optimizer, config).needs(model, config, CPU)
        return smallest(self.make_model, self.make_optimizer, hbm=2 * hbm, ram=ram, **fields)


def plan_of(model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, slicing: Slicing = ALONE) -> Plan:
    """The plan that the engine makes."""
    stepped = {param for group in optimizer.param_groups for param in group["params"]}
    return plan_for(model, stepped, probe(optimizer).states, config, CPU, slicing)


def smallest(make_model: MakeModel, make_optimizer: MakeOptimizer, slicing: Slicing = ALONE, **fields: Any) -> Config:
    """The budgets that the engine itself names when it is given none."""
    model, optimizer = build(make_model, make_optimizer)
    config = Config(**{"device": "cpu", "hbm": 1, "ram": 1, **fields})
    while True:
        hbm, ram = plan_of(model, optimizer, config, slicing).needs(model, config, CPU)
        if hbm <= config.hbm and ram <= config.ram:
            return config
        larger = {"hbm": ByteSize(max(hbm, config.hbm)), "ram": ByteSize(max(ram, config.ram))}
        config = config.model_copy(update=larger)


def assert_same(got: Any, expected: Any, where: str) -> None:
    """Bitwise equality of any nesting of containers with tensors and plain values."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor), where
        assert got.dtype == expected.dtype, f"{where}: {got.dtype}, expected {expected.dtype}"
        assert got.shape == expected.shape, f"{where}: {got.shape}, expected {expected.shape}"
        assert same_bits(got, expected), f"{where}: largest difference {_difference(got, expected)}"
    elif isinstance(expected, dict):
        assert set(got) == set(expected), f"{where}: {sorted(map(str, got))}, expected {sorted(map(str, expected))}"
        for key, value in expected.items():
            assert_same(got[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), f"{where}: {len(got)}, expected {len(expected)}"
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    else:
        assert got == expected, f"{where}: {got!r}, expected {expected!r}"


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal to the last bit: NaN equals NaN, and 0 differs from -0."""
    first, second = first.detach().cpu().contiguous(), second.detach().cpu().contiguous()
    return bool(torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8)))


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).abs().max()) if got.numel() else 0.0
