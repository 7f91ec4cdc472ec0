"""What is in a state directory: as one JSON document, and in lines for a person."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from infinity.checkpoint.arguments import opened
from infinity.console.formats import format_bytes
from infinity.engine.persistence.snapshot import dtype_name
from infinity.engine.persistence.stored_state import StoredState
from infinity.errors import StorageError
from infinity.store.finding import find_directories, list_homes, read_manifest


def describe(paths: Sequence[Path], number: int | None, console: Console) -> dict[str, Any]:
    """All that can be said of a state without reading its shards.

    Args:
        paths: its directories, or NVMe paths that hold them.
        number: the commit to look into; ``None`` for the newest that can be used.
        console: told of damaged ones.

    Raises:
        InfinityError: there is no such commit, or it cannot be used.
    """
    directories = find_directories(paths)
    commits = list(_commits(directories))
    with opened(paths, number, console, lock=False, is_whole=False) as state:  # no shard is read: jobs may run
        return {
            "directories": [str(directory) for directory in directories],
            "state": state.commit.manifest.state,
            "commits": commits,
            "commit": _describe_commit(state),
        }


def _commits(directories: Sequence[Path]) -> Iterator[dict[str, Any]]:
    homes = list_homes(directories)
    for number in sorted({file.number for files in homes.values() for file in files}, reverse=True):
        files = [file for of_rank in homes.values() for file in of_rank if file.number == number]
        try:
            manifests = [read_manifest(file) for file in files]
        except StorageError as error:
            yield {"number": number, "valid": False, "error": str(error)}
            continue
        if len(files) < len(homes):
            yield {"number": number, "valid": False, "error": f"only {len(files)} of {len(homes)} ranks have it"}
            continue
        step = manifests[0].engine.get("step")
        yield {
            "number": number,
            "valid": True,
            "step": step if isinstance(step, int) else None,
            "time": manifests[0].time,
            "num_bytes": sum(manifest.num_bytes for manifest in manifests),
        }


def _describe_commit(state: StoredState) -> dict[str, Any]:
    manifest, snapshot = state.commit.manifest, state.snapshot
    files = [file for commit in state.commits for file in commit.manifest.files]
    found = {file.name: _where(state, file.name) for file in files}
    return {
        "number": manifest.number,
        "step": snapshot.step,
        "time": manifest.time,
        "ranks": [commit.manifest.rank for commit in state.commits],
        "world_size": manifest.world_size,
        "stage": snapshot.stage,
        "num_parameters": sum(slot.num_elements for part in state.parts for slot in part.slots),
        "num_bytes": _sizes(state, None),
        "units": [_describe_unit(state, index) for index in range(len(snapshot.units))],
        "tied": dict(snapshot.tied),
        "buffers": [
            {
                "name": name,
                "shape": list(value.shape),
                "dtype": dtype_name(value.dtype),
                "persistent": name in snapshot.persistent_buffers,
            }
            for name, value in state.buffers.items()
        ],
        "optimizer": _describe_optimizer(state),
        "tracked": sorted(snapshot.tracked),
        "config": snapshot.config,
        "versions": snapshot.versions,
        "files": [
            {
                "name": file.name,
                "num_bytes": file.num_bytes,
                "was_in": file.directory,
                "found": None if found[file.name] is None else str(found[file.name]),
            }
            for file in files
        ],
    }


def _where(state: StoredState, name: str) -> Path | None:
    directories = (directory for commit in state.commits for directory in commit.directories)
    return next((each / name for each in directories if (each / name).is_file()), None)


def _sizes(state: StoredState, unit: int | None) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for commit in state.commits:
        for shard in commit.manifest.shards:
            if unit is None or shard.unit == unit:
                sizes[shard.kind] = sizes.get(shard.kind, 0) + shard.num_bytes
    return dict(sorted(sizes.items()))


def _describe_unit(state: StoredState, index: int) -> dict[str, Any]:
    parameters = [
        {
            "name": slot.name,
            "shape": list(slot.original.shape),
            "dtype": layout.step_dtype if layout.weights != "whole" else layout.compute_dtype,
            "compute_dtype": layout.compute_dtype,
            "stored": layout.weights,
            "stepped": layout.stepped,
            "states": {
                name: {"dtype": each.dtype, "stored": each.stored}
                for name, each in layout.states.items()
                if position in each.slots
            },
        }
        for part, layout in zip(state.parts, state.layouts, strict=True)
        if part.unit == index
        for position, slot in enumerate(part.slots)
    ]
    return {"name": state.snapshot.units[index], "num_bytes": _sizes(state, index), "parameters": parameters}


def _describe_optimizer(state: StoredState) -> dict[str, Any]:
    groups = state.optimizer_state_dict["param_groups"]
    return {
        "class": state.snapshot.optimizer.class_name,
        "groups": [
            {**{key: plain(value) for key, value in group.items() if key != "params"}, "num_params": len(names)}
            for group, names in zip(groups, state.param_names, strict=True)
        ],
    }


def plain(value: Any) -> Any:
    """Any value as JSON can say it, for people: tensors of one element are their number, infinities words."""
    if isinstance(value, torch.Tensor):
        return plain(value.item()) if value.numel() == 1 else f"tensor of shape {tuple(value.shape)}"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (str, bool, int, type(None))):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    return str(value)


def lines_of(document: Mapping[str, Any]) -> Iterator[str]:
    """The document of ``describe`` for a person."""
    commit = document["commit"]
    for each in document["commits"]:
        mark = "*" if each["number"] == commit["number"] else " "
        if each["valid"]:
            size = format_bytes(each["num_bytes"])
            yield f"{mark} commit {each['number']}  step {each['step']}  {each['time']}  {size}"
        else:
            yield f"{mark} commit {each['number']}  cannot be used: {each['error']}"
    yield ""
    yield (
        f"commit {commit['number']}: step {commit['step']}, {_show_ranks(commit)}, "
        f"{commit['num_parameters']:,} parameters, {format_bytes(sum(commit['num_bytes'].values()))}: "
        f"{_show_sizes(commit['num_bytes'])}"
    )
    yield from _lines_of_optimizer(commit["optimizer"])
    for unit in commit["units"]:
        yield f"unit {unit['name']}: {_show_sizes(unit['num_bytes'])}"
        yield from (f"  {_show_parameter(each)}" for each in unit["parameters"])
    yield from _lines_of_rest(commit)


def _lines_of_optimizer(optimizer: Mapping[str, Any]) -> Iterator[str]:
    yield f"optimizer: {optimizer['class']}"
    for index, group in enumerate(optimizer["groups"]):
        settings = ", ".join(f"{key}={value}" for key, value in group.items() if key != "num_params")
        yield f"  group {index}, {group['num_params']} parameters: {settings}"


def _show_parameter(each: Mapping[str, Any]) -> str:
    shape = "x".join(map(str, each["shape"])) or "scalar"
    computes = f", computes in {each['compute_dtype']}" if each["compute_dtype"] != each["dtype"] else ""
    stored = {state["stored"] for state in each["states"].values()}
    states = f"; {', '.join(each['states'])} ({', '.join(sorted(stored))})" if stored else ""
    frozen = "" if each["stepped"] else "; not stepped"
    return f"{each['name']}  {shape}  {each['dtype']}{computes} ({each['stored']}){states}{frozen}"


def _show_ranks(commit: Mapping[str, Any]) -> str:
    ranks, num_ranks = commit["ranks"], commit["world_size"]
    if len(ranks) == num_ranks > 1:
        return f"of {num_ranks} ranks, stage {commit['stage']}"
    return f"rank {', '.join(map(str, ranks))} of {num_ranks}"


def _show_sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sizes.items())


def _lines_of_rest(commit: Mapping[str, Any]) -> Iterator[str]:
    for alias, name in commit["tied"].items():
        yield f"tied: {alias} is {name}"
    for buffer in commit["buffers"]:
        kind = "buffer" if buffer["persistent"] else "buffer (not in state dicts)"
        yield f"{kind}: {buffer['name']}  {'x'.join(map(str, buffer['shape'])) or 'scalar'}  {buffer['dtype']}"
    if commit["tracked"]:
        yield f"tracked: {', '.join(commit['tracked'])}"
    for file in commit["files"]:
        where = file["found"] or f"MISSING (was in {file['was_in']})"
        yield f"file: {file['name']}  {format_bytes(file['num_bytes'])}  {where}"
