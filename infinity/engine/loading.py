"""Loading state dicts into a model and an optimizer under the engine, one part at a time.

Everything is checked before anything is changed, so what is refused leaves all as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from infinity.engine.start import Loader
from infinity.engine.substep import SubGroupStepper
from infinity.engine.unit import Part, state_kind
from infinity.engine.values import Values
from infinity.errors import ModelError
from infinity.store.loop import LoopThread
from infinity.store.store import TieredStore

_EXTRA_STATE = "_extra_state"


def load_model(module: nn.Module, state: Mapping[str, Any], values: Values, *, strict: bool) -> None:
    """Give a model the parameters at full precision, the buffers and the extra state of ``state``.

    Args:
        module: the engine's.
        state: by the names of ``module.state_dict()``; each value is asked for once, so it may be one that streams.
        values: changes the parameters.
        strict: refuse a state with other names than the model's.

    Raises:
        ModelError: names are missing or unexpected, or a shape is another; nothing has been changed.
        StorageError: a shard could not be read or written.
    """
    entries = module.state_dict(keep_vars=True)
    complaints = []
    if strict:
        for what, names in (("missing", set(entries) - set(state)), ("unexpected", set(state) - set(entries))):
            if names:
                complaints.append(f"{what}: {', '.join(sorted(names))}")
    chosen = {name: state[name] for name in entries if name in state}
    complaints += [
        f"{name}: expected shape {tuple(entries[name].shape)}, got {tuple(value.shape)}"
        for name, value in chosen.items()
        if isinstance(entries[name], torch.Tensor) and value.shape != entries[name].shape
    ]
    if complaints:
        raise ModelError(f"load_state_dict() of a {type(module).__name__}: {'; '.join(complaints)}")
    values.load({entries[name]: v for name, v in chosen.items() if isinstance(entries[name], nn.Parameter)})
    for name, value in chosen.items():
        owner, _, last = name.rpartition(".")
        if last == _EXTRA_STATE:
            module.get_submodule(owner).set_extra_state(value)
        elif not isinstance(entries[name], nn.Parameter):
            with torch.no_grad():
                entries[name].copy_(value)


class OptimizerLoader:
    """Gives an optimizer under the engine the state of one outside, of the same class.

    Args:
        loop: the loop thread.
        store: the shards.
        parts: all parts.
        stepper: knows the states there are.
        loader: stores new ones.
        optimizer: the user's.
    """

    def __init__(
        self,
        loop: LoopThread,
        store: TieredStore,
        parts: Sequence[Part],
        stepper: SubGroupStepper,
        loader: Loader,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._loop = loop
        self._store = store
        self._parts = [part for part in parts if part.stepped]
        self._stepper = stepper
        self._loader = loader
        self._optimizer = optimizer

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Take over states and hyper-parameters. No step is under way.

        Raises:
            ModelError: it is no optimizer's state, or has other parameter groups; nothing has been changed.
            StorageError: a shard could not be written.
        """
        missing = {"state", "param_groups"} - set(state_dict)
        if missing:
            raise ModelError(
                f"optimizer.load_state_dict(): expected a state dict of an optimizer, got one without {min(missing)!r}"
            )
        groups = self._optimizer.param_groups
        saved = state_dict["param_groups"]
        sizes, expected = ([len(group["params"]) for group in each] for each in (saved, groups))
        if sizes != expected:
            raise ModelError(
                f"optimizer.load_state_dict(): expected parameter groups of {expected} parameters, got {sizes}"
            )
        names = [name for group in saved for name in group["params"]]
        params = [param for group in groups for param in group["params"]]
        states = {param: state_dict["state"].get(name, {}) for param, name in zip(params, names, strict=True)}
        for part in self._parts:
            self._replace(part, states)
        renewed = []
        for group, other in zip(groups, saved, strict=True):
            fresh = {key: copy.deepcopy(value) for key, value in other.items() if key != "params"}
            if "param_names" in group:
                fresh.setdefault("param_names", group["param_names"])
            renewed.append({**fresh, "params": group["params"]})
        self._optimizer.__setstate__({"state": self._optimizer.state, "param_groups": renewed})

    def _replace(self, part: Part, states: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        for name in self._stepper.state_of(part).shards:
            self._loop.run(self._store.delete(part.key(state_kind(name))))
        for slot in part.slots:
            state = {name: _as_of(part, name, value) for name, value in states.get(slot.param, {}).items()}
            if state:
                self._optimizer.state[slot.param] = state
        self._stepper.adopt({part.index: self._loader.load_state(part)})


def _as_of(part: Part, name: str, value: Any) -> Any:
    """A state in the dtype in which ``torch.optim.Optimizer.load_state_dict`` would leave it."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    dtype = torch.float32 if name == "step" else part.step_dtype if part.step_dtype.is_floating_point else value.dtype
    return value.detach().to("cpu", dtype, copy=True)
