"""Forward and backward hooks: when a unit is gathered, and when it may be released.

Forward: every trigger of a unit gathers it before its forward and releases it after, also when the forward raises.

Saved tensors: autograd would keep the gathered buffer through the tensors it saves for backward, and would read them
after the buffer has been used for something else. While a unit's forward runs, ``saved_tensors_hooks`` turn each saved
tensor whose storage is a gathered buffer (a weight, or a view such as its transpose) into a *handle*: unit, offset,
size and stride. At backward the handle is unpacked from wherever the unit is gathered by then, gathering it first if
need be. Everything else goes on to the hooks in force before (an activation checkpoint's, a user's), so nesting works.

Backward: when the gradient of a unit's output is ready, the unit is gathered and *held*; when the gradient of its input
is final, its backward is over and it is released. A unit whose input needs no gradient has no such end; it is gathered
when a handle needs it, and held until backward ends. Holds are soft: if a demand finds no room, holds without a running
forward are given up, the latest apart, because a node may be reading it. That costs another gather, never a number.

Rejected: identity autograd functions around each unit (they forbid in-place operations on its inputs); replacing
``nn.functional.linear`` (covers only what it replaces).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from infinity.engine.gradients import GradientSink
from infinity.engine.precision import Precision
from infinity.engine.prefetch import PrefetchScheduler
from infinity.engine.unit import Part, Unit, UnitState
from infinity.errors import BudgetError, EngineStateError

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


class _Handle(NamedTuple):
    """A saved tensor that lies in a unit's gathered buffer; ``offset`` in elements from the buffer's start."""

    unit: Unit
    version: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Scope(NamedTuple):
    """A forward that is running: a unit's trigger, or the whole model (``unit`` is ``None``)."""

    unit: Unit | None
    module: nn.Module
    frame: FrameType | None


class _Outer(NamedTuple):
    """A saved tensor that hooks outside ours have packed."""

    unpack: Unpack
    packed: Any


