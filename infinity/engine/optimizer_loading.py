"""``OptimizerLoader``: state dicts into an optimizer whose state is in the tiers, as ``load_state_dict`` does it.

First a trial: an object of the user's class gets groups and states, so that the class itself brings those of older
versions up to date, and everything is checked on it. Only then is anything changed, one part at a time.

States that are read on demand (``streamed.py``) are tried as outlines, and read when their part is changed, so that
memory holds those of one part. A class with a ``__setstate__`` of its own may look at values: it gets them all.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from infinity.engine.incoming import check_tensor
from infinity.engine.persistence.streamed import StreamedState
from infinity.engine.shadow import GUESSED, PATCHED, is_shard, probe
from infinity.engine.start import Loader
from infinity.engine.substep import SubGroupStepper
from infinity.engine.unit import Part, Slot, state_kind
from infinity.errors import ModelError
from infinity.store.loop import LoopThread
from infinity.store.store import TieredStore

_WHERE = "optimizer.load_state_dict()"


class OptimizerLoader:
    """Gives an optimizer under the engine the state of one outside, of the same class.

    Args:
        loop: the loop thread.
        store: the shards.
        parts: all parts.
        stepper: knows the states there are.
        loader: stores new ones.
        optimizer: the user's.
        fail: told what a change has failed with half-way, when the state is whole no more.
    """

    def __init__(
        self,
        loop: LoopThread,
        store: TieredStore,
        parts: Sequence[Part],
        stepper: SubGroupStepper,
        loader: Loader,
        optimizer: torch.optim.Optimizer,
        *,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._loop = loop
        self._store = store
        self._parts = [part for part in parts if part.stepped]
        self._stepper = stepper
        self._loader = loader
        self._optimizer = optimizer
        self._fail = fail

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Take over states and hyper-parameters. No step is under way.

        Raises:
            ModelError: it is no optimizer's state, or that of another class or with other settings, parameter groups,
                shapes; nothing has been changed.
            StorageError: a shard could not be written; the engine cannot go on.
        """
        with torch.inference_mode(False):
            states, groups = _sections(state_dict)
            if not type(self._optimizer).__setstate__.__module__.startswith("torch.optim"):
                states = {name: dict(state) for name, state in states.items()}
            trial, on_demand = self._try(states, groups)
            self._check_groups(trial)
            self._check_states(trial)
            group_of = {param: group for group in trial.param_groups for param in group["params"]}
            try:
                for part in self._parts:
                    self._replace(part, trial.state, group_of, on_demand)
            except BaseException as error:
                self._fail(error)
                raise
            self._optimizer.__setstate__({"state": self._optimizer.state, "param_groups": trial.param_groups})

    def _try(
        self, states: Mapping[Any, Any], saved: Sequence[Mapping[str, Any]]
    ) -> tuple[torch.optim.Optimizer, Mapping[torch.Tensor, StreamedState]]:
        """An object of the user's class with these states and groups, and what is still to be read of them.

        Tensors are still the caller's, or outlines.
        """
        groups = self._optimizer.param_groups
        sizes, expected = ([len(group["params"]) for group in each] for each in (saved, groups))
        if sizes != expected:
            raise ModelError(f"{_WHERE}: expected parameter groups of {expected} parameters, got {sizes}")
        names = [name for group in saved for name in group["params"]]
        params = [param for group in groups for param in group["params"]]
        given = {param: states[name] for param, name in zip(params, names, strict=True) if states.get(name)}
        found = {param: _outline_of(state) for param, state in given.items()}
        renewed = []
        for group, other in zip(groups, saved, strict=True):
            fresh = {key: copy.deepcopy(value) for key, value in other.items() if key != "params"}
            if "param_names" in group:
                fresh.setdefault("param_names", group["param_names"])
            renewed.append({**fresh, "params": group["params"]})
        kind = type(self._optimizer)
        trial = object.__new__(kind)
        vars(trial).update({name: value for name, value in vars(self._optimizer).items() if name not in PATCHED})
        trial.defaults = dict(self._optimizer.defaults)
        try:
            trial.__setstate__({"state": defaultdict(dict, found), "param_groups": renewed})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(
                f"{_WHERE}: {kind.__name__} cannot take this state: {type(error).__name__}: {error}; give it the state "
                "of an optimizer of the same class"
            ) from error
        return trial, {param: state for param, state in given.items() if isinstance(state, StreamedState)}

    def _check_groups(self, trial: torch.optim.Optimizer) -> None:
        for index, group in enumerate(trial.param_groups):
            missing = sorted(set(self._optimizer.defaults) - set(group))
            if missing:
                raise ModelError(
                    f"{_WHERE}: group {index} has no {missing[0]!r}, which {type(trial).__name__} needs; it has "
                    f"{', '.join(sorted(map(str, set(group) - {'params'})))}: the state of another class?"
                )

    def _check_states(self, trial: torch.optim.Optimizer) -> None:
        expected = probe(trial).states
        for part in self._parts:
            shards: dict[str, Slot] = {}
            for position, slot in enumerate(part.slots):
                needed, state = expected.get(slot.param, ()), trial.state.get(slot.param, {})
                self._check_state(part, position, state, needed)
                shards.update(dict.fromkeys(needed, slot))
                shards.update({name: slot for name, value in state.items() if is_shard(value, slot.original)})
            more = [name for name in shards if name not in part.state_names]
            if more and len(shards) > len(part.state_names):
                planned = ", ".join(part.state_names) or "none"
                raise ModelError(
                    f"{_WHERE}: no room was planned for state {more[0]!r} of parameter {shards[more[0]].name}: the "
                    f"optimizer given to infinity.initialize() has {planned}. Build it with the settings of the one "
                    "whose state this is (momentum, amsgrad, …)"
                )

    def _check_state(self, part: Part, position: int, state: Mapping[str, Any], needed: Sequence[str]) -> None:
        slot, live = part.slots[position], self._stepper.state_of(part).small.get(position, {})
        if not state:
            return
        missing = [name for name in needed if name not in state and not set(GUESSED) <= set(needed)]
        if missing:
            raise ModelError(
                f"{_WHERE}: the state of parameter {slot.name} has no {missing[0]!r}; it has: "
                f"{', '.join(map(str, state))}. Give it the state of an optimizer of the same class and settings"
            )
        for name, value in state.items():
            if isinstance(value, torch.Tensor) or (name in needed and value is not None):
                known = live.get(name)
                shape = (
                    slot.original.shape if name in needed else known.shape if isinstance(known, torch.Tensor) else None
                )
                check_tensor(f"{_WHERE}: state {name!r} of parameter {slot.name}", value, shape)

    def _replace(
        self,
        part: Part,
        states: Mapping[torch.Tensor, Mapping[str, Any]],
        group_of: Mapping[Any, Mapping[str, Any]],
        on_demand: Mapping[torch.Tensor, StreamedState],
    ) -> None:
        for name in self._stepper.state_of(part).shards:
            self._loop.run(self._store.delete(part.key(state_kind(name))))
        for slot in part.slots:
            group = group_of.get(slot.param, {})
            source = on_demand.get(slot.param)
            state = {
                name: _as_of(part, group, name, source[name] if source and name in source.on_demand else value)
                for name, value in states.get(slot.param, {}).items()
            }
            if state:
                self._optimizer.state[slot.param] = state
        self._stepper.adopt({part.index: self._loader.load_state(part)})


