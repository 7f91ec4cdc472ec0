"""``StoredState``: what a commit on disk holds, as weights and optimizer states by name, without an engine or a model.

Everything that is large is read when it is asked for. The shards of one part stay in memory until another part's are
needed, so that going through parameters in order reads each shard once and holds no more than one part's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from infinity.engine.formats import Master, WeightFormat, Whole
from infinity.engine.persistence.documents import Reader
from infinity.engine.persistence.shard_cache import ShardCache, StoredShelf
from infinity.engine.persistence.snapshot import (
    PartLayout,
    Snapshot,
    StateLayout,
    parts_of,
    snapshot_of,
    torch_dtype,
)
from infinity.engine.persistence.streamed import StreamedState
from infinity.engine.planar import with_planes
from infinity.engine.states import StateFormat, states_as
from infinity.engine.unit import PARAM, Part, Slot, state_kind
from infinity.errors import ManifestError
from infinity.store.stored import StoredCommit

MEMORY_BYTES = 64 << 20
"""Shards of other parts than the one in use stay in memory within this much."""


class Source(NamedTuple):
    """Where a part, or a rank's piece of it, is stored.

    Attributes:
        state: the commit's.
        part: there.
        starts: for each slot that is taken from there, the parameter's element with which it begins there.
    """

    state: StoredState
    part: Part
    starts: Mapping[int, int]


class StoredState:
    """What a commit holds.

    Args:
        commit: an open one, which ``close`` closes.
        memory_bytes: shards of other parts than the one in use stay in memory within this much.
        shards: those in memory, where they are not only this commit's.
        snapshot: what the engine wrote, where it is not the commit's own.

    Raises:
        ManifestError: it is not what an engine writes, or shards are missing.
        ModelError: a document in it cannot be read.
        StorageError: its tensors could not be read.

    Attributes:
        commit: the open commit.
        snapshot: what the engine wrote beside shards.
        parts: the layout, with placeholders for parameters.
        layouts: of each part, by its index.
        places: the part and position of each parameter, by name; one name for those that are tied.
        buffers: values of all buffers that have one, by name.
        param_names: what the optimizer holds, group by group, in its order.
    """

    def __init__(
        self,
        commit: StoredCommit,
        *,
        memory_bytes: int = MEMORY_BYTES,
        shards: ShardCache | None = None,
        snapshot: Snapshot | None = None,
    ) -> None:
        self.commit = commit
        self.snapshot = snapshot_of(commit.manifest, commit.path) if snapshot is None else snapshot
        self.parts = parts_of(self.snapshot)
        self.layouts: Sequence[PartLayout] = self.snapshot.parts
        self.places = {slot.name: (part, position) for part in self.parts for position, slot in enumerate(part.slots)}
        self._shards = shards or ShardCache(memory_bytes)
        self._reader = Reader(commit.tensors())
        self._planes_of = with_planes(self.parts)
        self.buffers = {
            name: self._tensor(each, name) for name, each in self.snapshot.buffers.items() if each is not None
        }
        if missing := set(self.snapshot.persistent_buffers) - set(self.buffers):
            raise self._refused(f"buffer {min(missing)} has no value")
        self.param_names = [self._names_of(index, group) for index, group in enumerate(self.snapshot.optimizer.groups)]
        held = [name for names in self.param_names for name in names]
        if len(set(held)) != len(held):
            raise self._refused("a parameter is in two groups of the optimizer")
        self._check_shards()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of step {self.step}, {len(self.weights)} weights: {self.commit!r}>"

    def __enter__(self) -> StoredState:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Let jobs use the directories again. Closing twice is harmless."""
        for commit in self.commits:
            commit.close()

    @property
    def commits(self) -> Sequence[StoredCommit]:
        """Those of all ranks that hold it."""
        return [self.commit]

    def of_rank(self, rank: int) -> StoredState:
        """What one rank of a run goes on with: the commit whose random states and data positions are its own."""
        return self

    def sources(self, part: Part) -> Sequence[Source]:
        """Where a part is stored, in the order of its elements."""
        return [Source(self, part, dict.fromkeys(range(len(part.slots)), 0))]

    @property
    def step(self) -> int:
        """How many optimizer steps were taken, skipped ones included."""
        return self.snapshot.step

    @property
    def weights(self) -> Mapping[str, Any]:
        """All that ``engine.state_dict()`` has, by name: parameters at full precision, buffers, extra states.

        Each is read when it is asked for, and a copy on the CPU. After ``close`` that is an ``EngineStateError``.
        """
        return _Weights(self, self.full)

    @property
    def compute_weights(self) -> Mapping[str, Any]:
        """The same with parameters in the dtype that computes."""
        return _Weights(self, self.computing)

    @property
    def optimizer_state_dict(self) -> dict[str, Any]:
        """What the optimizer's ``state_dict()`` gives; under ``"state"`` are mappings that read when they are asked.

        So it can be loaded into ``engine.optimizer`` within the memory of a part. For an optimizer of PyTorch's:
        ``to_plain``.
        """
        groups, first = [], 0
        for index, group in enumerate(self.snapshot.optimizer.groups):
            names = self.param_names[index]
            values = {key: self.value(each, f"group {index}") for key, each in group.items() if key != "params"}
            groups.append({**values, "params": list(range(first, first + len(names)))})
            first += len(names)
        return {"state": _States(self), "param_groups": groups}

    def to_plain(self) -> dict[str, Any]:
        """The optimizer's state dict, all of it in memory, for ``load_state_dict`` of PyTorch's own optimizers.

        Raises:
            StorageError: a shard could not be read.
        """
        lazy = self.optimizer_state_dict
        return {**lazy, "state": {index: dict(state) for index, state in lazy["state"].items()}}

    @property
    def tracked(self) -> dict[str, Any]:
        """The state dicts of what the user tracks."""
        return {name: self.value(each, f"tracked {name}") for name, each in self.snapshot.tracked.items()}

    @property
    def random(self) -> dict[str, Any]:
        """The states of random generators."""
        return {name: self.value(each, f"random state {name}") for name, each in self.snapshot.random.items()}

    @property
    def scaling(self) -> dict[str, Any]:
        """The loss scaler's state; empty where there is none."""
        return {name: self.value(each, f"scaling {name}") for name, each in self.snapshot.scaling.items()}

    def value(self, document: Any, where: str) -> Any:
        """The value of one of the commit's documents.

        Raises:
            ModelError: it cannot be read.
        """
        return self._reader.read(document, where)

    def format_of(self, part: Part) -> WeightFormat:
        """How the weights of a part are stored."""
        weights = self.layouts[part.index].weights
        return Whole() if weights == "whole" else Master() if weights == "master" else self._planes_of(part)

    def state_format_of(self, part: Part, layout: StateLayout) -> StateFormat:
        """How one of its optimizer states is."""
        return states_as(layout.stored, self.parts)(part, torch_dtype(layout.dtype))

    def small_state(self, name: str) -> dict[str, Any]:
        """The states of a parameter that are no shards; empty where there are none.

        Raises:
            ModelError: they cannot be read.
            ManifestError: they are no mapping.
        """
        small = self.value(self.snapshot.optimizer.small.get(name, {}), f"optimizer state of parameter {name}")
        if not isinstance(small, dict):
            raise self._refused(f"the optimizer state of parameter {name} is a {type(small).__name__}")
        return small

    def read_state(self, name: str, state: str) -> torch.Tensor:
        """A copy of an optimizer state of a parameter that is a shard.

        Raises:
            StorageError: it could not be read.
        """
        part, position = self.places[name]
        layout = self.layouts[part.index].states[state]
        shard = self._shards.get(self.commit, part.key(state_kind(state)), "states")
        with torch.inference_mode(False):
            return self.state_format_of(part, layout).copy(part, position, shard)

    def full(self, part: Part, slot: Slot) -> torch.Tensor:
        """A copy of a parameter, or of what is here of it, at full precision."""
        return self.format_of(part).read(part, slot, StoredShelf(self._shards, self.commit, part))

    def computing(self, part: Part, slot: Slot) -> torch.Tensor:
        """The same in the dtype that computes."""
        shelf = StoredShelf(self._shards, self.commit, part)
        return shelf.look(PARAM, lambda shard: slot.view(shard.view(part.compute_dtype)).clone())

    def _tensor(self, document: Any, name: str) -> torch.Tensor:
        value = self.value(document, f"buffer {name}")
        if not isinstance(value, torch.Tensor):
            raise self._refused(f"buffer {name} is a {type(value).__name__}")
        return value

    def _names_of(self, index: int, group: Mapping[str, Any]) -> list[str]:
        names = self.value(group.get("params"), f"group {index}")
        known = isinstance(names, list) and all(isinstance(name, str) and name in self.places for name in names)
        if not known:
            raise self._refused(f"group {index} of the optimizer does not name parameters of the commit")
        return list(names)

    def _check_shards(self) -> None:
        """Refuse, before anything is read, a commit whose shards do not have the sizes of its layout."""
        for part, layout in zip(self.parts, self.layouts, strict=True):
            format_ = self.format_of(part)
            sizes = {kind: (size, kind in format_.shards(part)) for kind, size in format_.at_most(part).items()}
            for name, state in layout.states.items():
                sizes[state_kind(name)] = (self.state_format_of(part, state).num_bytes(part), True)
            for kind, (size, is_needed) in sizes.items():
                shard = self.commit.shards.get(part.key(kind))
                got = shard.num_bytes if shard is not None else size if not is_needed else 0
                if got != size:
                    raise self._refused(f"shard {part.key(kind)} should have {size} bytes, and has {got}")

    def _refused(self, message: str) -> ManifestError:
        return ManifestError(f"commit cannot be used: {message}", path=self.commit.path)


