"""``Shadow``: the user's optimizer class, stepping a few parameters at a time as if all were there.

A shadow is an object of the user's class with the user's attributes and hyper-parameters, whose groups hold a few
parameters with gradients and whose state is theirs. What the class does to a parameter is thus exactly what it does in
plain PyTorch, to the bit. A group of which no parameter is stepped holds parameters like the user's own but without a
gradient: the user's own may have one by then, of the next step.

What a step changes beside parameters and their state, in a group (a counter, a decayed rate) or in an attribute of the
object, must not reach the next sub-group of the same step: each shadow gets values of its own, and the changes are
applied once, after the last. Two sub-groups that change one value differently show an optimizer that computes it from
all parameters together (a global norm, an adapted step size). That cannot be had one sub-group at a time, so it is
refused rather than computed from a part of them.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from infinity.engine.unit import Slot
from infinity.errors import ModelError

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
PATCHED = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")
"""Methods of the user's object that the engine replaces, or an LR scheduler may have replaced."""

GUESSED = ("first", "second")
"""Names of states of an optimizer that cannot be asked what it has."""

_MANAGED = frozenset({"state", "param_groups", *HOOKS, *PATCHED})
_CONTAINERS = (list, dict, set, deque)
_SCALARS = (int, float, bool, str, type(None))


def is_shard(value: object, slot: Slot) -> bool:
    """Whether a state of a slot's parameter is kept as a shard."""
    return isinstance(value, torch.Tensor) and value.shape == slot.shape and slot.original.num_elements > 1


@dataclass(frozen=True, slots=True)
class Traits:
    """What an optimizer is expected to do.

    Attributes:
        states: for each parameter the names of the states of its shape that the optimizer has or will have.
        is_serial: whether a step must be seen as a whole: it draws random numbers, or changes the optimizer's own
            attributes or groups.
    """

    states: Mapping[nn.Parameter, tuple[str, ...]]
    is_serial: bool


def probe(optimizer: torch.optim.Optimizer) -> Traits:
    """Find out by stepping tiny parameters on a shadow, one for each group and shape in which 2 stands for more than 1.

    Sizes of 1 stay, since a factored moment of a parameter that has some may have the parameter's own shape.
    Neither the user's optimizer nor the random state changes. One that cannot step them is taken to have two states.
    """
    found: dict[tuple[int, tuple[int, ...]], tuple[str, ...]] = {}
    states: dict[nn.Parameter, tuple[str, ...]] = {}
    is_serial = False
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param.numel() <= 1:
                states[param] = ()
                continue
            shape = tuple(min(size, 2) for size in param.shape)
            if (index, shape) not in found:
                found[index, shape], serial = _probe(optimizer, index, param, shape)
                is_serial = is_serial or serial
            has = optimizer.state.get(param, {}).items()
            names = [name for name, value in has if isinstance(value, torch.Tensor) and value.shape == param.shape]
            states[param] = tuple(dict.fromkeys([*found[index, shape], *names]))
    for param in states:
        if param.is_meta:  # a deferred one is swapped for its placeholder, which PyTorch refuses under a weak reference
            _WITHOUT_GRADIENT.pop(param, None)
    return Traits(states, is_serial)


def _probe(
    optimizer: torch.optim.Optimizer, group: int, like: nn.Parameter, shape: tuple[int, ...]
) -> tuple[tuple[str, ...], bool]:
    param = nn.Parameter(torch.ones(shape, dtype=like.dtype), requires_grad=like.requires_grad)
    param.grad = torch.ones_like(param)
    slot = Slot("probe", param, param.shape, param.stride(), 0)
    shadow = Shadow(optimizer)
    try:
        with torch.random.fork_rng(devices=[]):
            generator = torch.get_rng_state()
            state = shadow.step([(group, param, {})])[param]
            draws = not torch.equal(generator, torch.get_rng_state())
    except Exception:  # whatever the user's class does with it: this is an estimate
        return GUESSED, True
    names = tuple(name for name, value in state.items() if is_shard(value, slot))
    return names, draws or shadow.changes_more


