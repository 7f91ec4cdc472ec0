"""``Capture``: what an engine knows beside the bytes of shards, taken for a commit and given back from one.

It is taken in three moments, because a run that goes on must not wait for its commit:

* ``at_step``: when a step returns, on the training thread: random generators, buffers, and positions in data.
* ``at_next_use``: before the next training forward, on the training thread: hyper-parameters, schedulers.
* ``of_states``: once all sub-groups are stepped, on the loop: which shards there are, and small optimizer states.
"""

from __future__ import annotations

import copy
import platform
import random
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np
import torch
from torch import nn

from infinity.config import Config
from infinity.engine.budget import Plan
from infinity.engine.persistence.documents import Reader, Writer
from infinity.engine.persistence.module_state import (
    buffers_of,
    check_buffers,
    extra_state_names,
    extra_states,
    persistent_buffers_of,
    restore_buffers,
    restore_extra_states,
)
from infinity.engine.persistence.snapshot import (
    PartLayout,
    Snapshot,
    Stage,
    dtype_name,
    layout_of,
    same_layout,
    torch_dtype,
)
from infinity.engine.persistence.tracked import Tracked
from infinity.engine.randomness import Generators
from infinity.engine.scaling import Scaling
from infinity.engine.substep import PartState, SubGroupStepper
from infinity.engine.unit import MASTER, PARAM, Unit, state_kind
from infinity.errors import ModelError
from infinity.store.shard import ShardKey
from infinity.store.store import TieredStore


@dataclass(frozen=True, slots=True)
class Taken:
    """What a commit has beside shards, as values.

    Attributes:
        groups: of the optimizer, without their parameters.
        buffers: by name; ``None``: without a value.
        extra_states: by name.
        scaling: the loss scaler's state.
        tracked: the states of what is tracked, by name.
        random: the states of generators.
        small: states of the optimizer that are no shards, by parameter.
    """

    groups: list[dict[str, Any]]
    buffers: dict[str, torch.Tensor | None]
    extra_states: dict[str, Any]
    scaling: dict[str, Any]
    tracked: dict[str, Any]
    random: dict[str, Any]
    small: dict[str, dict[str, Any]]