def _outline_of(state: Mapping[str, Any]) -> dict[str, Any]:
    return state.outline() if isinstance(state, StreamedState) else dict(state)


def _sections(state_dict: object) -> tuple[Mapping[Any, Any], Sequence[Mapping[str, Any]]]:
    """The states by number, and the groups."""
    if not isinstance(state_dict, Mapping):
        raise ModelError(f"{_WHERE}: expected a state dict of an optimizer, got {type(state_dict).__name__}")
    missing = {"state", "param_groups"} - set(state_dict)
    if missing:
        raise ModelError(f"{_WHERE}: expected a state dict of an optimizer, got one without {min(missing)!r}")
    states, groups = state_dict["state"], state_dict["param_groups"]
    are_groups = isinstance(groups, Sequence) and all(isinstance(g, Mapping) and "params" in g for g in groups)
    if not are_groups or not isinstance(states, Mapping) or not all(isinstance(s, Mapping) for s in states.values()):
        raise ModelError(
            f"{_WHERE}: expected 'state' to be a mapping of mappings and 'param_groups' a list of mappings with "
            "'params'; give what optimizer.state_dict() returns"
        )
    return states, groups


def _as_of(part: Part, group: Mapping[str, Any], name: str, value: Any) -> Any:
    """A copy of a state in the dtype in which ``torch.optim.Optimizer.load_state_dict`` would leave it."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    dtype = value.dtype
    if name == "step":
        dtype = torch.float32 if group.get("capturable") or group.get("fused") else dtype
    elif part.step_dtype.is_floating_point:
        dtype = part.step_dtype
    return value.detach().to("cpu", dtype, copy=True)
