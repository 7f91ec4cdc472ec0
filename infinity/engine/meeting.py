"""How the ranks of a job find each other: from what torchrun says, or in groups that the user has made."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from infinity.engine.collectives import Collectives
from infinity.engine.ranks.failures import named_errors
from infinity.errors import ConfigError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def started_as_ranks() -> bool:
    """Whether this process was started as one of several ranks, by torchrun or alike.

    Raises:
        ConfigError: what it was told is no number.
    """
    return "RANK" in os.environ and _number("WORLD_SIZE", "1") > 1


def collectives_library(device: torch.device) -> str | None:
    """The library for collectives between such devices; ``None`` where this build of torch has none.

    Args:
        device: its type counts.
    """
    backend = dist.Backend.default_device_backend_map.get(device.type) if dist.is_available() else None
    return backend if backend is not None and dist.is_backend_available(backend) else None


class Place(NamedTuple):
    """Where a process stands among those that were started together.

    Attributes:
        rank: its number.
        num_ranks: how many there are.
        local_rank: its number within its host.
    """

    rank: int
    num_ranks: int
    local_rank: int


def place() -> Place:
    """Of this process: in the default group, or, before there is one, as torchrun says; alone else.

    Raises:
        ConfigError: what it was told is no number.
    """
    local_rank = _number("LOCAL_RANK", "0")
    if dist.is_initialized():
        return Place(dist.get_rank(), dist.get_world_size(), local_rank)
    if "RANK" not in os.environ:
        return Place(0, 1, 0)
    return Place(_number("RANK"), _number("WORLD_SIZE", "1"), local_rank)


def ensure_default_group(device: torch.device, *, seconds: float) -> Place:
    """Make the default group of ``torch.distributed``, unless there is one; a process that is alone gets its own.

    For programs that ask ``torch.distributed`` who they are. ``meet`` makes the group where there are several ranks.

    Args:
        device: as for ``open_process_group``.
        seconds: how long ranks may be apart.

    Raises:
        ConfigError: there is no library for collectives between such devices.
        RanksError: not all came.
    """
    timeout = datetime.timedelta(seconds=seconds)
    if not dist.is_initialized() and started_as_ranks():
        _join(_place(device), timeout)
    elif not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
    return place()


def wait_for_all() -> None:
    """Wait until all ranks of the default group have come here; at once where there is none.

    Raises:
        RanksError: one has ended, or did not come in time.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        with named_errors(dist.get_rank(), dist.get_world_size(), "barrier"):
            dist.barrier()


def meet(
    device: torch.device,
    *,
    seconds: float,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    num_sharing: int | None = None,
) -> Collectives | None:
    """The other ranks of ``group``, or of all that torchrun, or the user, started; ``None`` where this is the only one.

    Args:
        device: as for ``open_process_group``.
        seconds: how long ranks may be apart, whatever they do.
        group: the ranks that meet; of a mesh of two dimensions those along the second share the state, and those along
            the first have copies.
        num_sharing: how many consecutive ranks share the state, where the group does not say it.

    Raises:
        ConfigError: there is no library for collectives between such devices, or ranks do not divide so.
        RanksError: not all came.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim == 2:
            return _open_mesh(device, seconds, group.mesh.tolist())
        if group.ndim > 2:
            raise ConfigError(f"process_group: expected a mesh of 1 or 2 dimensions, got {group.ndim}; give a slice")
        group = group.get_group()
    if group is not None:
        if dist.get_rank(group) < 0:
            raise ConfigError(
                f"process_group: rank {dist.get_rank()} is none of its ranks; give each rank the group that it is in"
            )
        is_alone = dist.get_world_size(group) == 1
    elif dist.is_initialized():
        is_alone = dist.get_world_size() == 1
    else:
        is_alone = not started_as_ranks()
    if is_alone:
        return None
    if num_sharing is None:
        return open_process_group(device, timeout_seconds=seconds, patience_seconds=seconds, group=group)
    if not dist.is_initialized():
        _join(device, datetime.timedelta(seconds=seconds))
    ranks = dist.get_process_group_ranks(group or _world())
    if len(ranks) % num_sharing:
        raise ConfigError(
            f"shard_ranks={num_sharing}: {len(ranks)} ranks do not divide into groups of so many; give a divisor"
        )
    rows = [ranks[start : start + num_sharing] for start in range(0, len(ranks), num_sharing)]
    return _open_mesh(device, seconds, rows)


def _open_mesh(device: torch.device, seconds: float, rows: Sequence[Sequence[int]]) -> Collectives:
    """Ranks in a mesh: those of a row share the state, those of a column have the same of it."""
    if len(rows[0]) == 1:
        raise ConfigError(
            "hybrid sharding: no two ranks share the state; use stage=0, with which every rank has all of it"
        )
    timeout = datetime.timedelta(seconds=seconds)
    rank = dist.get_rank()
    row = next(row for row in rows if rank in row)
    column = [each[row.index(rank)] for each in rows]
    device, local_rank = _place(device), _number("LOCAL_RANK", "0")
    with _opening() as leave:
        control = _group_of([each for row in rows for each in row], timeout, "gloo", leave)
        data, replicas = (_group_of(ranks, timeout, None, leave) for ranks in (row, column))
        return Collectives(
            device,
            data,
            control,
            local_rank=local_rank,
            patience=timeout,
            close=leave.close,
            replicas=replicas if len(rows) > 1 else None,
        )


@contextlib.contextmanager
def _opening() -> Iterator[contextlib.ExitStack]:
    """A context in which groups are made; they are left again if it fails."""
    leave = contextlib.ExitStack()
    try:
        yield leave
    except BaseException:
        leave.close()
        raise


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _place(device: torch.device) -> torch.device:
    """This rank's device, made current."""
    if device.type == "cpu":
        return device
    device = torch.device(device.type, _number("LOCAL_RANK", "0"))
    torch.accelerator.set_device_index(device)
    return device