class ModuleHooks:
    """All hooks of one engine on one model, from construction to ``remove``.

    Args:
        model: the user's model.
        units: its units.
        scheduler: gathers and releases.
        gradients: takes the gradients of stepped parts.
        precision: casts the model's inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        scheduler: PrefetchScheduler,
        gradients: GradientSink,
        precision: Precision,
    ) -> None:
        self._units = units
        self._scheduler = scheduler
        self._gradients = gradients
        self._precision = precision
        self._gathered: dict[int, Unit] = {}  # by address of the gathered buffer
        self._held: dict[int, Unit] = {}  # by index, the latest last
        self._outer: list[tuple[Pack, Unpack] | None] = []  # hooks in force before each of ours
        self._pushed: list[_Scope] = []  # the scopes that pushed saved-tensor hooks
        self._running: list[_Scope] = []
        self._backward_task: int | None = None
        self._hooks: list[Any] = []
        self._frozen = [
            (part, position)
            for unit in units
            for part in unit.parts
            if part.stepped
            for position in range(len(part.slots))
        ]
        for unit in units:
            for _, module in unit.triggers:
                self._hook_trigger(unit, module)
        self._hooks += [
            model.register_forward_pre_hook(self._before_model, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._after_model, always_call=True),
        ]
        self._hook_gradients()

    def remove(self) -> None:
        """Take every hook off the model and let every unit go."""
        self.recover()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def recover(self) -> None:
        """Undo what an interrupted forward or backward left: hooks in force, units in use, open gradients."""
        for _ in self._outer:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        self._pushed.clear()
        self._outer.clear()
        self._running.clear()
        self._backward_task = None
        self._held.clear()
        self._gradients.end_backward()
        for unit in self._units:
            unit.forward_depth = 0
            unit.held_for_backward = False
            if unit.state is UnitState.GATHERED:
                unit.unbind()
        self._gathered.clear()
        self._scheduler.release_all()

    def settle(self) -> None:
        """Before an optimizer step: whatever an interrupted forward or backward still holds is let go."""
        if self._running or self._held or self._backward_task is not None:
            self.recover()

    # Forward

    def _hook_trigger(self, unit: Unit, module: nn.Module) -> None:
        before = functools.partial(self._before_trigger, unit)
        after = functools.partial(self._after_trigger, unit)
        self._hooks += [
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_hook(after, always_call=True, with_kwargs=True),
        ]

    def _before_model(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not self._in_backward() and not self._is_running():
            self.settle()
            self._hook_gradients()
            self._scheduler.begin_forward(training=torch.is_grad_enabled())
        self._running.append(_Scope(None, module, sys._getframe(1)))
        return self._precision.cast_inputs((args, kwargs))  # type: ignore[no-any-return]

    def _after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        self._leave(None, module)

    def _is_running(self) -> bool:
        """Whether a forward of the whole model is on the stack, and not just left over from an interrupt."""
        frames = {id(scope.frame) for scope in self._running if scope.frame is not None}
        frame: FrameType | None = sys._getframe(1) if frames else None
        while frame is not None:
            if id(frame) in frames:
                return True
            frame = frame.f_back
        return False

    def _leave(self, unit: Unit | None, module: nn.Module) -> _Scope | None:
        """End a scope. ``None`` if it never began: PyTorch calls our hook also when an earlier pre-hook raised."""
        if not self._running or self._running[-1].unit is not unit or self._running[-1].module is not module:
            return None
        return self._running.pop()

    def _before_trigger(self, unit: Unit, module: nn.Module, args: Any) -> None:
        scope = _Scope(unit, module, None)
        self._running.append(scope)
        unit.forward_depth += 1
        if unit.state is UnitState.RELEASED:
            self._bind(unit)
        self._push_hooks(scope)

    def _after_trigger(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        scope = self._leave(unit, module)
        if scope is None:
            return
        if self._pushed and self._pushed[-1] is scope:
            self._pushed.pop()
            self._outer.pop()
            torch._C._autograd._pop_saved_tensors_default_hooks()
        unit.forward_depth -= 1
        if unit.forward_depth:
            return
        if torch.is_grad_enabled():
            self._hook_boundary(unit, (args, kwargs), output)
        if not unit.held_for_backward and unit.state is UnitState.GATHERED:
            self._release(unit)

    def _hook_boundary(self, unit: Unit, inputs: Any, output: Any) -> None:
        """Mark where the unit's backward begins and ends."""
        ends = [tensor for tensor in _tensors(inputs) if tensor.requires_grad]
        if not ends:
            return
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._before_backward, unit))
        for tensor in ends:
            tensor.register_hook(functools.partial(self._after_backward, unit))

    # Saved tensors

    def _push_hooks(self, scope: _Scope) -> None:
        # Typed as never None, which it is when no hooks are in force.
        outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if outer is not None and outer[0] == self._pack:
            return
        torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
        self._outer.append(outer)
        self._pushed.append(scope)

    def _pack(self, tensor: torch.Tensor) -> Any:
        unit = self._gathered.get(tensor.untyped_storage().data_ptr()) if tensor.layout is torch.strided else None
        if unit is not None and unit.buffer is not None:
            base = int(unit.buffer.storage_offset()) // tensor.element_size()
            offset = int(tensor.storage_offset()) - base
            return _Handle(unit, unit.version, tensor.dtype, tensor.size(), tensor.stride(), offset)
        outer = self._outer[-1] if self._outer else None
        if outer is not None:
            pack, unpack = outer
            return _Outer(unpack, pack(tensor))
        # Not the tensor itself: a saved output would keep its own node alive for ever.
        return tensor.detach()

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, _Handle):
            unit = packed.unit
            if unit.version != packed.version:
                raise EngineStateError(
                    f"unit {unit.name}: backward needs the parameters as they were in its forward, but an optimizer "
                    "step has changed them since; run backward before step()"
                )
            self._hold(unit)
            assert unit.buffer is not None
            flat = unit.buffer.view(packed.dtype)
            return flat.as_strided(packed.size, packed.stride, flat.storage_offset() + packed.offset)
        if isinstance(packed, _Outer):
            return packed.unpack(packed.packed)
        assert isinstance(packed, torch.Tensor)
        return packed

    # Backward

    def _before_backward(self, unit: Unit, gradient: torch.Tensor) -> None:
        self._hold(unit)

    def _after_backward(self, unit: Unit, gradient: torch.Tensor) -> None:
        if self._held.pop(unit.index, None) is not None:
            self._let_go(unit)

    def _hold(self, unit: Unit) -> None:
        self._watch_backward()
        if unit.state is UnitState.RELEASED:
            self._bind(unit)
        unit.held_for_backward = True
        self._held.pop(unit.index, None)
        self._held[unit.index] = unit

    def _let_go(self, unit: Unit) -> None:
        unit.held_for_backward = False
        if not unit.forward_depth:
            self._release(unit)

    def _watch_backward(self) -> None:
        """Have ``_end_backward`` called when the outermost backward that is running ends."""
        if self._backward_task is None and self._in_backward():
            self._backward_task = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._backward_task = None
        while self._held:
            self._let_go(self._held.popitem()[1])
        self._gradients.end_backward()

    def _hook_gradients(self) -> None:
        """Hook parameters that require a gradient and are not hooked yet: all at first, unfrozen ones later."""
        still_frozen = []
        for part, position in self._frozen:
            param = part.slots[position].param
            if param.requires_grad:
                before = functools.partial(self._before_gradient, part, position)
                after = functools.partial(self._take_gradient, part, position)
                self._hooks += [
                    param.register_hook(before),
                    param.register_post_accumulate_grad_hook(after),
                ]
            else:
                still_frozen.append((part, position))
        self._frozen = still_frozen

    def _before_gradient(self, part: Part, position: int, gradient: torch.Tensor) -> None:
        self._gradients.make_way(part, position)

    def _take_gradient(self, part: Part, position: int, param: torch.Tensor) -> None:
        self._watch_backward()
        gradient, param.grad = param.grad, None
        assert gradient is not None
        self._gradients.arrive(part, position, gradient)

    # Units

    def _bind(self, unit: Unit) -> None:
        try:
            buffer = self._scheduler.gather(unit)
        except BudgetError:
            if not self._give_up_holds():
                raise
            buffer = self._scheduler.gather(unit)
        unit.bind(buffer)
        self._gathered[buffer.untyped_storage().data_ptr()] = unit

    def _give_up_holds(self) -> bool:
        spare = [unit for unit in list(self._held.values())[:-1] if not unit.forward_depth]
        for unit in spare:
            del self._held[unit.index]
            self._let_go(unit)
        return bool(spare)

    def _release(self, unit: Unit) -> None:
        assert unit.buffer is not None
        del self._gathered[unit.buffer.untyped_storage().data_ptr()]
        unit.unbind()
        self._scheduler.release(unit)

    @staticmethod
    def _in_backward() -> bool:
        return torch._C._current_graph_task_id() != -1


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor in any nesting of containers and dataclasses."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "__dataclass_fields__"):
            yield from _tensors([getattr(leaf, name) for name in leaf.__dataclass_fields__])
