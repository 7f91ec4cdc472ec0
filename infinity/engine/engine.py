"""``Engine``: a model and its optimizer, trained inside budgets. Composition only; every part has a file of its own."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.config import Config
from infinity.engine.account import StepAccount
from infinity.engine.activity import Activity
from infinity.engine.budget import plan_for, plan_within
from infinity.engine.clipping import Clipper
from infinity.engine.gradients import GradientSink
from infinity.engine.hooks import ModuleHooks
from infinity.engine.norms import GradientNorms
from infinity.engine.optimizer import OffloadedOptimizer
from infinity.engine.prefetch import BACKLOG_SHARE, Orders, PrefetchScheduler
from infinity.engine.refusals import Refusals
from infinity.engine.resources import Resources
from infinity.engine.scaling import scaling_for
from infinity.engine.shadow import probe
from infinity.engine.start import Loader, check_model, convert_buffers
from infinity.engine.steps import OptimizerSteps
from infinity.engine.stream import StepStream
from infinity.engine.substep import SubGroupStepper
from infinity.engine.unit import PARAM
from infinity.engine.weights import StreamingStateDict, WeightReader, hook_state_dicts
from infinity.errors import EngineStateError, ModelError
from infinity.io.cores import warn_of_excess
from infinity.io.numa import choose_placement
from infinity.store.device import AcceleratorDevice, ArenaDevice, Piece
from infinity.store.nvme import NvmeTier
from infinity.store.store import TieredStore
from infinity.trace import OPTIMIZER, Recorder, ShardSpans, StepStats, TierUsage


class Engine:
    """Made by ``infinity.initialize``; a context manager that closes itself.

    Attributes:
        module: the user's model. Its parameters are placeholders of their true shape while their values are away.
        optimizer: steps like the user's own, wherever its state lives; learning-rate schedulers work on it.
        config: what it was made with.
        last_step: figures of the latest step, ``None`` before the first.
        grad_norm: the norm of all gradients before they were clipped, no dimensions, as of the last time; ``None``
            before the first.
        recorder: what ran and what waited, of the latest step; ``infinity.trace.write_trace`` writes it to a file.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config) -> None:
        check_model(model, optimizer)
        warn_of_excess()
        device = config.torch_device()
        self.module = model
        self.config = config
        self.last_step: StepStats | None = None
        self.grad_norm: torch.Tensor | None = None
        self._scaling = scaling_for(config)
        self.recorder = Recorder()
        stepped = {param for group in optimizer.param_groups for param in group["params"]}
        self._traits = probe(optimizer)
        states = self._traits.states
        self._plan = plan_within(model, config, device, lambda other: plan_for(model, stepped, states, other, device))
        self._precision, self._units, self._parts = self._plan.precision, self._plan.units, self._plan.parts
        self._resources = Resources(device)
        try:
            self._build(optimizer, device)
        except BaseException:
            self._resources.close()
            raise
        self._finalizer = weakref.finalize(self, self._resources.close)
        self._account = StepAccount(self._store, self._scheduler, self.recorder)

    def _build(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        config, resources, plan = self.config, self._resources, self._plan
        loop = resources.loop
        transfers = ShardSpans(self.recorder, self.unit_names)
        if config.nvme:
            resources.nvme = loop.run(
                NvmeTier.open(
                    config.nvme,
                    capacity_bytes=plan.nvme_bytes,
                    backend_name=config.io_backend,
                    num_threads=config.io_num_threads,
                    block_bytes=config.io_block_bytes,
                    weights=config.nvme_weights,
                    observe=transfers,
                )
            )
        on_host = device.type == "cpu"
        overlaps = config.overlap and not self._traits.is_serial and plan.can_overlap(config.ram, uploads=not on_host)
        waits = config.max_grad_norm is not None or self._scaling.must_check()
        num_backwards = config.accumulation_steps if overlaps and not waits else None
        orders = Orders(self._units, self._parts, plan.step_keys, under_backward=num_backwards is not None)
        placement = choose_placement(device, config.nvme)
        self._store = store = resources.store = TieredStore(
            config.ram,
            resources.nvme,
            distance=orders.shard_distance,
            on_room=lambda: orders.look_ahead(),
            placement=placement,
            pin=device.type == "cuda",
            poison=config.debug,
        )
        if on_host:
            resources.device = ArenaDevice(
                config.hbm, self._store, distance=orders.unit_distance, poison=config.debug, placement=placement
            )
        else:
            resources.device = AcceleratorDevice(
                device, config.hbm, self._store, distance=orders.unit_distance, poison=config.debug
            )
        self._device = device_tier = resources.device
        transfers.add_gauge("host bytes", lambda: store.host.usage().used_bytes)
        transfers.add_gauge("device bytes", lambda: device_tier.usage().used_bytes)
        for unit in self._units:
            pieces = [Piece(part.key(PARAM), part.start, part.stop) for part in unit.parts]
            self._device.register(unit.index, unit.num_bytes, pieces)
        self._stepper = SubGroupStepper(
            self._store, format_of=plan.format_of, state_format_of=plan.state_format_of, worker=resources.worker
        )
        activity = self._activity = Activity(self.recorder)
        stream = resources.stream = StepStream(self._stepper, self._device, unit_distance=orders.next_in_training)
        recorder, names = self.recorder, self.unit_names
        self._stepper.observe = lambda part, begun, ended: recorder.record(
            OPTIMIZER, "step", begun, ended, unit=names[part.unit], part=part.position
        )
        self._scheduler = PrefetchScheduler(
            loop,
            self._store,
            self._device,
            orders,
            self._units,
            self._parts,
            stream,
            activity,
            depth=config.prefetch,
            ahead_bytes=max((plan.step_bytes(part) for part in self._parts if part.stepped), default=0),
            backlog_bytes=config.ram // BACKLOG_SHARE,
        )
        norm_type = 2.0 if config.max_grad_norm else self._scaling.norm_type
        norms = GradientNorms(norm_type, num_backwards=config.accumulation_steps, scaling=self._scaling)
        self._gradients = GradientSink(
            loop,
            self._store,
            self._scheduler,
            self._parts,
            norms=norms,
            scaling=self._scaling,
            num_backwards=num_backwards,
        )
        self._clipper = Clipper(self.module, loop, self._store, self._gradients, norms, self._scaling)
        self._steps = OptimizerSteps(
            loop,
            stream,
            self._stepper,
            self._units,
            self._parts,
            optimizer,
            overlaps=overlaps,
            worker=resources.worker,
        )
        self.buffer_bytes = convert_buffers(self.module, self._precision, device)
        resources.refusals = Refusals(self.module, self._units)
        self._stepper.adopt(
            Loader(
                loop,
                self._store,
                optimizer,
                format_of=plan.format_of,
                state_format_of=plan.state_format_of,
                compute=self._stepper.compute,
            ).load(self._units)
        )
        self._scheduler.start()
        self._hooks = resources.hooks = ModuleHooks(
            self.module,
            self._units,
            self._scheduler,
            self._gradients,
            self._precision,
            self._steps.check,
            self._steps,
            activity,
        )
        self._reader = WeightReader(
            loop,
            self._store,
            self._parts,
            format_of=plan.format_of,
            state_format_of=plan.state_format_of,
            settled=self._steps.settle,
        )
        resources.handles = hook_state_dicts(self.module, self._reader)
        self.optimizer = OffloadedOptimizer(
            optimizer,
            self._step,
            self._discard,
            functools.partial(self._reader.read_state, state_of=self._stepper.state_of),
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward; the same as ``engine.module(...)``."""
        self._check_usable()
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Run backward from ``loss``; the same as ``loss.backward()``. Several before a ``step`` add up.

        With ``fp16`` it starts from the loss times ``loss_scale``, and is the only way.
        """
        self._check_usable()
        self._scaling.backward(loss, retain_graph=retain_graph)

    def step(self) -> None:
        """Step the optimizer and consume the gradients; the same as ``engine.optimizer.step()``.

        With ``Config.overlap`` it returns while sub-groups are still being stepped, with the hyper-parameters and
        gradients of now; the next forward waits for each unit. What fails then is raised by whoever comes next.

        Raises:
            EngineStateError: the engine is closed, or a step before failed half-way.
            StorageError: a shard could not be read or written; the engine cannot go on.
        """
        self.optimizer.step()

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        parameters: Iterable[nn.Parameter] | None = None,
    ) -> torch.Tensor:
        """What ``torch.nn.utils.clip_grad_norm_`` does, to the last bit, with gradients that are away.

        Args:
            max_norm: what the norm is to be at most.
            norm_type: which norm; ``float("inf")`` for the largest value.
            error_if_nonfinite: raise where the norm is infinite or NaN, and change nothing.
            parameters: whose gradients; ``None`` for all of the model's.

        Returns:
            The norm before, no dimensions; also in ``grad_norm``.

        Raises:
            EngineStateError: steps begin under backward (``accumulation_steps``), when there is no norm yet.
            NonFiniteError: see ``error_if_nonfinite``.
            StorageError: gradients could not be read back.
        """
        self._check_open()
        self._hooks.refuse_inside("clip_grad_norm_")
        self._hooks.settle()
        self._gradients.refuse_early_steps("clip_grad_norm_()")
        self._steps.settle()
        self.grad_norm = self._clipper.clip(max_norm, norm_type, error_if_nonfinite, parameters)
        return self.grad_norm

    def zero_grad(self) -> None:
        """Discard gradients that have not been stepped."""
        self.optimizer.zero_grad()

    def state_dict(self) -> StreamingStateDict:
        """The model's state by name, at full precision; each tensor is read when it is asked for."""
        self._check_usable()
        return StreamingStateDict(self.module.state_dict(keep_vars=True), self._reader)

    def synchronize(self) -> None:
        """Wait until steps and transfers that have begun have ended, as ``torch.cuda.synchronize`` does for kernels.

        Raises:
            StorageError: a shard could not be read or written in a step; the engine cannot go on.
        """
        self._check_usable()
        self._steps.settle()
        for residency in (self._device.residency, self._store.host.residency):
            self._resources.loop.run(residency.quiesce())

    def usage(self) -> dict[str, TierUsage]:
        """What each tier holds now, held at most, and may hold: ``"device"``, ``"host"``, ``"nvme"``."""
        self._check_usable()
        nvme = self._store.nvme
        return {
            "device": self._device.usage(),
            "host": self._store.host.usage(),
            "nvme": TierUsage(0, 0, 0) if nvme is None else nvme.usage(),
        }

    @property
    def io_choices(self) -> dict[Path, Any]:
        """For each NVMe directory, the I/O backend in use and why it was chosen."""
        nvme = self._store.nvme
        return {} if nvme is None else dict(nvme.choices)

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward: 1 without ``fp16``."""
        return self._scaling.scale

    @property
    def num_skipped_steps(self) -> int:
        """Steps that changed nothing, because a gradient had overflowed in ``fp16``."""
        return self._scaling.num_skipped_steps

    @property
    def num_parameters(self) -> int:
        """How many elements the model's parameters have, shared ones once."""
        return sum(slot.num_elements for part in self._parts for slot in part.slots)

    @property
    def state_bytes(self) -> int:
        """Parameters, master weights, gradients and optimizer states together, padding included."""
        return self._plan.state_bytes

    @property
    def unit_names(self) -> list[str]:
        """The units, in the order of the model's parameters."""
        return [unit.name for unit in self._units]

    def close(self) -> None:
        """End all work and give back memory, files and hooks. Closing twice is harmless.

        State in the tiers is scratch and goes: take ``state_dict()`` before. The model is left with placeholders, and
        refuses to compute until values are loaded into it.
        """
        if self._finalizer.detach() is not None:
            self.optimizer.release_user()
            self._resources.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused, for ``copy`` and ``pickle`` alike.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "an engine cannot be copied or pickled: it owns threads, memory and files; take engine.state_dict() and "
            "engine.optimizer.state_dict() instead"
        )

    def _check_usable(self) -> None:
        self._check_open()
        self._hooks.settle()
        self._steps.check()

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise EngineStateError("the engine is closed; make another with infinity.initialize()")

    def _discard(self) -> None:
        self._check_usable()
        self._hooks.settle()
        self._gradients.discard()
        self._scaling.forget()

    def _step(self) -> None:
        self._check_open()
        self._hooks.refuse_inside("step")
        self._hooks.settle()
        self._steps.check_errors()
        self._steps.check_groups()
        start = time.perf_counter()
        with self._activity.waiting() as causes:
            self._steps.prepare()
            if self.config.max_grad_norm is not None:
                self.grad_norm = self._clipper.clip(self.config.max_grad_norm)
            self._clipper.check_finite()
            if self._scaling.skips:
                self._gradients.discard()
            else:
                self._steps.complete(self._gradients.take())
            causes.append(("optimizer", time.perf_counter()))
        self._resources.loop.call_soon(self._scheduler.end_cycle)
        self._activity.switch("outside")
        self.last_step = self._account.end_step(start)
        self._scaling.end_step()
