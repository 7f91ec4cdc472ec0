"""``JoinedState``: a commit that several ranks have made, read as one: each parameter's pieces put together.

What ranks have divided is told by their layouts alone (``snapshot.SlotLayout``): a piece is consecutive elements of a
parameter as they lie in memory. So any number of ranks and any stage is read by any other, and what is whole on every
rank is read from the first. One parameter is put together at a time, and in memory beside it is what one rank has of a
part: parameters of a part that are read in their order read each shard once.

What is not divided (buffers, hyper-parameters, what is tracked, random states) is the first rank's, unless ``of_rank``
is asked for another's. Of states that are no shards (step counters) that of any rank is taken that has elements of the
parameter: they are the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infinity.engine.persistence.shard_cache import ShardCache
from infinity.engine.persistence.snapshot import (
    PartLayout,
    SlotLayout,
    Snapshot,
    StateLayout,
    StatesAs,
    snapshot_of,
)
from infinity.engine.persistence.stored_state import MEMORY_BYTES, Source, StoredState
from infinity.engine.unit import CutSlot, Part, Slot
from infinity.errors import ManifestError
from infinity.store.all_ranks import open_commits
from infinity.store.stored import StoredCommit


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where a rank has elements of a parameter.

    Attributes:
        state: the rank's.
        part: there.
        position: of its slot.
        start: the parameter's element with which they begin.
    """

    state: StoredState
    part: Part
    position: int
    start: int

    @property
    def slot(self) -> Slot:
        """What is there."""
        return self.part.slots[self.position]

    def has_shard(self, state: str) -> bool:
        """Whether one of the optimizer's states is a shard there."""
        layout = self.state.layouts[self.part.index].states.get(state)
        return layout is not None and self.position in layout.slots


class JoinedState(StoredState):
    """What several ranks hold together.

    Args:
        commits: open ones of one state and number, in the order of ranks, which ``close`` closes.
        memory_bytes: shards that are not in use stay in memory within this much.

    Raises:
        ManifestError: one is not what an engine writes; or they do not fit together, or ranks are missing.
        ModelError: a document in one cannot be read.
        StorageError: the tensors of one could not be read.

    Attributes:
        ranks: of each, what it holds.
    """

    def __init__(self, commits: Sequence[StoredCommit], *, memory_bytes: int = MEMORY_BYTES) -> None:
        shards = ShardCache(memory_bytes)
        self.ranks = [StoredState(commit, shards=shards) for commit in commits]
        self._commits = list(commits)
        self._found = _places(self.ranks)
        super().__init__(commits[0], shards=shards, snapshot=_join(self.ranks, self._found))

    @property
    def commits(self) -> Sequence[StoredCommit]:
        """See ``StoredState``."""
        return self._commits

    def of_rank(self, rank: int) -> StoredState:
        """See ``StoredState``."""
        return self.ranks[rank % len(self.ranks)]

    def sources(self, part: Part) -> Sequence[Source]:
        """See ``StoredState``."""
        starts: dict[int, dict[int, int]] = {}
        parts: dict[int, tuple[StoredState, Part]] = {}
        order = {id(state): index for index, state in enumerate(self.ranks)}
        for slot in part.slots:
            for place in self._found[slot.name]:
                index = order[id(place.state)]
                starts.setdefault(index, {})[place.position] = place.start
                parts[index] = place.state, place.part
        return [Source(*parts[index], starts[index]) for index in sorted(parts)]

    def full(self, part: Part, slot: Slot) -> torch.Tensor:
        """See ``StoredState``."""
        return self._put_together(slot, part.step_dtype, lambda place: place.state.full(place.part, place.slot))

    def computing(self, part: Part, slot: Slot) -> torch.Tensor:
        """See ``StoredState``."""
        return self._put_together(slot, part.compute_dtype, lambda place: place.state.computing(place.part, place.slot))

    def read_state(self, name: str, state: str) -> torch.Tensor:
        """See ``StoredState``."""
        part, position = self.places[name]
        dtype = getattr(torch, self.layouts[part.index].states[state].dtype)

        def read(place: _Place) -> torch.Tensor:
            if place.has_shard(state):
                return place.state.read_state(name, state)
            return _piece_of(place, place.state.small_state(name).get(state), state)

        return self._put_together(part.slots[position], dtype, read)

    def small_state(self, name: str) -> dict[str, Any]:
        """See ``StoredState``: of a state that is divided but no shard on any rank, all of it."""
        places = self._found[name]
        part, position = self.places[name]
        large = {each for each, layout in self.layouts[part.index].states.items() if position in layout.slots}
        found = [place.state.small_state(name) for place in places] or [{}]
        small = {each: value for each, value in found[0].items() if each not in large}
        for each, value in small.items():
            if all(_is_piece(place, other.get(each)) for place, other in zip(places, found, strict=True)):
                pieces = {place: other[each] for place, other in zip(places, found, strict=True)}
                small[each] = self._put_together(part.slots[position], value.dtype, pieces.__getitem__)
        return small

    def _put_together(self, slot: Slot, dtype: torch.dtype, read: Callable[[_Place], torch.Tensor]) -> torch.Tensor:
        """A parameter's value, or a state's, of its own shape and stride."""
        places = self._found[slot.name]
        if len(places) == 1 and not isinstance(places[0].slot, CutSlot):
            return read(places[0])
        flat = torch.empty(slot.num_elements, dtype=dtype)
        for place in places:
            flat[place.start : place.start + place.slot.num_elements] = read(place)
        return flat.as_strided(slot.shape, slot.stride)

    def _check_shards(self) -> None:
        """Each rank's have been checked."""