class _Weights(Mapping[str, Any]):
    def __init__(self, state: StoredState, read: Callable[[Part, Slot], torch.Tensor]) -> None:
        self._state = state
        self._read = read
        snapshot = state.snapshot
        self._names = dict.fromkeys(
            [*state.places, *snapshot.tied, *snapshot.persistent_buffers, *snapshot.extra_states]
        )

    def __getitem__(self, name: str) -> Any:
        state, snapshot = self._state, self._state.snapshot
        state.commit.check_open()
        if name in snapshot.extra_states:
            return state.value(snapshot.extra_states[name], name)
        if name in state.buffers and name in self._names:
            return state.buffers[name].clone()
        part, position = state.places[snapshot.tied.get(name, name)]
        return self._read(part, part.slots[position])

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _State(StreamedState):
    def __init__(self, state: StoredState, name: str) -> None:
        self._state = state
        self._name = name
        part, self._position = state.places[name]
        self._slot = part.slots[self._position]
        self._shards = {
            each: torch_dtype(layout.dtype)
            for each, layout in state.layouts[part.index].states.items()
            if self._position in layout.slots
        }

    @functools.cached_property
    def _small(self) -> dict[str, Any]:
        return self._state.small_state(self._name)

    @property
    def on_demand(self) -> frozenset[str]:
        return frozenset(self._shards)

    def outline(self) -> dict[str, Any]:
        stand_ins = {
            name: torch.zeros((), dtype=dtype).expand(self._slot.shape) for name, dtype in self._shards.items()
        }
        return {**self._small, **stand_ins}

    def __getitem__(self, name: str) -> Any:
        return self._state.read_state(self._name, name) if name in self._shards else self._small[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._small, **self._shards})

    def __len__(self) -> int:
        return len({**self._small, **self._shards})


class _States(Mapping[int, StreamedState]):
    """The states of all parameters that have some, by number."""

    def __init__(self, state: StoredState) -> None:
        names = [name for names in state.param_names for name in names]
        self._states = {index: each for index, name in enumerate(names) if (each := _State(state, name))}

    def __getitem__(self, index: int) -> StreamedState:
        return self._states[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)
