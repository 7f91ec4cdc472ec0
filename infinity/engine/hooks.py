"""Forward and backward hooks: when a unit is gathered, and when it may be released.

Forward: every trigger of a unit gathers it before its forward and releases it after, also when the forward raises. A
parameter of another unit that a forward reads (``reads.py``) is *lent* to it: gathered, and released when it ends; so
is one whose memory a module returns, to the forward that called it. While a forward runs, what autograd saves goes
through ``saved.py``.

Backward: when the gradient of a unit's output is ready, the unit is gathered and *held*; when the gradient of its input
is final, its backward is over and it is released. A unit whose input needs no gradient has no such end; it is gathered
when a handle needs it, and held until backward ends. Holds are soft: if a demand finds no room, holds that no running
forward needs, and that no node of the graph is reading, are given up. That costs another gather, never a number.

Which backward: the gradient of the model's output comes first, and outside the backwards that a reentrant checkpoint
runs inside; so it is there that a backward is taken to begin, and one that an exception has ended to be over.

Rejected: identity autograd functions around each unit (they forbid in-place operations on its inputs); replacing
``nn.functional.linear`` (covers only what it replaces).
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from infinity.engine.activity import Activity
from infinity.engine.gathering import Gatherer
from infinity.engine.gradients import GradientSink
from infinity.engine.param_hooks import ParamHooks
from infinity.engine.passage import Passage, in_backward
from infinity.engine.precision import Precision
from infinity.engine.prefetch import PrefetchScheduler
from infinity.engine.reads import unwatch_reads, watch_reads
from infinity.engine.saved import Keeper, SavedTensors
from infinity.engine.scope import Scope, is_on_stack
from infinity.engine.steps import OptimizerSteps
from infinity.engine.tracing import refuse_tracing
from infinity.engine.trees import map_tensors, tensors_of
from infinity.engine.turns import Turns
from infinity.engine.unit import Part, Unit, UnitState
from infinity.errors import EngineStateError


class ModuleHooks:
    """All hooks of one engine on one model, from construction to ``remove``.

    Args:
        model: the user's model.
        units: its units.
        scheduler: gathers and releases.
        gradients: takes the gradients of stepped parts.
        precision: casts the model's inputs.
        check: called before a forward of the whole model, or of a part of it; raises where there must be none.
        steps: begins steps under backward.
        activity: told what runs.
        keeper: keeps what autograd saves and is no weight.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        scheduler: PrefetchScheduler,
        gradients: GradientSink,
        precision: Precision,
        check: Callable[[], None],
        steps: OptimizerSteps,
        activity: Activity,
        keeper: Keeper,
    ) -> None:
        self._units = units
        self._scheduler = scheduler
        self._gradients = gradients
        self._precision = precision
        self._check = check
        self._steps = steps
        self._activity = activity
        self._saved = SavedTensors(self._hold_for_node, keeper)
        self._gatherer = Gatherer(
            units, scheduler, gradients, self._saved, check, steps.before_gather, self._has_been_released
        )
        self._passage = self._gatherer.passage
        self._saved.outer = self._passage.outer_hooks
        self._turns = self._gatherer.turns
        self._hooks: list[Any] = []
        for unit in units:
            unit.note_versions()
            for _, module in unit.triggers:
                self._hook_trigger(unit, module)
        self._hooks += [
            model.register_forward_pre_hook(self._before_model, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._after_model, always_call=True, with_kwargs=True),
        ]
        self._param_hooks = ParamHooks(
            gradients,
            [part for unit in units for part in unit.parts],
            before=self._await_gradient,
            on_gradient=self._take_gradient,
            after=self._gradient_taken,
        )
        self._watched = watch_reads(units, self._read)

    def remove(self) -> None:
        """Take every hook off the model and let every unit go."""
        self.recover()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._param_hooks.remove()
        unwatch_reads(self._watched)
        self._watched = []

    def recover(self) -> None:
        """Undo what an interrupted forward or backward left: hooks in force, units in use, open gradients."""
        self._saved.clear()
        self._passage.running.clear()
        self._passage.backward_task = None
        self._passage.backward_scope.lent.clear()
        for _ in self._passage.holds.drain():
            pass
        self._passage.holds.forget_reads()
        self._passage.remove_leaf_hooks()
        self._gradients.end_backward()
        self._gatherer.release_all()
        self._steps.interrupted()

    def settle(self) -> None:
        """Let go what an interrupted forward or backward still holds; nothing happens inside one that is running."""
        left_over = self._passage.is_under_way and not self._turns.is_shared
        if left_over and not in_backward() and not self._is_running():
            self.recover()

    def take_turns(self, turns: Turns) -> Turns:
        """From now on ``turns`` says which passage runs when. Returns what did until now."""
        before, self._turns = self._turns, turns
        self._gatherer.turns = turns
        return before

    def switch(self, passage: Passage) -> Passage:
        """Have another passage run: what the one that ran until now uses stays gathered. Returns that one."""
        before = self._passage
        before.rest()
        self._passage = self._gatherer.passage = passage
        self._saved.outer = passage.outer_hooks
        passage.resume()
        self._follow()
        return before

    def release(self, units: Iterable[Unit]) -> None:
        """Release units that were kept for passages to come, as far as they are idle."""
        self._gatherer.release(units)

    def begin_final_steps(self) -> None:
        """Step what is final by now, if the last backward before a step has run."""
        self._begin_steps(self._units)

    def refuse_inside(self, what: str) -> None:
        """Refuse an optimizer step, or clipping, in the middle of a forward or backward.

        Raises:
            EngineStateError: there is one.
        """
        if in_backward() or self._is_running():
            raise EngineStateError(
                f"{what}() was called inside a forward or backward of the model, whose parameters are in use; "
                "call it after loss.backward() has returned"
            )

    # Forward

    def _hook_trigger(self, unit: Unit, module: nn.Module) -> None:
        before = functools.partial(self._before_trigger, unit)
        after = functools.partial(self._after_trigger, unit)
        self._hooks += [
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_hook(after, always_call=True, with_kwargs=True),
        ]

    def _before_model(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        refuse_tracing()
        if not in_backward() and not self._is_running():
            self.settle()
            self._check()
            self._scheduler.begin_forward(training=torch.is_grad_enabled())
        self._enter(Scope(None, module, sys._getframe(1)))
        return self._precision.cast_inputs((args, kwargs))  # type: ignore[no-any-return]

    def _after_model(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        result = self._after_trigger(None, module, args, kwargs, output)
        if torch.is_grad_enabled() and not in_backward():
            for tensor in tensors_of(output if result is None else result):
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(self._begin_backward)
        return result

    def _is_running(self) -> bool:
        """Whether a forward of the whole model is on the stack, and not just left over from an interrupt."""
        return is_on_stack(self._passage.running, sys._getframe(1))

    def _before_trigger(self, unit: Unit, module: nn.Module, args: Any) -> None:
        self._enter(Scope(unit, module))

    def _enter(self, scope: Scope) -> None:
        refuse_tracing()
        self._param_hooks.update()
        if scope.unit is not None:
            self._turns.before_gather(scope.unit)
        self._passage.running.append(scope)
        if scope.unit is not None:
            self._use(scope.unit, is_lent=False)
            if scope.unit.state is UnitState.RELEASED:
                self._gatherer.bind(scope.unit)
        scope.pushed = self._saved.push()
        self._follow()

    def _follow(self) -> None:
        """Say what runs now that a scope has been entered or left."""
        phase = "backward" if in_backward() else "forward"
        unit = next((scope.unit for scope in reversed(self._passage.running) if scope.unit is not None), None)
        if self._passage.running or in_backward():
            self._activity.switch(phase, *([unit.name] if unit is not None else []))
        else:
            self._activity.switch("outside")
        self._lend_thread()

    def _lend_thread(self) -> None:
        """Between two pieces of its work the training thread computes what the optimizer has no thread for."""
        if self._steps.needs_thread:
            with self._activity.aside():
                self._steps.lend_thread()

    def _leave(self, unit: Unit | None, module: nn.Module) -> Scope | None:
        """End a scope. ``None`` if it never began: PyTorch calls our hook also when an earlier pre-hook raised."""
        running = self._passage.running
        if not running or running[-1].unit is not unit or running[-1].module is not module:
            return None
        scope = running.pop()
        if scope.pushed:
            self._saved.pop()
        self._follow()
        return scope

    def _after_trigger(self, unit: Unit | None, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Returns what is to replace the output, if anything."""
        scope = self._leave(unit, module)
        if scope is None:
            return None
        used = scope.lent if unit is None else [unit, *scope.lent]
        for each in used:
            each.forward_depth -= 1
        ending = [each for each in used if not each.forward_depth]
        replacement = self._rescue(ending, output) if ending else None
        if unit is not None and not unit.forward_depth and torch.is_grad_enabled():
            self._hook_boundary(unit, (args, kwargs), output)
        self._gatherer.release_idle(ending)
        return replacement

    def _rescue(self, units: Sequence[Unit], output: Any) -> Any:
        """Keep what a forward returns of the memory of ``units``: lent to its caller, or else as a copy."""
        found = {id(unit): unit for unit in map(self._saved.unit_of, tensors_of(output)) if unit in units}
        if not found:
            return None
        if self._passage.running:
            for unit in found.values():
                if unit is not None:
                    self._lend(unit, self._passage.running[-1])
            return None
        return map_tensors(lambda tensor: tensor.clone() if self._saved.unit_of(tensor) in units else tensor, output)

    def _read(self, unit: Unit) -> None:
        """A parameter of a unit that no forward uses is being read."""
        if self._passage.running:
            self._lend(unit, self._passage.running[-1])
        elif in_backward():  # a function that a checkpoint recomputes
            self._watch_backward()
            self._lend(unit, self._passage.backward_scope)

    def _lend(self, unit: Unit, scope: Scope) -> None:
        if not in_backward():
            self._turns.before_gather(unit)
        if unit.state is UnitState.RELEASED:
            self._gatherer.bind(unit)
        scope.lent.append(unit)
        self._use(unit, is_lent=True)

    def _use(self, unit: Unit, *, is_lent: bool) -> None:
        unit.forward_depth += 1
        if unit.forward_depth == 1 and not in_backward():
            self._turns.note_use(unit, is_lent=is_lent)

    def _hook_boundary(self, unit: Unit, inputs: Any, output: Any) -> None:
        """Mark where the unit's backward begins and ends."""
        ends = [tensor for tensor in tensors_of(inputs) if tensor.requires_grad]
        if not ends:
            return
        for tensor in tensors_of(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(functools.partial(self._before_backward, unit))
        for tensor in ends:
            hook = tensor.register_hook(functools.partial(self._after_backward, unit))
            if tensor.is_leaf:  # it may live for ever
                self._passage.leaf_hooks.append(hook)

    # Backward

    def _begin_backward(self, gradient: torch.Tensor) -> None:
        if self._passage.backward_task not in (None, torch._C._current_graph_task_id()):
            self._end_backward()
        self._watch_backward()

    def _before_backward(self, unit: Unit, gradient: torch.Tensor) -> None:
        self._turns.before_gather(unit)
        self._hold(unit)

    def _after_backward(self, unit: Unit, gradient: torch.Tensor) -> None:
        if self._passage.holds.remove(unit):
            self._gatherer.release_idle([unit])
            self._activity.switch("backward")

    def _hold(self, unit: Unit) -> None:
        self._watch_backward()
        if unit.state is UnitState.RELEASED:
            self._gatherer.bind(unit)
            self._activity.switch("backward", unit.name)
        self._passage.holds.add(unit)

    def _hold_for_node(self, unit: Unit, reads: bool) -> None:
        """Hold a unit for the node that is unpacking its saved tensors; ``reads``: until that node has run."""
        self._hold(unit)
        if reads:
            self._passage.holds.note_read(unit)

    def _watch_backward(self) -> None:
        """Have ``_end_backward`` called when the backward that is running ends."""
        if self._passage.backward_task is None and in_backward():
            self._passage.backward_task = torch._C._current_graph_task_id()
            self._activity.switch("backward")
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _await_gradient(self, part: Part, position: int) -> None:
        self._turns.before_gradient(part, position)

    def _take_gradient(self) -> None:
        """A gradient has come."""
        self._watch_backward()
        self._lend_thread()

    def _gradient_taken(self, part: Part, position: int) -> None:
        self._turns.after_gradient(part, position)

    def _end_backward(self) -> None:
        lent = self._passage.backward_scope.lent
        self._passage.backward_scope = Scope(None, None)
        for unit in lent:
            unit.forward_depth -= 1
        self._passage.holds.forget_reads()
        self._gatherer.release_idle([*self._passage.holds.drain(), *lent])
        self._passage.remove_leaf_hooks()
        self._gradients.complete()
        self._begin_steps(self._units)
        self._gradients.end_backward()
        self._passage.backward_task = None
        self._activity.switch("outside")

    def _begin_steps(self, units: Iterable[Unit]) -> None:
        """Step what this backward will neither change nor read any more, if it is the last before a step."""
        nested = in_backward() and torch._C._current_graph_task_id() != self._passage.backward_task
        # What a reentrant checkpoint runs inside may bring more gradients.
        if self._gradients.backwards.is_final and self._steps.may_begin and not nested:
            idle = [unit for unit in units if unit.state is UnitState.RELEASED and not unit.handles]
            taken = [taken for unit in idle for taken in self._gradients.take_final(unit)]
            if taken and self._steps.takes_turns:
                self._gradients.let_go()  # whoever waits holds no host memory
                with self._activity.waiting() as causes:
                    self._steps.begin(taken)
                    causes.append(("optimizer", time.perf_counter()))
            else:
                self._steps.begin(taken)

    def _has_been_released(self, unit: Unit) -> None:
        if self._passage.backward_task is not None:
            self._begin_steps([unit])
