"""``Shadow``: the user's optimizer class, stepping a few parameters at a time as if all were there.

A shadow is an object of the user's class with the user's attributes and hyper-parameters, whose groups hold a few
parameters with gradients and whose state is theirs. What the class does to a parameter is thus exactly what it does in
plain PyTorch, to the bit. A group of which no parameter is stepped keeps the user's own, which have no gradient then.

What a step changes beside parameters and their state, in a group (a counter, a decayed rate) or in an attribute of the
object, must not reach the next sub-group of the same step: each shadow gets values of its own, and the changes are
applied once, after the last. Two sub-groups that change one value differently show an optimizer that computes it from
all parameters together (a global norm, an adapted step size). That cannot be had one sub-group at a time, so it is
refused rather than computed from a part of them.
"""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from infinity.engine.unit import Slot
from infinity.errors import ModelError

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
PATCHED = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")
"""Methods of the user's object that the engine replaces, or an LR scheduler may have replaced."""

_MANAGED = frozenset({"state", "param_groups", *HOOKS, *PATCHED})
_CONTAINERS = (list, dict, set, deque)
_SCALARS = (int, float, bool, str, type(None))


def is_shard(value: object, slot: Slot) -> bool:
    """Whether a state of a slot's parameter is kept as a shard."""
    return isinstance(value, torch.Tensor) and value.shape == slot.shape and value.numel() > 1


def expected_states(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, tuple[str, ...]]:
    """For each parameter the names of the states of its shape that the optimizer has or will have.

    Found by stepping tiny parameters, one for each group and number of dimensions, on a shadow: neither the user's
    optimizer nor the random state changes. An optimizer that cannot step them is taken to have two such states.
    """
    found: dict[tuple[int, int], tuple[str, ...]] = {}
    states: dict[nn.Parameter, tuple[str, ...]] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param.numel() <= 1:
                states[param] = ()
                continue
            if (index, param.ndim) not in found:
                found[index, param.ndim] = _probe(optimizer, index, param)
            has = optimizer.state.get(param, {}).items()
            names = [name for name, value in has if isinstance(value, torch.Tensor) and value.shape == param.shape]
            states[param] = tuple(dict.fromkeys([*found[index, param.ndim], *names]))
    return states


def _probe(optimizer: torch.optim.Optimizer, group: int, like: nn.Parameter) -> tuple[str, ...]:
    param = nn.Parameter(torch.ones((2,) * like.ndim, dtype=like.dtype), requires_grad=like.requires_grad)
    param.grad = torch.ones_like(param)
    slot = Slot("probe", param, param.shape, param.stride(), 0)
    try:
        with torch.random.fork_rng(devices=[]):
            state = Shadow(optimizer).step([(group, param, {})])[param]
    except Exception:  # whatever the user's class does with it: this is an estimate
        return ("first", "second")
    return tuple(name for name, value in state.items() if is_shard(value, slot))


class Shadow:
    """Steps parameters on behalf of the user's optimizer.

    Args:
        optimizer: the user's; its class, attributes and live parameter groups are used, its state is not.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._step = type(optimizer).step
        self._attributes: dict[str, Any] = {}
        self._groups: dict[int, dict[str, Any]] = defaultdict(dict)

    def step(self, members: Sequence[tuple[int, nn.Parameter, dict[str, Any]]]) -> dict[nn.Parameter, dict[str, Any]]:
        """Step parameters that have ``.grad``; with none, only what a step changes beside parameters.

        Args:
            members: for each its group's index, the parameter, and its state (empty before its first step).

        Returns:
            The state of each after the step.

        Raises:
            ModelError: the optimizer computes something from all of its parameters together.
        """
        shadow = object.__new__(type(self._optimizer))
        attributes = {name: value for name, value in vars(self._optimizer).items() if name not in _MANAGED}
        vars(shadow).update({name: _own(value) for name, value in attributes.items()})
        vars(shadow).update({name: OrderedDict() for name in HOOKS})
        shadow.state = defaultdict(dict, {param: dict(state) for _, param, state in members if state})
        groups = self._optimizer.param_groups
        shadow.param_groups = [{name: _own(value) for name, value in group.items()} for group in groups]
        for index in {index for index, _, _ in members}:
            shadow.param_groups[index]["params"] = [param for i, param, _ in members if i == index]
        self._step(shadow)
        self._keep("", self._attributes, attributes, vars(shadow))
        for index, (group, after) in enumerate(zip(groups, shadow.param_groups, strict=True)):
            self._keep(f"group {index}, ", self._groups[index], group, after)
        return {param: dict(shadow.state.get(param, {})) for _, param, _ in members}

    def end_step(self) -> None:
        """Apply what the step changed in the optimizer's attributes and parameter groups."""
        _apply(self._attributes, vars(self._optimizer))
        for index, changes in self._groups.items():
            _apply(changes, self._optimizer.param_groups[index])
        self._attributes.clear()
        self._groups.clear()

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
