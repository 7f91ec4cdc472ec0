"""``Collectives``: what ranks do together, and the only user of ``torch.distributed``.

Two groups. The *data* group moves tensors over the device's own library. The *control* group is gloo, for barriers and
small facts: it needs no accelerator, says which rank is missing, and waits longer, since a rank may have work of its
own for a while. A rank that ends, however it ends, closes its connections; then every wait of the others ends at once
with an error. So time-outs are only for what is stuck without being dead.

Reduce-scatter is a sum in the order of the ranks: the same bits each time. Over gloo it is an all-to-all and a sum here
(16-bit floats are summed in fp32 and rounded once). Rejected: gloo's own, which is an all-reduce of everything of which
each rank keeps its part: in most versions twice the bytes, 2-3 times slower here, and bf16 rounded at each addition.

Facts travel as JSON, not pickled: what a peer sends becomes no code.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from infinity.engine.transport import RankFacts, describe_transport, rank_facts
from infinity.errors import ConfigError, InfinityError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_HALF = (torch.float16, torch.bfloat16)
_PIECE_ELEMENTS = 1 << 17


class RanksError(InfinityError, RuntimeError):
    """The ranks could not meet, one of them has ended, or it did not come in time."""


class Collectives:
    """The ranks of one job; made by ``open_process_group``.

    On an accelerator a collective is queued on the current stream and the call returns; on the CPU it has ended.
    Every rank calls the same ones in the same order with the same sizes; gloo aborts a process that is sent too much.

    Args:
        device: this rank's.
        data: the group that moves tensors.
        control: a gloo group of the same ranks.
        local_rank: this rank's number within its host.
        patience: how long rank 0 waits at a barrier; the control group knows it for the others.
        close: leaves the groups.

    Attributes:
        rank: this rank's number.
        num_ranks: how many there are.
        local_rank: this rank's number within its host.
        device: this rank's.
        backend: the data group's library.
        hosts: of each rank, the name of its machine.
        transport: the way between ranks, in words.
        reduction: how reduce-scatter is done, in words.
    """

    def __init__(
        self,
        device: torch.device,
        data: dist.ProcessGroup,
        control: dist.ProcessGroup,
        *,
        local_rank: int,
        patience: datetime.timedelta,
        close: Callable[[], None],
    ) -> None:
        self.rank = dist.get_rank(data)
        self.num_ranks = dist.get_world_size(data)
        self.local_rank = local_rank
        self.device = device
        self.backend = _backend_of(data, device)
        self._data: dist.ProcessGroup | None = data
        self._control = control
        self._patience = patience
        self._close = close
        native = self.backend != "gloo"
        self.reduction = f"{self.backend} reduce-scatter" if native else "all-to-all, then a sum in the order of ranks"
        facts: list[RankFacts] = self.exchange(rank_facts(device), "telling each other where they are")
        self.hosts = [fact["host"] for fact in facts]
        self.transport = describe_transport(self.backend, facts)

    def all_gather_into(self, output: torch.Tensor, tensor: torch.Tensor, *, phase: str = "all-gather") -> None:
        """Put every rank's ``tensor`` into ``output``, in the order of ranks.

        Args:
            output: shape ``(num_ranks * n,)``, contiguous, of the dtype and on the device of ``tensor``.
            tensor: shape ``(n,)``, contiguous.
            phase: what is done, for the message of an error.

        Raises:
            RanksError: another rank has ended or did not come in time.
        """
        self._check(output, tensor)
        with self._named(phase):
            _all_gather(output.view(torch.uint8), tensor.view(torch.uint8), group=self._data)

    def reduce_scatter_into(self, output: torch.Tensor, tensor: torch.Tensor, *, phase: str = "reduce-scatter") -> None:
        """Put this rank's part of the sum of all ranks' ``tensor`` into ``output``.

        Args:
            output: shape ``(n,)``, contiguous, of the dtype and on the device of ``tensor``.
            tensor: shape ``(num_ranks * n,)``, contiguous; not changed.
            phase: what is done, for the message of an error.

        Raises:
            RanksError: another rank has ended or did not come in time.
        """
        self._check(tensor, output)
        with self._named(phase):
            if self.backend != "gloo":
                _reduce_scatter(output, tensor, group=self._data)
                return
            parts = torch.empty_like(tensor)
            dist.all_to_all_single(parts.view(torch.uint8), tensor.view(torch.uint8), group=self._data)
            _sum_into(output, parts.view(self.num_ranks, -1))

    def exchange(self, fact: Any, phase: str = "exchanging facts") -> list[Any]:
        """What every rank has to say, in the order of ranks; small, and such that JSON can hold it.

        Raises:
            RanksError: another rank has ended or did not come in time.
        """
        words = torch.frombuffer(bytearray(json.dumps(fact).encode()), dtype=torch.uint8)
        with self._named(phase):
            sizes = torch.empty(self.num_ranks, dtype=torch.int64)
            size = torch.tensor([words.numel()])
            _all_gather(sizes.view(torch.uint8), size.view(torch.uint8), group=self._control)
            longest = int(sizes.max())
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: words.numel()] = words
            everything = torch.empty(self.num_ranks * longest, dtype=torch.uint8)
            _all_gather(everything, padded, group=self._control)
        pieces = zip(everything.view(self.num_ranks, longest), sizes.tolist(), strict=True)
        return [json.loads(bytes(piece[:num_bytes].tolist())) for piece, num_bytes in pieces]

    def barrier(self, phase: str = "barrier") -> None:
        """Wait until every rank has come here.

        Raises:
            RanksError: another rank has ended or did not come in time; rank 0's says which.
        """
        with self._named(phase):
            dist.monitored_barrier(self._control, self._patience, wait_all_ranks=True)

    def close(self) -> None:
        """Leave the groups; a wait of another rank for this one ends with an error. Closing twice is harmless."""
        if self._data is not None:
            self._data = None
            self._close()

    def _check(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        assert whole.ndim == part.ndim == 1
        assert whole.dtype == part.dtype
        assert whole.numel() == part.numel() * self.num_ranks
        assert self._data is not None, "closed"

    def _named(self, phase: str) -> contextlib.AbstractContextManager[None]:
        return _named(self.rank, self.num_ranks, phase)


def started_as_ranks() -> bool:
    """Whether this process was started as one of several ranks, by torchrun or alike.

    Raises:
        ConfigError: what it was told is no number.
    """
    return "RANK" in os.environ and _number("WORLD_SIZE", "1") > 1


def open_process_group(
    device: torch.device, *, timeout_seconds: float = 60.0, patience_seconds: float = 3600.0
) -> Collectives:
    """Meet the other ranks: in the default group where there is one (which ``close`` leaves alone), else in our own.

    Args:
        device: its type; on accelerators the one with torchrun's LOCAL_RANK is taken and made current.
        timeout_seconds: how long ranks may be apart when they meet, and in a collective.
        patience_seconds: how long at a barrier, or when facts are exchanged.

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
        owned = not dist.is_initialized()
        if owned:
            _join(device, datetime.timedelta(seconds=timeout_seconds))
            leave.callback(dist.destroy_process_group)
        data = dist.group.WORLD
        assert data is not None
        with _named(dist.get_rank(), dist.get_world_size(), "meeting"):
            control = dist.new_group(backend="gloo", timeout=patience)
        assert isinstance(control, dist.ProcessGroup)
        if not owned:
            leave.callback(dist.destroy_process_group, control)
        return Collectives(device, data, control, local_rank=local_rank, patience=patience, close=leave.close)
    except BaseException:
        leave.close()
        raise


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
    with _named(rank, num_ranks, f"meeting at {address}", timeout.total_seconds()):
        dist.init_process_group(backend, timeout=timeout)