class Shadow:
    """Steps parameters on behalf of the user's optimizer, for one step: with the hyper-parameters that it has now.

    Args:
        optimizer: the user's; its class, attributes and parameter groups are used, its state is not.

    Attributes:
        group_of: the index of each parameter's group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._user = weakref.ref(optimizer)  # a shadow may outlive its step, and must not keep the engine with it
        self._class = type(optimizer)
        self._attributes = _attributes_of(optimizer)
        self._groups = [{name: _own(value) for name, value in group.items()} for group in optimizer.param_groups]
        self._new_attributes: dict[str, Any] = {}
        self._new_groups: dict[int, dict[str, Any]] = defaultdict(dict)
        self.group_of = {param: index for index, group in enumerate(self._groups) for param in group["params"]}

    @property
    def changes_more(self) -> bool:
        """Whether the steps so far changed groups or attributes, which ``end_step`` will apply."""
        return bool(self._new_attributes) or any(self._new_groups.values())

    def changed_hyperparameter(self) -> str | None:
        """What differs in the user's optimizer from the values that are being stepped with."""
        optimizer = self._user()
        assert optimizer is not None
        groups = optimizer.param_groups
        if len(groups) != len(self._groups):
            return "the number of groups"
        for index, (before, group) in enumerate(zip(self._groups, groups, strict=True)):
            for name in {*before, *group}:
                if name not in before or name not in group or not _unchanged(before[name], group[name]):
                    return f"group {index}, {name!r}"
        return None

    def step(self, members: Sequence[tuple[int, nn.Parameter, dict[str, Any]]]) -> dict[nn.Parameter, dict[str, Any]]:
        """Step parameters that have ``.grad``; with none, only what a step changes beside parameters.

        Args:
            members: for each its group's index, the parameter, and its state (empty before its first step).

        Returns:
            The state of each after the step.

        Raises:
            ModelError: the optimizer computes something from all of its parameters together.
        """
        shadow = object.__new__(self._class)
        vars(shadow).update({name: _own(value) for name, value in self._attributes.items()})
        vars(shadow).update({name: OrderedDict() for name in HOOKS})
        shadow.state = defaultdict(dict, {param: dict(state) for _, param, state in members if state})
        shadow.param_groups = [{name: _own(value) for name, value in group.items()} for group in self._groups]
        for index, group in enumerate(shadow.param_groups):
            stepped = [param for i, param, _ in members if i == index]
            group["params"] = stepped or [_without_gradient(param) for param in group["params"]]
        self._class.step(shadow)
        self._keep("", self._new_attributes, self._attributes, vars(shadow))
        for index, (group, after) in enumerate(zip(self._groups, shadow.param_groups, strict=True)):
            self._keep(f"group {index}, ", self._new_groups[index], group, after)
        return {param: dict(shadow.state.get(param, {})) for _, param, _ in members}

    def end_step(self) -> None:
        """Apply what the step changed in the optimizer's attributes and parameter groups."""
        optimizer = self._user()
        if optimizer is not None:
            _apply(self._new_attributes, vars(optimizer))
            for index, changes in self._new_groups.items():
                _apply(changes, optimizer.param_groups[index])
        self._new_attributes.clear()
        self._new_groups.clear()

    @staticmethod
    def _keep(where: str, kept: dict[str, Any], live: dict[str, Any], after: dict[str, Any]) -> None:
        """Add to ``kept`` what differs between ``live``, of which the shadow had copies, and ``after``."""
        for name, value in after.items():
            if name in _MANAGED or name == "params" or (name in live and _unchanged(live[name], value)):
                continue
            if name in kept and not _agree(kept[name], value):
                raise ModelError(
                    f"optimizer: its step computes {where}{name!r} from all parameters together (one sub-group gave "
                    f"{kept[name]!r}, another {value!r}), but sub-groups are stepped one by one; use an optimizer that "
                    "steps each parameter on its own"
                )
            kept[name] = value


_WITHOUT_GRADIENT: Any = WeakIdKeyDictionary()


def _without_gradient(param: nn.Parameter) -> nn.Parameter:
    """A parameter of the same shape that is not stepped; made once."""
    like: nn.Parameter | None = _WITHOUT_GRADIENT.get(param)
    if like is None:
        like = nn.Parameter(torch.zeros((), dtype=param.dtype).expand(param.shape), requires_grad=param.requires_grad)
        vars(like).update(vars(param))
        _WITHOUT_GRADIENT[param] = like
    return like


def _attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: _own(value) for name, value in vars(optimizer).items() if name not in _MANAGED}


def _own(value: Any) -> Any:
    """A copy of a value that a step might change in place."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, _CONTAINERS) else value


def _unchanged(live: Any, value: Any) -> bool:
    if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
        return live.dtype == value.dtype and torch.equal(live, value)
    if isinstance(live, _CONTAINERS) and type(live) is type(value) and len(live) == len(value):
        pairs = zip(_items(live), _items(value), strict=True)
        return all(first is second for first, second in pairs)
    return live is value


def _items(container: Any) -> Iterable[Any]:
    return itertools.chain(container, container.values()) if isinstance(container, dict) else container


def _agree(first: Any, second: Any) -> bool:
    """Whether two values are equal, as far as that can be told."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, _SCALARS) and isinstance(second, _SCALARS):
        return first == second or (first != first and second != second)
    return True


def _apply(changes: dict[str, Any], live: dict[str, Any]) -> None:
    """Change values in place where a step did, because others may hold them; else put the new ones."""
    for name, value in changes.items():
        old = live.get(name)
        if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor) and old.shape == value.shape:
            old.copy_(value)
        elif isinstance(old, _CONTAINERS) and type(old) is type(value):
            old.clear()
            (old.extend if isinstance(old, (list, deque)) else old.update)(value)
        else:
            live[name] = value