def open_process_group(
    device: torch.device,
    *,
    timeout_seconds: float = 60.0,
    patience_seconds: float = 3600.0,
    group: dist.ProcessGroup | None = None,
) -> Collectives:
    """Meet the other ranks: in the group given, or the default one, which is made if there is none.

    ``close`` leaves both alone: a default group cannot be made twice in a process, and another engine may come.

    Args:
        device: its type; on accelerators the one with torchrun's LOCAL_RANK is taken and made current.
        timeout_seconds: how long ranks may be apart when they meet, and in a collective.
        patience_seconds: how long at a barrier, or when facts are exchanged.
        group: the ranks that meet; ``None`` for all.

    Raises:
        ConfigError: this process was not started as one of several ranks, or as no number of them, or there is no
            library for the device.
        RanksError: not all came.
    """
    device, local_rank = _place(device), _number("LOCAL_RANK", "0")
    patience = datetime.timedelta(seconds=patience_seconds)
    if not dist.is_initialized():
        _join(device, datetime.timedelta(seconds=timeout_seconds))
    data = group or _world()
    with _opening() as leave:
        control = _new_group(data, patience, "gloo", leave)
        return Collectives(device, data, control, local_rank=local_rank, patience=patience, close=leave.close)


def open_another(collectives: Collectives, *, seconds: float) -> Collectives:
    """Groups of their own for those who share the state, so that what they do has an order of its own.

    Every rank calls it at the same time.

    Args:
        collectives: those that there are.
        seconds: how long ranks may be apart.

    Raises:
        RanksError: not all came.
    """
    timeout = datetime.timedelta(seconds=seconds)
    with _opening() as leave:
        data, control = (_new_group(collectives.group, timeout, backend, leave) for backend in (None, "gloo"))
        where, rank = collectives.device, collectives.local_rank
        return Collectives(where, data, control, local_rank=rank, patience=timeout, close=leave.close)


def open_control(collectives: Collectives, *, seconds: float) -> Collectives:
    """A group of all ranks of the job for nothing but facts. Every rank calls it at the same time.

    Args:
        collectives: those that there are.
        seconds: how long ranks may be apart.

    Raises:
        RanksError: not all came.
    """
    timeout = datetime.timedelta(seconds=seconds)
    with _opening() as leave:
        control = _new_group(collectives.control, timeout, "gloo", leave)
        where, rank = collectives.device, collectives.local_rank
        return Collectives(where, control, control, local_rank=rank, patience=timeout, close=leave.close)


def _new_group(
    like: dist.ProcessGroup, timeout: datetime.timedelta, backend: str | None, leave: contextlib.ExitStack
) -> dist.ProcessGroup:
    return _group_of(dist.get_process_group_ranks(like), timeout, backend, leave)


def _group_of(
    ranks: Sequence[int], timeout: datetime.timedelta, backend: str | None, leave: contextlib.ExitStack
) -> dist.ProcessGroup:
    is_some = len(ranks) < dist.get_world_size()
    with named_errors(dist.get_rank(), dist.get_world_size(), "meeting"):
        group = dist.new_group(list(ranks), timeout, backend, use_local_synchronization=is_some)
    assert isinstance(group, dist.ProcessGroup)
    leave.callback(_leave, group)
    return group


def _leave_all() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _leave(group: dist.ProcessGroup) -> None:
    if dist.is_initialized():  # with the default group all others are gone
        dist.destroy_process_group(group)


def _number(name: str, default: str = "") -> int:
    """A number that torchrun has put into the environment."""
    value = os.environ.get(name, default)
    try:
        return int(value)
    except ValueError:
        raise ConfigError(
            f"environment variable {name}: expected a number, got {value!r}; start with torchrun"
        ) from None


def _join(device: torch.device, timeout: datetime.timedelta) -> None:
    """Make the default group from what torchrun has put into the environment."""
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise ConfigError(f"{', '.join(missing)}: not set, so there are no ranks to meet; start with torchrun")
    backend = collectives_library(device)
    if backend is None:
        raise ConfigError(f"this build of torch has no library for collectives between {device.type} devices")
    rank, num_ranks = _number("RANK"), _number("WORLD_SIZE")
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    with named_errors(rank, num_ranks, f"meeting at {address}", timeout.total_seconds()):
        store, rank, num_ranks = next(rendezvous("env://", rank, num_ranks, timeout=timeout))
        # Ranks that torchrun has started again find the store of those before, with their addresses in it.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"infinity/{attempt}", store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=num_ranks)
    if backend != "gloo":  # which needs no leave-taking, and ends the process if a thread still waits in a group
        atexit.register(_leave_all)
