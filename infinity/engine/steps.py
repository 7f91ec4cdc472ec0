"""``OptimizerSteps``: what training knows of optimizer steps: the one that is under way, and whether all went well.

A step has two halves. *Under backward*, where the number of backwards in a step is known
(``Config.accumulation_steps``), sub-groups whose gradients are final are handed to the stream at once (``begin``).
Where host memory has no room for a step beside a backward, the two take turns: backward waits there until they are
stepped, so that their gradients need not go to NVMe and back.
*At* ``step()``, the rest follows (``complete``), and unless steps must not overlap training, the call returns while the
stream still works: the next forward waits for each unit as it comes to it.

Hyper-parameters are those at the time of ``step()``, as in plain PyTorch: they are copied there, so that a scheduler
may change them right after. Where a step began under backward they were copied then; a change in between is refused,
because some sub-groups have been stepped with the old values. From ``begin`` to ``complete`` the model is in two minds,
some of its units old and some new, so nothing may read it: ``check`` refuses that. Where the step has begun on trial
(``speculation.py``) nothing is refused: whoever would see a difference has it undone.

An optimizer that draws random numbers, or changes its own attributes or groups while it steps, is stepped in order and
waited for: so it finds the generator as in plain PyTorch, and whoever looks at the groups finds them stepped.

Belongs to the training thread (and autograd's).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import weakref
from collections.abc import Callable, Sequence

import torch

from infinity.engine.lent import signals_after
from infinity.engine.shadow import Shadow
from infinity.engine.speculation import Speculation
from infinity.engine.stream import Step, StepStream, half_way
from infinity.engine.substep import SubGroupStepper
from infinity.engine.unit import Part, PartGradients, Unit
from infinity.engine.worker import Worker
from infinity.errors import EngineStateError, ModelError
from infinity.store.loop import LoopThread


class OptimizerSteps:
    """Hands sub-groups to the stream, and remembers what went wrong.

    Args:
        loop: the loop thread.
        stream: steps them.
        stepper: runs what no sub-group is for.
        units: all units.
        parts: all parts.
        optimizer: the user's.
        overlaps: whether a step may run beside training. Else backward waits for what begins under it, and holds no
            host memory meanwhile.
        worker: computes; it follows the training thread's number of threads, step by step.
        speculation: has steps begin under backward on trial; ``None``: for good.

    Attributes:
        overlaps: the same, as long as the optimizer allows it.
        takes_turns: whether backward waits for what begins under it.
        before_change: called before a step changes anything; waits for who must have the state as it is.
    """

    def __init__(
        self,
        loop: LoopThread,
        stream: StepStream,
        stepper: SubGroupStepper,
        units: Sequence[Unit],
        parts: Sequence[Part],
        optimizer: torch.optim.Optimizer,
        *,
        overlaps: bool,
        worker: Worker,
        speculation: Speculation | None = None,
    ) -> None:
        self._loop = loop
        self._stream = stream
        self._stepper = stepper
        self._units = units
        self._user = weakref.ref(optimizer)  # whose step() leads to the engine, which is forgotten with it
        self._known = {slot.param for part in parts if part.stepped for slot in part.slots}
        self._open: Shadow | None = None  # of the step that has begun under backward
        self._last: Shadow | None = None  # of the step that may still be under way
        self._running: concurrent.futures.Future[None] | None = None
        self._error: BaseException | None = None
        self._worker = worker
        self._speculation = speculation
        self.takes_turns = not overlaps
        self.overlaps = overlaps
        self.before_change: Callable[[], None] = lambda: None

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._user()
        assert optimizer is not None
        return optimizer

    def check(self) -> None:
        """Refuse to go on where the state is not whole; what has begun on trial is undone.

        Raises:
            EngineStateError: a step failed half-way, or is half-way between backward and ``step()``.
        """
        self.undo()
        self.check_errors()
        if self._open is not None:
            raise EngineStateError(
                "the optimizer step has begun under backward (accumulation_steps is reached), so part of the model is "
                "stepped already: call step() next; or leave accumulation_steps unset, and steps begin at step()"
            )

    def fail(self, error: BaseException) -> None:
        """Something else has failed half-way: no step, forward or read comes after it."""
        self._error = self._error or error

    def check_errors(self) -> None:
        """Raise what a step failed with; the first time as it was.

        Raises:
            EngineStateError: a step failed half-way.
        """
        if self._error is not None:
            raise half_way(self._error) from self._error
        self._stream.check()

    @property
    def may_begin(self) -> bool:
        """Whether a step should begin as soon as gradients are final."""
        return self._speculation is None or (self.overlaps and self._speculation.pays)

    def begin(self, gradients: Sequence[PartGradients]) -> None:
        """Step parts whose gradients are final, while backward goes on with others, or waits.

        Raises:
            StorageError: it waits, and a shard could not be read or written.
        """
        if not gradients:
            return
        if self._open is None:
            self._finish()
            self.before_change()
            self._open = Shadow(self._optimizer)
        self._submit(gradients, self._open, in_order_of_need=False)
        if self.takes_turns:
            self._loop.run(self._stream.drain())
            self.check_errors()

    def interrupted(self) -> None:
        """Backward has ended early: a step that had begun under it cannot be completed, and undone only on trial."""
        self.undo()
        if self._open is not None:
            self._open = None
            self._error = self._error or EngineStateError(
                "backward was interrupted when the step had begun under it (accumulation_steps)"
            )

    def undo(self) -> None:
        """All is needed as it was before a step began on trial, if one has."""
        if self._speculation is not None and self._open is not None:
            with signals_after():  # an interrupt would leave some sub-groups put back and others not
                self._speculation.undo()
                self._open = None

    def before_gather(self, unit: Unit) -> None:
        """A unit is about to be read: what has begun on trial must not show."""
        if self._speculation is not None and self._speculation.is_on_trial(unit.index):
            self.undo()

    def judge(self, *, refuted: bool) -> None:
        """All norms are known, and with them whether a step on trial is, or would have been, wrong.

        Raises:
            StorageError: it could not be undone; the engine cannot go on.
        """
        if self._speculation is not None:
            if refuted:
                self.undo()
            self._speculation.note(refuted)
            self.check_errors()

    def recheck(self) -> None:
        """Gradients are about to be taken: undo what has begun on trial with other hyper-parameters than now."""
        if self._open is not None and self._open.changed_hyperparameter() is not None:
            self.undo()

    def check_groups(self) -> None:
        """Refuse parameter groups with parameters that the optimizer did not have at start.

        Raises:
            ModelError: it says which group.
        """
        for index, group in enumerate(self._optimizer.param_groups):
            for param in group["params"]:
                if param not in self._known:
                    raise ModelError(
                        f"optimizer group {index} holds a parameter of shape {tuple(param.shape)} that it did not hold "
                        "at infinity.initialize(); add every parameter group before initialize(), frozen ones too"
                    )

    def prepare(self) -> None:
        """Have the step before ended, so that this one can be taken: an interrupt of this wait loses nothing."""
        if self._open is None:
            self._finish()
        self._worker.follow_caller()

    @property
    def needs_thread(self) -> bool:
        """Whether arithmetic waits for a thread to be lent."""
        return self._worker.has_calls

    def lend_thread(self) -> None:
        """Compute on the calling thread what waits for one."""
        self._worker.lend()

    def complete(self, gradients: Sequence[PartGradients]) -> None:
        """Have the parts stepped that are left, and accept what was on trial; ``end`` follows.

        Raises:
            ModelError: hyper-parameters changed since the step began under backward, or the optimizer cannot be stepped
                sub-group by sub-group.
        """
        shadow, has_begun = self._open or Shadow(self._optimizer), self._open is not None
        if not has_begun:
            self._finish()
        elif self._speculation is None:
            self._refuse_change(shadow)
        else:
            gradients = [*self._speculation.accept(), *gradients]
        self._open, self._last = None, shadow
        if gradients or has_begun:
            self._submit(gradients, shadow, in_order_of_need=self.overlaps)
        else:
            self._loop.run(self._stepper.compute(lambda: shadow.step([])))
        self._running = self._loop.submit(self._stream.drain())

    def end(self) -> None:
        """Wait for the step unless steps overlap training.

        Raises:
            StorageError: a shard could not be read or written.
        """
        if not self.overlaps:
            self.join()
            self.check_errors()

    def reset(self) -> None:
        """The state is another, and whole: what failed counts no more, and what has begun under backward is gone."""
        self._finish()
        self._open = self._last = self._error = None

    def join(self) -> None:
        """Wait until the last step has ended; what went wrong is raised by ``check``."""
        if self._running is not None:
            self._finish()

    def settle(self) -> None:
        """Have every step ended, so that weights and states can be read.

        Raises:
            EngineStateError: as for ``check``.
        """
        self.check()
        self.join()
        self.check()

    def _finish(self) -> None:
        """Wait for the step before, and apply what it changed beside parameters and their state."""
        if self._running is not None:
            with contextlib.suppress(EngineStateError):  # the loop has been closed: whoever goes on is told
                self._loop.wait(self._running)
            self._running = None
        last, self._last = self._last, None
        if last is not None and self._stream.error is None:
            self.overlaps = self.overlaps and not last.changes_more
            last.end_step()

    def _refuse_change(self, shadow: Shadow) -> None:
        changed = shadow.changed_hyperparameter()
        if changed is not None:
            self._error = ModelError(
                f"optimizer: {changed} was changed between backward and step(), when the step had begun under backward "
                "with its former value; change hyper-parameters before the last backward, or leave "
                "accumulation_steps unset"
            )
            raise self._error

    def _submit(self, gradients: Sequence[PartGradients], shadow: Shadow, *, in_order_of_need: bool) -> None:
        if self._speculation is not None and self._open is not None:
            jobs = self._speculation.jobs(gradients, shadow)
        else:
            jobs = [Step(each, shadow) for each in gradients]
        for unit in {job.part.unit for job in jobs}:
            self._units[unit].version += 1
        self._loop.call_soon(lambda: self._stream.submit(jobs, in_order_of_need=in_order_of_need))
