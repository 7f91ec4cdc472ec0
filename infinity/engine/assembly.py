"""``Assembly``: the parts of an engine, made and joined in the order in which they need each other."""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from infinity.config import Config
from infinity.engine.account import StepAccount
from infinity.engine.accumulation import Accumulation, Horizontal
from infinity.engine.activations import ActivationShards, Offload
from infinity.engine.activity import Activity
from infinity.engine.budget import plan_for, plan_within
from infinity.engine.clipping import Clipper
from infinity.engine.compiled import CompiledBlocks, check_compiling
from infinity.engine.hooks import ModuleHooks
from infinity.engine.loading import ModelLoader
from infinity.engine.optimizer import OffloadedOptimizer
from infinity.engine.optimizer_loading import OptimizerLoader
from infinity.engine.persistence.capture import Capture
from infinity.engine.persistence.checkpoint import CheckpointLoader, CheckpointSaver
from infinity.engine.persistence.durability import Durability, Scratch
from infinity.engine.persistence.durable import Durable
from infinity.engine.persistence.together import Together
from infinity.engine.precision import Precision, precision_of
from infinity.engine.prefetch import BACKLOG_SHARE, Orders
from infinity.engine.randomness import Generators
from infinity.engine.ranks.many import join_job
from infinity.engine.recompute import Recomputation
from infinity.engine.refusals import Refusals
from infinity.engine.resources import Resources
from infinity.engine.saved import Keeper, KeepInPlace
from infinity.engine.scaling import scaling_for
from infinity.engine.shadow import probe
from infinity.engine.speculation import Speculation, Trial, pays_to_speculate, speculated_bytes
from infinity.engine.start import Loader, check_model, convert_buffers
from infinity.engine.steps import OptimizerSteps
from infinity.engine.stream import StepStream
from infinity.engine.substep import SubGroupStepper
from infinity.engine.tiers import open_tiers
from infinity.engine.tiling import tile_for_budget
from infinity.engine.values import Gathered, Values
from infinity.engine.vertical import Room, Vertical
from infinity.engine.weights import hook_state_dicts
from infinity.engine.wrap import find_blocks
from infinity.engine.writer import WeightWriter
from infinity.io.cores import warn_of_excess
from infinity.store.commits import Commits
from infinity.trace import OPTIMIZER, Recorder, ShardSpans, StepStats


def check_forward(gathered: Gathered, steps: OptimizerSteps, durability: Durability | None = None) -> None:
    """Raise where no forward may begin. No method of the engine: the model's hooks must not keep that alive."""
    gathered.check()
    steps.check()
    if durability is not None and torch.is_grad_enabled():  # evaluation belongs to the step before it
        durability.proceed()