class Capture:
    """Takes and gives back.

    Args:
        module: the user's model.
        optimizer: the user's.
        units: all units.
        plan: how shards are stored.
        store: the shards.
        stepper: knows the optimizer's states.
        scaling: the loss scale.
        generators: the random generators of torch.
        config: the engine's.
        stage: what is divided among ranks; ``None``: there is one.

    Attributes:
        tracked: the objects of the user's that go along.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        units: Sequence[Unit],
        plan: Plan,
        store: TieredStore,
        stepper: SubGroupStepper,
        scaling: Scaling,
        generators: Generators,
        config: Config,
        *,
        stage: Stage | None = None,
    ) -> None:
        self._module = module
        self._user = weakref.ref(optimizer)  # whose step() leads to the engine, which is forgotten with it
        self._units = units
        self._parts = plan.parts
        self._plan = plan
        self._store = store
        self._stepper = stepper
        self._scaling = scaling
        self._generators = generators
        self._config = config
        self._stage = stage
        self._names = {slot.param: slot.name for part in plan.parts for slot in part.slots}
        self.tied = self._find_tied()  # now, since modules hold other parameters while a state dict is made
        self._groups: list[dict[str, Any]] | None = None  # those of a commit, until the first step after it
        self.tracked = Tracked()

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._user()
        assert optimizer is not None
        return optimizer

    def at_step(self, writer: Writer) -> dict[str, Any]:
        """Random generators, buffers, and positions in data.

        Raises:
            ModelError: a tracked object has something in its state that cannot be kept.
        """
        state = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=True),
            "torch": self._generators.states(),
        }
        self._groups = None
        return {
            "random": {name: writer.write(each, f"random state {name}") for name, each in state.items()},
            "buffers": {name: writer.write(each, f"buffer {name}") for name, each in buffers_of(self._module).items()},
            "extra_states": {name: writer.write(each, name) for name, each in extra_states(self._module).items()},
            "persistent_buffers": list(self.persistent_buffers()),
            "tracked": self.tracked.documents(writer, data=True),
        }

    def at_next_use(self, writer: Writer) -> dict[str, Any]:
        """Hyper-parameters, the loss scale, and whatever else is tracked.

        Raises:
            ModelError: one has something that cannot be kept.
        """
        return {
            "groups": [self._group(writer, index) for index in range(len(self._optimizer.param_groups))],
            "scaling": writer.write(self._scaling.state(), "the loss scale"),
            "tracked": self.tracked.documents(writer, data=False),
        }

    def of_states(self, writer: Writer) -> dict[str, Any]:
        """Which shards there are, and the optimizer's states that are none.

        Raises:
            ModelError: the optimizer has a state that cannot be kept.
        """
        small = {}
        for part in self._parts:
            for position, states in self._stepper.state_of(part).small.items():
                name = part.slots[position].name
                small[name] = writer.write(states, f"the optimizer's state of {name}")
        return {"parts": list(self.layouts().values()), "small": small}

    def layouts(self) -> dict[int, PartLayout]:
        """What shards look like now, by index of their part."""
        states_as = self._config.optimizer_states
        return {
            part.index: layout_of(
                part, self._stepper.state_of(part), self._plan.format_of, self._plan.state_format_of, states_as
            )
            for part in self._parts
        }

    def dtypes(self) -> dict[ShardKey, str]:
        """The shards that make a state, with the dtypes of their elements."""
        found = {}
        for part in self._parts:
            kinds = dict.fromkeys(self._plan.format_of(part).at_most(part), "int16")
            kinds |= {PARAM: dtype_name(part.compute_dtype)}
            kinds |= {MASTER: dtype_name(part.step_dtype)} if MASTER in kinds else {}
            for name, (dtype, _) in self._stepper.state_of(part).shards.items():
                is_exact = self._plan.state_format_of(part, dtype).is_exact
                kinds[state_kind(name)] = dtype_name(dtype) if is_exact else "uint8"
            found.update({part.key(kind): dtype for kind, dtype in kinds.items() if part.key(kind) in self._store})
        return found

    def snapshot(self, step: int, *moments: Mapping[str, Any]) -> Snapshot:
        """All together.

        Args:
            step: how many steps were taken.
            moments: what ``at_step``, ``at_next_use`` and ``of_states`` returned.
        """
        taken: dict[str, Any] = {}
        for moment in moments:
            tracked = {**taken.get("tracked", {}), **moment.get("tracked", {})}
            taken |= {**moment, "tracked": tracked}
        return Snapshot.model_validate(
            {
                "step": step,
                "stage": self._stage,
                "units": [unit.name for unit in self._units],
                "parts": taken["parts"],
                "tied": self.tied,
                "buffers": taken["buffers"],
                "persistent_buffers": taken["persistent_buffers"],
                "extra_states": taken["extra_states"],
                "optimizer": {
                    "class_name": type(self._optimizer).__name__,
                    "groups": taken["groups"],
                    "small": taken["small"],
                },
                "random": taken["random"],
                "scaling": taken["scaling"],
                "tracked": taken["tracked"],
                "config": self._config.model_dump(mode="json"),
                "versions": _versions(),
            }
        )

    def check(self, snapshot: Snapshot, taken: Taken) -> None:
        """Refuse the snapshot of another model or optimizer; ``taken`` is what ``read`` returned.

        Raises:
            ModelError: it says what differs first.
        """
        ours = {slot.name: list(slot.original.shape) for part in self._parts for slot in part.slots}
        theirs = {slot.name: slot.shape for part in snapshot.parts for slot in part.slots}
        for name in [*ours, *theirs]:
            if ours.get(name) != theirs.get(name):
                raise ModelError(
                    f"the commit is of another model: parameter {name} has shape {theirs.get(name, 'none')} there, and "
                    f"{ours.get(name, 'none')} here; build the model as it was, or give another NVMe directory"
                )
        for name in set(extra_state_names(self._module)) ^ set(snapshot.extra_states):
            where = "the commit" if name in snapshot.extra_states else "this run"
            raise ModelError(f"the commit is of another model: only {where} has {name}; build the model as it was")
        kind = type(self._optimizer).__name__
        if snapshot.optimizer.class_name != kind:
            raise ModelError(
                f"the commit is of optimizer {snapshot.optimizer.class_name}, and this run has {kind}; build the "
                "optimizer as it was, or begin another run from exported weights"
            )
        groups = [[self._names[param] for param in group["params"]] for group in self._optimizer.param_groups]
        if [group["params"] for group in snapshot.optimizer.groups] != groups:
            raise ModelError(
                f"the commit has optimizer groups of {[len(g['params']) for g in snapshot.optimizer.groups]} "
                f"parameters, and this run of {[len(names) for names in groups]}, or of others; build the optimizer "
                "with the groups that it had"
            )
        check_buffers(self._module, taken.buffers, snapshot.persistent_buffers)

    def has_layout_of(self, snapshot: Snapshot) -> bool:
        """Whether shards of a commit are cut and stored like this engine's, so that they can serve as they are."""
        states_as = self._config.optimizer_states
        alike = all(
            each.stored == ("full" if self._plan.state_format_of(part, torch_dtype(each.dtype)).is_exact else states_as)
            for part, layout in zip(self._parts, snapshot.parts, strict=False)
            for each in layout.states.values()
        )
        return alike and same_layout(snapshot, self._units, self.layouts())

    def read(self, snapshot: Snapshot, reader: Reader) -> Taken:
        """What a snapshot has, as values.

        Raises:
            ModelError: it cannot be read.
        """

        def read(documents: Mapping[str, Any], what: str) -> dict[str, Any]:
            return {name: reader.read(each, f"{what} {name}") for name, each in documents.items()}

        return Taken(
            [read({n: d for n, d in group.items() if n != "params"}, "group") for group in snapshot.optimizer.groups],
            read(snapshot.buffers, "buffer"),
            read(snapshot.extra_states, "extra state"),
            read(snapshot.scaling, "loss scale"),
            read(snapshot.tracked, "tracked"),
            read(snapshot.random, "random state"),
            read(snapshot.optimizer.small, "the optimizer's state of"),
        )

    def restore_states(self, snapshot: Snapshot, taken: Taken) -> None:
        """Give the stepper what it knew, for shards that are the commit's own."""
        states = {}
        for part, layout in zip(self._parts, snapshot.parts, strict=True):
            state = PartState()
            for name, each in layout.states.items():
                state.shards[name] = (torch_dtype(each.dtype), set(each.slots))
            for position, slot in enumerate(part.slots):
                if slot.name in taken.small:
                    state.small[position] = taken.small[slot.name]
            states[part.index] = state
        self._stepper.adopt(states)

    def restore(self, taken: Taken) -> None:
        """Give back all but what the stepper knows and the random generators; ``check`` has been called."""
        self._groups = taken.groups
        self.restore_groups()
        self.restore_buffers(taken)
        restore_extra_states(self._module, taken.extra_states)
        self._scaling.load_state(taken.scaling)
        self.tracked.load(taken.tracked)

    def restore_buffers(self, taken: Taken) -> None:
        """Give back buffers, which come and go with their values."""
        restore_buffers(self._module, taken.buffers, self._units[0].device)

    def restore_groups(self) -> None:
        """Give hyper-parameters back again, if no step was taken since: a scheduler sets them when it is made."""
        for group, values in zip(self._optimizer.param_groups, self._groups or (), strict=False):
            group.update(copy.deepcopy(values))

    def restore_random(self, taken: Taken) -> None:
        """Set the random generators."""
        random.setstate(taken.random["python"])
        np.random.set_state(taken.random["numpy"])
        self._generators.restore(taken.random["torch"])

    def persistent_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that a state dict has, by name."""
        return persistent_buffers_of(self._module)

    def _group(self, writer: Writer, index: int) -> dict[str, Any]:
        group = self._optimizer.param_groups[index]
        for name in group:
            if type(name) is not str or not name.isprintable():
                raise ModelError(f"optimizer group {index} has {name!r}, which is no name of a hyper-parameter")
        values = {
            name: writer.write(value, f"hyper-parameter {name!r} of optimizer group {index}")
            for name, value in group.items()
            if name != "params"
        }
        return {**values, "params": [self._names[param] for param in group["params"]]}

    def _find_tied(self) -> dict[str, str]:
        every = self._module.named_parameters(remove_duplicate=False)
        return {name: self._names[param] for name, param in every if self._names[param] != name}


def _versions() -> dict[str, str]:
    try:
        own = metadata.version("infinity")
    except metadata.PackageNotFoundError:
        own = "unknown"
    return {
        "infinity": own,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