def _sum_into(output: torch.Tensor, rows: torch.Tensor) -> None:
    """Add up rows in their order; 16-bit floats in fp32, a cache-sized piece at a time, rounded once."""
    first, *others = rows
    if output.dtype not in _HALF:
        output.copy_(first)
        for row in others:
            output += row
        return
    for start in range(0, output.numel(), _PIECE_ELEMENTS):
        piece = slice(start, start + _PIECE_ELEMENTS)
        total = first[piece].float()
        for row in others:
            total += row[piece].float()
        output[piece].copy_(total)


def _backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The library that serves ``device`` in a group, which may have one for each type of device."""
    configuration = str(dist.get_backend_config(group))
    pairs = dict(part.partition(":")[::2] for part in configuration.split(",") if ":" in part)
    return str(pairs.get(device.type, dist.get_backend(group)))


def _all_gather(output: torch.Tensor, tensor: torch.Tensor, *, group: dist.ProcessGroup | None) -> None:
    if hasattr(dist, "all_gather_single"):
        dist.all_gather_single(output, tensor, group=group)
    else:  # its name before torch 2.13
        dist.all_gather_into_tensor(output, tensor, group=group)


def _reduce_scatter(output: torch.Tensor, tensor: torch.Tensor, *, group: dist.ProcessGroup | None) -> None:
    if hasattr(dist, "reduce_scatter_single"):
        dist.reduce_scatter_single(output, tensor, group=group)
    else:  # its name before torch 2.13
        dist.reduce_scatter_tensor(output, tensor, group=group)


@contextlib.contextmanager
def _named(rank: int, num_ranks: int, phase: str, seconds: float | None = None) -> Iterator[None]:
    """Say in an error which rank it was and what it was doing."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, InfinityError):
            raise
        said = str(error).strip().partition("\n")[0]
        whole = str(error).lower()
        if "connection closed" in whole or "connection reset" in whole or "broken pipe" in whole:
            why = "another rank has ended; see what it said"
        elif "failed to pass monitoredbarrier" in whole:
            why = "a rank has ended or did not come in time; see what it said"
        elif "timed out" in whole or "timeout" in whole:
            why = "not all ranks came in time" + (f" ({seconds:g} s)" if seconds else "")
        elif "address already in use" in whole or "eaddrinuse" in whole:
            why = "the port is taken; give another --master-port"
        else:
            why = "failed"
        raise RanksError(f"rank {rank} of {num_ranks}, {phase}: {why} ({said})") from error