class Assembly(ABC):
    """What an engine consists of. ``Engine`` adds what users call, and what the parts call back.

    Args:
        model: the user's.
        optimizer: the user's.
        config: budgets and everything else.
        group: the ranks that train together, a process group; ``None``: all that were started.

    Raises:
        InfinityError: it cannot be made; whatever was opened has been closed.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, group: Any = None) -> None:
        check_model(model, optimizer)
        recomputed = find_blocks(model, config.units, setting="recompute") if config.recompute else {}  # before tiles
        precision = precision_of(config)
        precision.check(model)
        if config.tile_large_layers:
            tile_for_budget(model, optimizer, config, precision)
        warn_of_excess()
        device = config.torch_device()
        check_compiling(config, device)
        self._resources = Resources(device)
        try:
            self._build(model, optimizer, config, device, precision, recomputed, group)
        except BaseException:
            self._resources.close()
            raise

    def _build(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: Config,
        device: torch.device,
        precision: Precision,
        recomputed: Mapping[str, nn.Module],
        group: Any,
    ) -> None:
        self._job = self._resources.job = join_job(config, device, group)
        self.module = model
        self.config = config = self._job.config
        device = self._job.device
        self.last_step: StepStats | None = None
        self.grad_norm: torch.Tensor | None = None
        self._scaling = scaling_for(config)
        self._gathered = Gathered()
        self.recorder = Recorder()
        stepped = {param for group in optimizer.param_groups for param in group["params"]}
        traits = probe(optimizer)
        self._plan = plan_within(
            model,
            config,
            device,
            lambda other: plan_for(model, stepped, traits.states, other, device, self._job.slicing),
        )
        self._job.check_plan(self._plan, optimizer)
        self._precision, self._units, self._parts = self._plan.precision, self._plan.units, self._plan.parts
        may_overlap = config.overlap and not traits.is_serial
        overlaps = may_overlap and self._plan.can_overlap(config.ram, uploads=device.type != "cpu")
        waits = config.max_grad_norm is not None or self._scaling.must_check()
        waits = waits or config.on_nonfinite != "continue"
        num_backwards = config.accumulation_steps if may_overlap else None
        on_trial = waits and overlaps and num_backwards is not None and pays_to_speculate(self._plan, config)
        num_backwards = num_backwards if on_trial or not waits else None
        for_good = num_backwards is not None and not on_trial
        self._orders = Orders(self._units, self._parts, self._plan.step_keys, under_backward=for_good)
        self._build_tiers(device, saved_bytes=speculated_bytes(self._plan) if on_trial else 0)
        # Where backward waits for steps, its gradients would displace what had been read for them.
        self._build_schedule(reads_ahead=overlaps or num_backwards is None)
        self._speculation = self._speculate() if on_trial else None
        self._build_steps(optimizer, overlaps=overlaps, num_backwards=num_backwards)
        self._capture = Capture(
            self.module,
            optimizer,
            self._units,
            self._plan,
            self._store,
            self._stepper,
            self._scaling,
            Generators(device),
            config,
            stage=config.stage if self._job.ranks.num_ranks > 1 else None,
        )
        self._durability = self._resources.durability = self._build_durability()
        self._take_over(optimizer, device)
        self._build_accumulation(device)
        self._resources.handles.append(Recomputation(list(recomputed.values())))
        self._finalizer = weakref.finalize(self, self._resources.close)
        self._durability.begin(self._checkpoint_loader.load)
        self._account = StepAccount(self._store, self._scheduler, self.recorder)

    @property
    def unit_names(self) -> list[str]:
        """The units, in the order of the model's parameters."""
        return [unit.name for unit in self._units]

    @abstractmethod
    def _settle(self, what: str) -> None:
        """Have nothing under way, for something that reads or changes state between steps."""

    @abstractmethod
    def _check_open(self) -> None:
        """Refuse what comes after ``close``."""

    @abstractmethod
    def _forget_gradients(self) -> None:
        """Discard all gradients, whatever they wait for."""

    @abstractmethod
    def _begin_step(self) -> bool:
        """Make ready for a step of the optimizer; whether there is to be one, or it is skipped."""

    @abstractmethod
    def _step(self) -> None:
        """Step the optimizer."""

    @abstractmethod
    def _discard(self) -> None:
        """Forget the gradients."""

    @abstractmethod
    def _load_optimizer(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the optimizer's state."""

    def _build_tiers(self, device: torch.device, *, saved_bytes: int) -> None:
        config, resources, orders = self.config, self._resources, self._orders
        transfers = ShardSpans(self.recorder, self.unit_names)
        open_tiers(
            resources, self._plan, config, orders, transfers, device, ranks=self._job.ranks, saved_bytes=saved_bytes
        )
        assert resources.store is not None
        assert resources.device is not None
        self._store, self._device = resources.store, resources.device
        self._activations = ActivationShards(self._store, orders, config.activation_bytes)

    def _build_schedule(self, *, reads_ahead: bool) -> None:
        plan, resources, recorder, names = self._plan, self._resources, self.recorder, self.unit_names
        self._stepper = SubGroupStepper(
            self._store, format_of=plan.format_of, state_format_of=plan.state_format_of, worker=resources.worker
        )
        self._stepper.observe = lambda part, begun, ended: recorder.record(
            OPTIMIZER, "step", begun, ended, unit=names[part.unit], part=part.position
        )
        self._activity = Activity(recorder)
        step_bytes = [plan.step_bytes(part) for part in self._parts if part.stepped]
        self._stream = resources.stream = StepStream(
            self._stepper,
            functools.partial(self._job.before_step, self._device),
            unit_distance=self._orders.next_in_training,
        )
        self._scheduler = self._job.build_scheduler(
            resources.loop,
            self._store,
            self._device,
            self._orders,
            self._units,
            self._parts,
            self._stream,
            self._activity,
            depth=self.config.prefetch,
            ahead_bytes=max(step_bytes, default=0) if reads_ahead else 0,
            backlog_bytes=self.config.ram // BACKLOG_SHARE,
        )
        self._job.build_gathers(self._scheduler, plan, self._device, self._store, self._orders, self._stream)

    def _speculate(self) -> Speculation:
        begin = functools.partial(
            Trial, self._store, self._stepper, self._stream, self._plan, self._orders, speculated_bytes(self._plan)
        )
        return Speculation(self._resources.loop, begin)

    def _build_steps(self, optimizer: torch.optim.Optimizer, *, overlaps: bool, num_backwards: int | None) -> None:
        config, loop, scaling = self.config, self._resources.loop, self._scaling
        norm_type = 2.0 if config.max_grad_norm is not None else scaling.norm_type
        norms = self._job.build_norms(
            norm_type, plan=self._plan, num_backwards=config.accumulation_steps, scaling=scaling
        )
        self._gradients = self._job.build_gradients(
            loop,
            self._store,
            self._scheduler,
            plan=self._plan,
            norms=norms,
            scaling=scaling,
            num_backwards=num_backwards,
            on_trial=self._speculation is not None,
        )
        self._clipper = Clipper(self.module, loop, self._store, self._gradients, norms, scaling)
        self._steps = OptimizerSteps(
            loop,
            self._stream,
            self._stepper,
            self._units,
            self._parts,
            optimizer,
            overlaps=overlaps,
            worker=self._resources.worker,
            speculation=self._speculation,
        )
        if self._speculation is not None:
            self._gradients.undo, self._speculation.reclaim = self._steps.undo, self._gradients.reclaim

    def _build_durability(self) -> Durability:
        config, state, nvme, ranks = self.config, self._resources.state, self._resources.nvme, self._job.ranks
        if state is None or nvme is None:
            return Scratch(Together(self._resources.loop, ranks))
        commits = Commits(
            nvme,
            state,
            num_retained=config.retained_commits,
            doubtful=config.verify != "off",
            rank=ranks.rank,
            world_size=ranks.num_ranks,
            agreement=ranks,
        )
        durable = Durable(
            self._resources.loop,
            self._store,
            self._scheduler,
            commits,
            state,
            self._capture,
            self.recorder,
            stepped=self._stream.stepped,
            every=config.durability if isinstance(config.durability, int) else None,
            ranks=ranks,
        )
        self._steps.before_change = durable.join
        return durable

    def _build_accumulation(self, device: torch.device) -> None:
        config, hooks, gradients, generators = self.config, self._hooks, self._gradients, Generators(device)
        around = frozenset(unit.index for unit in self._units if any(m is self.module for _, m in unit.triggers))
        room = Room(config.hbm, self._plan.smallest_hbm(self.module)[0], around)
        self._accumulation = Accumulation(
            config,
            Horizontal(hooks, generators),
            Vertical(self._units, room, hooks, gradients, generators, device, self.module),
            self._units,
            hooks,
            gradients,
            generators,
        )

    def _keeper(self) -> Keeper:
        """What keeps tensors that autograd saves."""
        if not self.config.activation_bytes:
            return KeepInPlace()
        return Offload(
            self._resources.loop,
            self._store,
            self._activations,
            self._activity,
            self._scheduler.statistics,
            staying=self.module.buffers(),
            let_go=self._gradients.let_go,
        )

    def _take_over(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        """Move the model's values and the optimizer's state into the tiers, and hook both."""
        loop, resources, plan, stepper = self._resources.loop, self._resources, self._plan, self._stepper
        formats: dict[str, Any] = {"format_of": plan.format_of, "state_format_of": plan.state_format_of}
        share = self._job.share
        self.buffer_bytes = convert_buffers(self.module, self._precision, device, share)
        resources.refusals = Refusals(self.module, self._units)
        loader = Loader(
            loop, self._store, optimizer, compute=stepper.compute, stored=self._parts, share=share, **formats
        )
        if not self._durability.resume(lambda: loader.leave(self._units)):
            stepper.adopt(loader.load(self._units))
        self._scheduler.start()
        self._hooks = resources.hooks = ModuleHooks(
            self.module,
            self._units,
            self._scheduler,
            self._gradients,
            self._precision,
            functools.partial(check_forward, self._gathered, self._steps, self._durability),
            self._steps,
            self._activity,
            self._keeper(),
        )
        if self.config.compile:
            blocks = find_blocks(self.module, self.config.units, setting="compile")
            resources.compiled = CompiledBlocks(blocks, self._units, self.config.compile_backend)
        self._reader = self._job.build_reader(loop, self._store, plan=plan, settled=self._steps.settle, **formats)
        resources.handles = hook_state_dicts(self.module, self._reader)
        self.values = Values(
            loop,
            self._store,
            self._units,
            self._parts,
            self._reader,
            WeightWriter(
                loop,
                self._store,
                functools.partial(self._job.after_change, self._device),
                self._units,
                format_of=plan.format_of,
                compute=stepper.compute,
                fail=self._steps.fail,
            ),
            self._gradients,
            self._gathered,
            state_of=stepper.state_of,
            state_format_of=plan.state_format_of,
            compute=stepper.compute,
            settle=self._settle,
            common=self._job.common,
        )
        self._model_loader = ModelLoader(self.module, self.values, resources.refusals.permit_loading)
        self._optimizer_loader = OptimizerLoader(
            loop, self._store, self._parts, stepper, loader, optimizer, fail=self._steps.fail
        )
        self.optimizer = OffloadedOptimizer(
            optimizer,
            self._begin_step,
            self._step,
            self._discard,
            functools.partial(self._reader.read_state, state_of=stepper.state_of),
            self._load_optimizer,
        )
        self._checkpoint_loader = CheckpointLoader(
            loop,
            self._store,
            self._scheduler,
            self._capture,
            self._model_loader,
            self.optimizer,
            fail=self._steps.fail,
            rank=self._job.ranks.rank,
        )
        self._checkpoint_saver = CheckpointSaver(loop, self._store, self._capture, self._job.ranks)
