"""How the ranks of a job find each other: from what torchrun says, or in groups that the user has made."""

from __future__ import annotations

import contextlib
import datetime
import os

import torch
import torch.distributed as dist

from infinity.engine.collectives import Collectives, named_errors
from infinity.errors import ConfigError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def started_as_ranks() -> bool:
    """Whether this process was started as one of several ranks, by torchrun or alike.

    Raises:
        ConfigError: what it was told is no number.
    """
    return "RANK" in os.environ and _number("WORLD_SIZE", "1") > 1


def meet(device: torch.device, *, seconds: float, group: dist.ProcessGroup | None = None) -> Collectives | None:
    """The other ranks of ``group``, or of all that torchrun, or the user, started; ``None`` where this is the only one.

    Args:
        device: as for ``open_process_group``.
        seconds: how long ranks may be apart, whatever they do.
        group: the ranks that meet.

    Raises:
        ConfigError: there is no library for collectives between such devices.
        RanksError: not all came.
    """
    if group is not None:
        is_alone = dist.get_world_size(group) == 1
    elif dist.is_initialized():
        is_alone = dist.get_world_size() == 1
    else:
        is_alone = not started_as_ranks()
    if is_alone:
        return None
    return open_process_group(device, timeout_seconds=seconds, patience_seconds=seconds, group=group)


def open_process_group(
    device: torch.device,
    *,
    timeout_seconds: float = 60.0,
    patience_seconds: float = 3600.0,
    group: dist.ProcessGroup | None = None,
) -> Collectives:
    """Meet the other ranks: in the group given, or the default one (``close`` leaves both alone), else in our own.

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
    local_rank = _number("LOCAL_RANK", "0")
    if device.type != "cpu":
        device = torch.device(device.type, local_rank)
        torch.accelerator.set_device_index(device)
    patience = datetime.timedelta(seconds=patience_seconds)
    leave = contextlib.ExitStack()
    try:
        if not dist.is_initialized():
            _join(device, datetime.timedelta(seconds=timeout_seconds))
            leave.callback(dist.destroy_process_group)
        data = group or dist.group.WORLD
        assert data is not None
        control = _new_group(data, patience, "gloo", leave)
        return Collectives(device, data, control, local_rank=local_rank, patience=patience, close=leave.close)
    except BaseException:
        leave.close()
        raise


def open_another(
    collectives: Collectives, *, timeout_seconds: float = 60.0, patience_seconds: float = 3600.0
) -> Collectives:
    """Groups of their own for the same ranks, so that what they do needs no place in the order of the others' calls.

    Every rank calls it at the same time.

    Args:
        collectives: those that there are.
        timeout_seconds: how long ranks may be apart in a collective.
        patience_seconds: how long at a barrier, or when facts are exchanged.

    Raises:
        RanksError: not all came.
    """
    timeout, patience = (datetime.timedelta(seconds=seconds) for seconds in (timeout_seconds, patience_seconds))
    leave = contextlib.ExitStack()
    try:
        data = _new_group(collectives.group, timeout, None, leave)
        control = _new_group(collectives.group, patience, "gloo", leave)
        return Collectives(
            collectives.device,
            data,
            control,
            local_rank=collectives.local_rank,
            patience=patience,
            close=leave.close,
        )
    except BaseException:
        leave.close()
        raise


def _new_group(
    like: dist.ProcessGroup, timeout: datetime.timedelta, backend: str | None, leave: contextlib.ExitStack
) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(like)
    with named_errors(dist.get_rank(like), len(ranks), "meeting"):
        group = dist.new_group(ranks, timeout, backend, use_local_synchronization=len(ranks) < dist.get_world_size())
    assert isinstance(group, dist.ProcessGroup)
    leave.callback(_leave, group)
    return group


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
    backend = dist.Backend.default_device_backend_map.get(device.type)
    if backend is None or not dist.is_backend_available(backend):
        raise ConfigError(f"this build of torch has no library for collectives between {device.type} devices")
    rank, num_ranks = _number("RANK"), _number("WORLD_SIZE")
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    with named_errors(rank, num_ranks, f"meeting at {address}", timeout.total_seconds()):
        dist.init_process_group(backend, timeout=timeout)