def _places(ranks: Sequence[StoredState]) -> dict[str, list[_Place]]:
    """Of each parameter, by name, where its elements are: each element once, in order.

    Raises:
        ManifestError: some are nowhere.
    """
    found: dict[str, list[_Place]] = {}
    ends: dict[str, int] = {}
    for state in ranks:
        for part in state.parts:
            for position, slot in enumerate(part.slots):
                places, end = found.setdefault(slot.name, []), ends.setdefault(slot.name, 0)
                start = slot.skipped if isinstance(slot, CutSlot) else 0
                if slot.num_elements and start == end:
                    places.append(_Place(state, part, position, start))
                    ends[slot.name] += slot.num_elements
    for state in ranks:
        for name, (part, position) in state.places.items():
            slot = part.slots[position]
            num_elements = slot.whole.num_elements if isinstance(slot, CutSlot) else slot.num_elements
            if ends[name] != num_elements:
                raise _refused(
                    state, f"of parameter {name} only {ends[name]} of {num_elements} elements are {_where(ranks)}"
                )
            if not num_elements and not found[name]:
                found[name].append(_Place(state, part, position, 0))
    return found


def _where(ranks: Sequence[StoredState]) -> str:
    manifests = [state.commit.manifest for state in ranks]
    listed = ", ".join(str(manifest.rank) for manifest in manifests)
    return (
        f"in what is given, of rank {listed} of {manifests[0].world_size}: give the directories of all ranks, or the "
        "one that holds them"
    )


def _join(ranks: Sequence[StoredState], found: Mapping[str, Sequence[_Place]]) -> Snapshot:
    """What the ranks wrote, as if one had written it that has all elements.

    Raises:
        ManifestError: they do not fit together.
    """
    first = ranks[0]
    for state in ranks[1:]:
        if _outline(state) != _outline(first):
            raise _refused(state, f"it does not fit to {first.commit.path}: another step, model or optimizer")
    parts = [_joined_part(part, layout, found) for part, layout in zip(first.parts, first.layouts, strict=True)]
    return first.snapshot.model_copy(update={"parts": parts})


def _outline(state: StoredState) -> Any:
    """What must be the same on all ranks."""
    snapshot = state.snapshot
    parts = [
        (
            *(part.unit, part.position, part.dtype, part.compute_dtype, part.step_dtype, part.stepped, part.weights),
            [(slot.name, slot.shape, slot.stride) for slot in part.slots],
        )
        for part in snapshot.parts
    ]
    groups = [group.get("params") for group in snapshot.optimizer.groups]
    return snapshot.step, snapshot.stage, snapshot.units, snapshot.tied, snapshot.optimizer.class_name, groups, parts


