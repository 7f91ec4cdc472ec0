"""``OffloadedOptimizer``: the optimizer that users see, while its state is in the tiers and its steps run elsewhere."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from infinity.engine.shadow import HOOKS, PATCHED
from infinity.errors import ModelError


class OffloadedOptimizer(torch.optim.Optimizer):
    """What ``engine.optimizer`` is: the user's optimizer with its state in the tiers.

    It shares the user's ``param_groups``, so learning-rate schedulers on either work. The user's own object steps
    through this one too, until ``release_user``. ``step`` consumes the gradients; ``zero_grad`` discards them.

    Args:
        user: the user's optimizer.
        begin: makes ready for a step; whether there is to be one, or it is skipped for good.
        step: steps what has gradients.
        discard: forgets the gradients.
        read_state: a copy of the state of one parameter.
        load_state: replaces all state and hyper-parameters of the user's optimizer.
    """

    def __init__(
        self,
        user: torch.optim.Optimizer,
        begin: Callable[[], bool],
        step: Callable[[], None],
        discard: Callable[[], None],
        read_state: Callable[[nn.Parameter], dict[str, Any]],
        load_state: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._load_state = load_state
        self._user = user
        self._begin_step = begin
        self._run_step = step
        self._run_discard = discard
        self._read_state = read_state
        super().__init__([dict(group) for group in user.param_groups], dict(user.defaults))
        self.param_groups = user.param_groups
        for name in HOOKS:
            setattr(self, name, getattr(user, name))
        self._complete = True
        self._replaced = {name: vars(user)[name] for name in PATCHED if name in vars(user)}
        offloaded = self

        def user_step(optimizer: torch.optim.Optimizer, closure: Callable[[], float] | None = None) -> None:
            offloaded.step(closure)

        user_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler may have wrapped the old one
        user.step = types.MethodType(user_step, user)  # type: ignore[method-assign]
        for name in PATCHED[1:]:
            setattr(user, name, getattr(self, name))

    def release_user(self) -> None:
        """Give the user's optimizer its own methods back."""
        for name in PATCHED:
            vars(self._user).pop(name, None)
        vars(self._user).update(self._replaced)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient, then forget the gradients. A step that is skipped runs no hooks.

        Raises:
            ModelError: a closure was given: it would evaluate the model several times per step.
            StorageError: a shard could not be read or written.
        """
        if closure is not None:
            raise ModelError(
                "optimizer.step(closure) is not supported: call loss.backward() before step(), without a closure"
            )
        self._user._opt_called = True  # type: ignore[attr-defined]  # what LR schedulers look for
        if self._begin_step():
            self._step_with_hooks()

    step.hooked = True  # type: ignore[attr-defined]  # else PyTorch would run hooks around it

    def _run(self) -> None:
        self._run_step()

    _step_with_hooks = torch.optim.Optimizer.profile_hook_step(_run)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients that have not been stepped.

        Raises:
            ModelError: ``set_to_none`` is false: gradients that are away cannot be zeros, which the next step would
                step with momentum and weight decay.
        """
        if not set_to_none:
            raise ModelError(
                "optimizer.zero_grad(set_to_none=False) is not supported: gradients are discarded, not kept as zeros; "
                "call zero_grad()"
            )
        self._run_discard()
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The state as from the user's own optimizer, read from the tiers: it holds everything, on the CPU.

        Raises:
            StorageError: a shard could not be read.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        states = {param: state for param in params if (state := self._read_state(param))}
        try:
            self.state.update(states)
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of an optimizer of the same class, under an engine or not; sub-group by sub-group.

        Raises:
            ModelError: the parameter groups are others; nothing has been changed.
            StorageError: a shard could not be written.
        """
        for before in self._user._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self.adopt(state_dict)
        for after in self._user._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def adopt(self, state_dict: Mapping[str, Any]) -> None:
        """``load_state_dict`` without hooks; states may be read on demand (``streamed.py``)."""
        self._load_state(state_dict)
        self.param_groups = self._user.param_groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once made: parameters are laid out at start.

        Raises:
            ModelError: always.
        """
        if not hasattr(self, "_complete"):
            super().add_param_group(param_group)
            return
        raise ModelError(
            "optimizer.add_param_group() under the engine: add every parameter group before infinity.initialize(); "
            "parameters that are frozen at first may be in one"
        )
