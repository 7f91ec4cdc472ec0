"""What differs between two commits, by name: they may be of different layouts, precisions or runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from infinity.checkpoint.describe import plain
from infinity.engine.persistence.stored_state import StoredState

_ELEMENTS_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Difference:
    """A value that is not the same to the bit.

    Attributes:
        name: of what.
        reason: how they differ, in words.
        max_abs: the largest difference of any element, of NaN infinite; ``None`` where there is none to compute.
        num_elements: how many of them differ.
    """

    name: str
    reason: str
    max_abs: float | None = None
    num_elements: int | None = None


@dataclass(slots=True)
class Comparison:
    """What differs.

    Attributes:
        settings: what is no tensor, by name: both values.
        weights: of parameters at full precision and persistent buffers.
        states: of the optimizer's, if they were compared.
        num_same: how many tensors are the same to the bit.
    """

    settings: dict[str, list[Any]] = field(default_factory=dict)
    weights: list[Difference] = field(default_factory=list)
    states: list[Difference] = field(default_factory=list)
    num_same: int = 0

    @property
    def same(self) -> bool:
        """Whether the two commits are equal."""
        return not (self.settings or self.weights or self.states)

    def as_document(self) -> dict[str, Any]:
        """For JSON."""
        document = asdict(self)
        for name in ("weights", "states"):
            for each in document[name]:
                each["max_abs"] = plain(each["max_abs"])
        return {"same": self.same, **document}

    def lines(self) -> Iterator[str]:
        """For a person."""
        for name, (first, second) in self.settings.items():
            yield f"{name}: {first} | {second}"
        for each in (*self.weights, *self.states):
            size = "" if each.max_abs is None else f", at most {each.max_abs:.3g} apart"
            yield f"{each.name}: {each.reason}{size}"
        yield f"{self.num_same} tensors are the same to the bit, {len(self.weights) + len(self.states)} are not"


def compare(first: StoredState, second: StoredState, *, with_optimizer: bool) -> Comparison:
    """Compare two commits; a parameter of each is in memory at a time, with the shards of its part.

    Raises:
        StorageError: a shard could not be read.
    """
    found = Comparison()
    ours, theirs = _settings(first), _settings(second)
    for name in dict.fromkeys([*ours, *theirs]):
        if ours.get(name) != theirs.get(name):
            found.settings[name] = [ours.get(name), theirs.get(name)]
    _compare_tensors(first.weights, second.weights, "", found.weights, found)
    if with_optimizer:
        states, others = _states_by_name(first), _states_by_name(second)
        for name in dict.fromkeys([*states, *others]):
            prefix = f"optimizer state of {name}: "
            _compare_tensors(states.get(name, {}), others.get(name, {}), prefix, found.states, found)
    return found


def _settings(state: StoredState) -> dict[str, Any]:
    groups = state.optimizer_state_dict["param_groups"]
    settings: dict[str, Any] = {"step": state.step, "optimizer": state.snapshot.optimizer.class_name}
    for index, (group, names) in enumerate(zip(groups, state.param_names, strict=True)):
        for key, value in group.items():
            settings[f"group {index}, {key}"] = names if key == "params" else plain(value)
    settings["tied"] = dict(state.snapshot.tied)
    settings["layout"] = [
        f"{state.snapshot.units[part.unit]}.{part.position}: {layout.weights} of {layout.step_dtype} and "
        f"{layout.compute_dtype}, {len(part.slots)} parameters from {part.slots[0].name if part.slots else '-'}"
        for part, layout in zip(state.parts, state.layouts, strict=True)
    ]
    return settings


def _states_by_name(state: StoredState) -> dict[str, Mapping[str, Any]]:
    names = [name for names in state.param_names for name in names]
    return {names[index]: each for index, each in state.optimizer_state_dict["state"].items()}


def _compare_tensors(
    first: Mapping[str, Any], second: Mapping[str, Any], prefix: str, differences: list[Difference], found: Comparison
) -> None:
    for name in dict.fromkeys([*first, *second]):
        if name not in first or name not in second:
            where = "second" if name not in first else "first"
            differences.append(Difference(prefix + name, f"only in the {where}"))
            continue
        difference = _compare(prefix + name, first[name], second[name])
        if difference is None:
            found.num_same += 1
        else:
            differences.append(difference)


def _compare(name: str, first: Any, second: Any) -> Difference | None:
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        same = type(first) is type(second) and plain(first) == plain(second)
        return None if same else Difference(name, f"{plain(first)} | {plain(second)}")
    if first.shape != second.shape:
        return Difference(name, f"of shape {tuple(first.shape)} | {tuple(second.shape)}")
    one, other = (each.contiguous().view(-1) for each in (first, second))
    largest, count, same = 0.0, 0, first.dtype == second.dtype
    for a, b in zip(one.split(_ELEMENTS_AT_ONCE), other.split(_ELEMENTS_AT_ONCE), strict=True):
        if not a.numel() or (a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))):
            continue
        same = False
        wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
        apart = torch.where(a == b, 0.0, (a.to(wide) - b.to(wide)).abs()).nan_to_num(torch.inf, torch.inf)
        largest = max(largest, float(apart.max()))
        count += int((apart > 0).sum())
    if same:
        return None
    reason = f"{count} of {one.numel()} elements differ"
    if first.dtype != second.dtype:
        reason = f"of {first.dtype} | {second.dtype}, {reason}"
    return Difference(name, reason, largest, count)