def _joined_part(part: Part, layout: PartLayout, found: Mapping[str, Sequence[_Place]]) -> PartLayout:
    """The layout of a whole part."""
    slots = [
        Slot(slot.name, slot.param, torch.Size(each.shape), tuple(each.stride), 0)
        for slot, each in zip(part.slots, layout.slots, strict=True)
    ]
    whole = Part(
        part.index, part.unit, part.position, part.dtype, part.compute_dtype, part.step_dtype, part.sum_dtype,
        part.stepped, slots,
    )  # fmt: skip
    whole.lay_out()
    return layout.model_copy(
        update={
            "num_elements": whole.num_elements,
            "slots": [
                SlotLayout(name=slot.name, shape=list(slot.shape), stride=list(slot.stride), offset=slot.offset)
                for slot in slots
            ],
            "states": _joined_states(part, found),
        }
    )


def _joined_states(part: Part, found: Mapping[str, Sequence[_Place]]) -> dict[str, StateLayout]:
    """The optimizer's states of a part that are shards on some rank.

    Raises:
        ManifestError: they do not fit together.
    """
    joined: dict[str, StateLayout] = {}
    for position, slot in enumerate(part.slots):
        for place in found[slot.name]:
            for name, each in place.state.layouts[place.part.index].states.items():
                if place.position not in each.slots:
                    continue
                known = joined.setdefault(name, StateLayout(dtype=each.dtype, stored=each.stored, slots=[]))
                if known.dtype != each.dtype:
                    raise _refused(place.state, f"state {name} is {each.dtype}, and {known.dtype} on another rank")
                stored: StatesAs = each.stored if known.stored == "full" else known.stored
                slots = known.slots if position in known.slots else [*known.slots, position]
                joined[name] = known.model_copy(update={"stored": stored, "slots": slots})
    return dict(sorted(joined.items()))


def _is_piece(place: _Place, value: object) -> bool:
    """Whether a state is that of a rank's elements, one for each."""
    slot = place.slot
    return isinstance(slot, CutSlot) and isinstance(value, torch.Tensor) and value.shape == slot.shape


def _piece_of(place: _Place, value: object, state: str) -> torch.Tensor:
    """A state that is a shard on another rank, and none here, where a rank has a single element.

    Raises:
        ManifestError: there is none.
    """
    if not isinstance(value, torch.Tensor) or value.shape != place.slot.shape:
        raise _refused(place.state, f"it has no state {state} of parameter {place.slot.name}, which other ranks have")
    return value


def _refused(state: StoredState, message: str) -> ManifestError:
    return ManifestError(f"commit cannot be used: {message}", path=state.commit.path)


def open_checkpoint(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], number: int | None = None
) -> StoredState:
    """Read a checkpoint, or a commit of a run that has ended, without an engine; a context manager that closes itself.

    Args:
        paths: a directory of ``engine.save_checkpoint``, or a run's NVMe directories: those of all its ranks.
        number: which commit; ``None`` for the newest that all ranks have.

    Raises:
        ConfigError: these are no paths.
        DirectoryError: there is no such directory, or a live job owns it (``DirectoryInUseError``).
        ManifestError: the commit is damaged, or directories of ranks are missing.
        NoCommitError: there is none.
        StorageError: it could not be read.
    """
    return open_stored(paths, number)


def open_stored(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    number: int | None = None,
    *,
    lock: bool = True,
    memory_bytes: int = MEMORY_BYTES,
    is_whole: bool = True,
) -> StoredState:
    """As ``open_checkpoint``.

    Args:
        paths: directories of all ranks.
        number: which commit.
        lock: false for whoever owns the directories.
        memory_bytes: shards that are not in use stay in memory within this much.
        is_whole: false: what one rank has of parameters will do, if no more is given.
    """
    commits = open_commits(paths, number, lock=lock)
    try:
        parts = snapshot_of(commits[0].manifest, commits[0].path).parts
        is_cut = any(slot.count is not None for part in parts for slot in part.slots)
        if len(commits) == 1 and not (is_cut and is_whole):
            return StoredState(commits[0], memory_bytes=memory_bytes)
        return JoinedState(commits, memory_bytes=memory_bytes)
    except BaseException:
        for commit in commits:
            commit.close()
        raise
