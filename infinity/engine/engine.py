"""``Engine``: a model and its optimizer, trained inside budgets; what users call. Its parts: ``assembly.py``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.engine.accumulation import AccumulationInfo
from infinity.engine.assembly import check_forward
from infinity.engine.checkpoints import Checkpoints
from infinity.engine.lent import signals_after
from infinity.engine.summary import Summary, summarize
from infinity.engine.weights import StreamingStateDict
from infinity.errors import EngineStateError, InfinityError, ModelError
from infinity.trace import TierUsage


class Engine(Checkpoints):
    """Made by ``infinity.initialize``; a context manager that closes itself.

    Attributes:
        module: the user's model. Its parameters are placeholders of their true shape while their values are away.
        optimizer: steps like the user's own, wherever its state lives; learning-rate schedulers work on it.
        config: what it was made with.
        last_step: figures of the latest step, ``None`` before the first.
        values: weights, gradients and optimizer states, read and changed one at a time.
        grad_norm: the norm of all gradients before they were clipped, no dimensions, as of the last time; ``None``
            before the first.
        recorder: what ran and what waited, of the latest step; ``infinity.trace.write_trace`` writes it to a file.
    """

    _was_taken = False  # the latest step

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

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A context for all backwards of a step but the last, as in ``DistributedDataParallel``: gradients only add up.

        Backwards inside are not counted in ``Config.accumulation_steps``. With ``accumulation_steps=1`` the one outside
        is thus the last, under which steps begin, however many were before it. ``step()`` inside is refused.
        """
        self._check_usable()
        self._accumulation.refuse_inside("no_sync")
        return self._gradients.backwards.uncounted()

    def accumulate(
        self, micro_batches: Iterable[Any], compute_loss: Callable[[Any], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run forward and backward of all micro-batches of a step, in the schedule that ``Config.accumulation`` names.

        Vertically, ``compute_loss`` runs in one thread for each micro-batch, by turns, with the settings of the calling
        thread. In both schedules each micro-batch begins as after ``torch.manual_seed`` with a seed of its own, drawn
        from the CPU's default generator, which is left as it was after these draws.

        Args:
            micro_batches: what ``compute_loss`` takes; all are taken from the iterable before the first is computed.
            compute_loss: runs the model on one and returns its loss, one element, divided as the sum of gradients is
                to be; it may not run backward.

        Returns:
            The losses, detached, in order.

        Raises:
            EngineStateError: more micro-batches than ``accumulation_steps`` leaves, or gradients are disabled.
            MicroBatchError: one failed, from what it failed with; all gradients since the last step are discarded, and
                training may go on.
            ModelError: there are none, or what was given is no collection of them.
        """
        self._check_usable()
        self._hooks.refuse_inside("accumulate")
        given: Any = micro_batches
        if not isinstance(given, Iterable) or isinstance(given, (Mapping, str)):
            raise ModelError(f"accumulate(): expected micro-batches one by one, got a {type(given).__name__}")
        return self._accumulation.run(list(micro_batches), compute_loss, self.backward, self._forget_gradients)

    def step(self) -> bool:
        """Step the optimizer and consume the gradients; the same as ``engine.optimizer.step()``.

        With ``Config.overlap`` it returns while sub-groups are still being stepped, with the hyper-parameters and
        gradients of now; the next forward waits for each unit. What fails then is raised by whoever comes next.

        Returns:
            Whether it was taken: not where ``fp16`` overflowed, nor where ``on_nonfinite`` went back to a commit.

        Raises:
            EngineStateError: the engine is closed, or a step before failed half-way.
            NonFiniteError: see ``Config.on_nonfinite``.
            StorageError: a shard could not be read or written; the engine cannot go on.
        """
        self._was_taken = False
        self.optimizer.step()
        return self._was_taken

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
        *,
        parameters: Iterable[torch.Tensor] | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What ``torch.nn.utils.clip_grad_norm_`` does, to the last bit, with gradients that are away.

        Args:
            max_norm: what the norm is to be at most.
            norm_type: which norm; ``float("inf")`` for the largest value.
            error_if_nonfinite: raise where the norm is infinite or NaN, and change nothing.
            foreach: taken for PyTorch's sake; nothing follows from it.
            parameters: whose gradients; ``None`` for all of the model's.

        Returns:
            The norm before, no dimensions; also in ``grad_norm``.

        Raises:
            ConfigError: an argument is not what it must be.
            EngineStateError: steps begin under backward (``accumulation_steps``), when there is no norm yet.
            NonFiniteError: see ``error_if_nonfinite``.
            StorageError: gradients could not be read back.
        """
        self._check_open()
        self._gradients.backwards.refuse_early_steps("clip_grad_norm_()")
        self._settle("clip_grad_norm_")
        self.grad_norm = self._clipper.clip(max_norm, norm_type, error_if_nonfinite, parameters)
        return self.grad_norm

    def zero_grad(self) -> None:
        """Discard gradients that have not been stepped."""
        self.optimizer.zero_grad()

    def state_dict(self) -> StreamingStateDict:
        """The model's state by name, at full precision; each tensor is read when it is asked for."""
        self._check_usable()
        return StreamingStateDict(self.module, self._reader)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Give the model other values, as ``nn.Module.load_state_dict`` does: modules' own loading and hooks included.

        Parameters get them at full precision, part by part. Gradients and optimizer states stay. Each value is asked
        for twice: first, all are checked.

        Args:
            state: by the names of ``state_dict()``.
            strict: refuse a state with other names than the model's.

        Returns:
            ``missing_keys`` and ``unexpected_keys``.

        Raises:
            ModelError: names are missing or unexpected, or a value does not fit; nothing has been changed.
            StorageError: a shard could not be read or written.
        """
        self._settle("load_state_dict")
        return self._model_loader.load(state, strict=strict)

    def gathered(
        self, params: Iterable[nn.Parameter] | nn.Parameter, *, modify: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """A context in which parameters hold their values: copies on the device, in the dtype that computes.

        They take memory beside the budgets, so gather few at a time. Others than the model's are left as they are.

        Args:
            params: which.
            modify: keep what was changed when the block ends without an exception. Where an element was changed, its
                value is the new weight, which optimizers step; the others keep all bits of theirs.

        Raises:
            EngineStateError: it is inside a forward, a backward or another such context.
            ModelError: ``params`` are none; or, at the end, a parameter was changed without ``modify`` (through
                ``.data`` that cannot be seen, and is dropped), or has another shape now.
            StorageError: a shard could not be read or written.
        """
        return self.values.gathered(params, modify=modify)

    def synchronize(self) -> None:
        """Wait until steps, transfers and commits that have begun have ended.

        Raises:
            StorageError: a shard could not be read or written in a step, and the engine cannot go on; or a commit has
                failed, and the one before stands.
        """
        self._check_usable()
        self._steps.settle()
        self._durability.join()
        self._durability.check()
        for residency in (self._device.residency, self._store.host.residency):
            self._resources.loop.run(residency.quiesce())

    def usage(self) -> dict[str, TierUsage]:
        """What each tier holds now, held at most, and may hold: ``"device"``, ``"host"``, ``"nvme"``.

        And what of the last two is for ``"activations"`` (``Config.activation_bytes``).
        """
        self._check_usable()
        nvme = self._store.nvme
        return {
            "device": self._device.usage(),
            "host": self._store.host.usage(),
            "nvme": TierUsage(0, 0, 0) if nvme is None else nvme.usage(),
            "activations": self._activations.usage(),
        }

    @property
    def is_open(self) -> bool:
        """Whether it may be used: ``close()`` has not been called."""
        return self._finalizer.alive

    @property
    def io_choices(self) -> dict[Path, Any]:
        """For each NVMe directory, the I/O backend in use and why it was chosen."""
        nvme = self._store.nvme
        return {} if nvme is None else dict(nvme.choices)

    @property
    def last_accumulation(self) -> AccumulationInfo | None:
        """Which schedule the latest ``accumulate`` ran in, and why; ``None`` before the first."""
        return self._accumulation.last

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward: 1 without ``fp16``."""
        return self._scaling.scale

    @property
    def num_skipped_steps(self) -> int:
        """Steps that changed nothing, because a gradient had overflowed in ``fp16``."""
        return self._scaling.num_skipped_steps

    @property
    def num_trial_steps(self) -> int:
        """Steps that began under backward before it was known whether to clip or to skip (``Config.speculation``)."""
        return 0 if self._speculation is None else self._speculation.num_begun

    @property
    def num_undone_steps(self) -> int:
        """Those of them that were undone: gradients were clipped or not finite, or all was needed as it had been."""
        return 0 if self._speculation is None else self._speculation.num_undone

    @property
    def num_parameters(self) -> int:
        """How many elements the model's parameters have, shared ones once."""
        return sum(slot.num_elements for part in self._plan.whole_parts for slot in part.slots)

    @property
    def state_bytes(self) -> int:
        """This rank's parameters, master weights, gradients and optimizer states together, padding included."""
        return self._plan.state_bytes

    def summary(self) -> Summary:
        """What the model's state takes on this rank, and what it leaves of each budget."""
        self._check_open()
        return summarize(self._plan, self.module, self.config, self._job.device)

    def collective_bytes(self) -> dict[str, int]:
        """What this rank has sent to others since the start, by kind of collective; nothing on one rank."""
        return self._job.collective_bytes

    def close(self) -> None:
        """End all work and give back memory, files and hooks. Closing twice is harmless.

        State in the tiers is scratch and goes, but for commits: take ``state_dict()`` before. The model is left with
        placeholders, and refuses to compute until values are loaded into it.
        """
        if self.is_open:
            try:
                self._durability.join()
            finally:
                self._finalizer.detach()
                self.optimizer.release_user()
                self._resources.close()
            self._durability.check()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        if error is not None:
            self._job.why_closed = f"{type(error).__name__}: {error}"
        with contextlib.nullcontext() if kind is None else contextlib.suppress(InfinityError):  # what came first counts
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
        check_forward(self._gathered, self._steps)

    def _settle(self, what: str) -> None:
        """Have nothing under way, for something that reads or changes state between steps."""
        self._check_open()
        self._accumulation.refuse_inside(what)
        self._hooks.refuse_inside(what)
        self._hooks.settle()
        self._gathered.check()
        self._steps.settle()
        self._durability.join()
        self._durability.check()

    def _load_optimizer(self, state_dict: Mapping[str, Any]) -> None:
        self._settle("load_state_dict")
        self._optimizer_loader.load(state_dict)

    def _check_open(self) -> None:
        if not self.is_open:
            raise EngineStateError("the engine is closed; make another with infinity.initialize()")

    def _discard(self) -> None:
        self._check_usable()
        self._accumulation.refuse_inside("zero_grad")
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        self._gradients.discard()
        self._scaling.forget()

    def _begin_step(self) -> bool:
        self._check_open()
        self._accumulation.refuse_inside("step")
        self._gradients.backwards.refuse_uncounted("step")
        self._hooks.refuse_inside("step")
        self._hooks.settle()
        self._gathered.check()
        self._steps.check_errors()
        self._steps.check_groups()
        self._step_begun = time.perf_counter()
        with self._activity.waiting() as causes:
            self._steps.prepare()
            self._job.begin_step(self._durability.num_steps, self.optimizer.param_groups)
            causes.append(("optimizer", time.perf_counter()))
            self._durability.join()
            causes.append(("commit", time.perf_counter()))
            self._durability.check()
            if self._refuses_nonfinite():
                return False
            if self.config.max_grad_norm is not None:
                self.grad_norm = self._clipper.clip(self.config.max_grad_norm)
            self._clipper.check_finite()
            self._steps.judge(refuted=self._scaling.skips or self._gradients.are_scaled)
            causes.append(("optimizer", time.perf_counter()))
        if self._scaling.skips:
            with signals_after():
                self._gradients.discard()
                self._count_step()
            self._end_step()
            return False
        return True

    def _step(self) -> None:
        with self._activity.waiting() as causes:
            with signals_after():  # a step counts if, and only if, it is taken
                self._steps.recheck()
                self._steps.complete(self._gradients.take())
                self._count_step()
            self._was_taken = True
            self._steps.end()
            causes.append(("optimizer", time.perf_counter()))
        self._end_step()

    def _count_step(self) -> None:
        self._resources.loop.call_soon(self._scheduler.end_cycle)
        self._scaling.end_step()
        self._durability.num_steps += 1

    def _end_step(self) -> None:
        self._activity.switch("outside")
        self.last_step = self._account.end_step(self._step_begun)
        self._durability.end_step()
