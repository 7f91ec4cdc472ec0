"""``Collectives``: what ranks do together, and, with ``meeting.py``, the only user of ``torch.distributed``.

Two groups. The *data* group moves tensors over the device's own library. The *control* group is gloo, for barriers and
small facts: it needs no accelerator, says which rank is missing, and waits longer, since a rank may have work of its
own for a while. A rank that ends, however it ends, closes its connections; then every wait of the others ends at once
with an error. So time-outs are only for what is stuck without being dead.

Reduce-scatter is a sum in the order of the ranks: the same bits each time. Over gloo it is an all-to-all and a sum here
(16-bit floats are summed in fp32 and rounded once). Rejected: gloo's own, which is an all-reduce of everything of which
each rank keeps its part: in most versions twice the bytes, 2-3 times slower here, and bf16 rounded at each addition.

What moves whole units in place (``gather_in_place``, ``reduce_in_place``) sends and receives piece by piece over gloo:
its own all-gather makes a copy of everything that it receives, which no budget would know of.

Facts travel as JSON, not pickled: what a peer sends becomes no code.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import DeviceMesh as DeviceMesh

from infinity.engine.ranks.failures import disagreement, named_errors
from infinity.engine.transport import RankFacts, describe_transport, rank_facts
from infinity.errors import RanksError

ProcessGroup = dist.ProcessGroup

T = TypeVar("T")

_HALF = (torch.float16, torch.bfloat16)
_PIECE_ELEMENTS = 1 << 17
_STAGED_ELEMENTS = 1 << 22
_LEAST_PIECE = 1 << 12


class Collectives:
    """The ranks of one job; made by ``meeting.py``.

    On an accelerator a collective is queued on the current stream and the call returns; on the CPU it has ended.
    Every rank calls the same ones in the same order with the same sizes; gloo aborts a process that is sent too much.

    Args:
        device: this rank's.
        data: the group that moves tensors, of those who share the state.
        control: a gloo group of all ranks of the job: the same ones, unless some have copies.
        local_rank: this rank's number within its host.
        patience: how long rank 0 waits at a barrier; the control group knows it for the others.
        close: leaves the groups.
        replicas: the group of those who have copies of what this rank has; ``None`` where nobody has.

    Attributes:
        rank: this rank's number among those who share the state: which slice it has.
        num_ranks: how many share it.
        job_rank: this rank's number among all.
        job_size: how many there are.
        global_rank: this process's number among all that were started, in this job or not.
        num_replicas: how many times the state is there.
        local_rank: this rank's number within its host.
        device: this rank's.
        control: the gloo group.
        backend: the data group's library.
        hosts: of each rank, the name of its machine.
        transport: the way between ranks, in words.
        reduction: how reduce-scatter is done, in words.
        moved_bytes: what this rank has sent so far, by kind of collective.
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
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank = dist.get_rank(data)
        self.num_ranks = dist.get_world_size(data)
        self.job_rank = dist.get_rank(control)
        self.job_size = dist.get_world_size(control)
        self.global_rank = dist.get_rank()
        self.num_replicas = 1 if replicas is None else dist.get_world_size(replicas)
        self._replicas = replicas
        self._sharing = [dist.get_group_rank(control, each) for each in dist.get_process_group_ranks(data)]
        self.local_rank = local_rank
        self.device = device
        self.backend = _backend_of(data, device)
        self._data: dist.ProcessGroup | None = data
        self.control = control
        self._patience = patience
        self._close = close
        self.moved_bytes: Counter[str] = Counter()
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

    def gather_in_place(self, whole: torch.Tensor, *, phase: str = "all-gather") -> None:
        """Complete ``whole``, of which each rank has its slice, the rank's of equal ones in the order of ranks.

        Args:
            whole: shape ``(num_ranks * n,)``, contiguous, on the device.
            phase: what is done, for the message of an error.

        Raises:
            RanksError: another rank has ended or did not come in time.
        """
        slices = whole.view(torch.uint8).view(self.num_ranks, -1)
        with self._named(phase):
            if self.backend == "gloo":
                own = slices[self.rank]
                self._swap(((peer, own) for peer in self._others()), ((peer, slices[peer]) for peer in self._others()))
            else:
                _all_gather(whole.view(torch.uint8), slices[self.rank], group=self._data)
        self.moved_bytes["all-gather"] += slices[self.rank].nbytes * (self.num_ranks - 1)

    def reduce_in_place(self, whole: torch.Tensor, *, factor: float, phase: str = "reduce-scatter") -> None:
        """Make this rank's slice of ``whole`` the sum of all ranks' slices, each multiplied by ``factor`` before.

        The product is rounded to the dtype as ``DistributedDataParallel`` does it, the sum is in the order of ranks:
        first of those who share the state, then, where there are copies of it, of these sums.

        Args:
            whole: shape ``(num_ranks * n,)``, contiguous, on the device; the other slices are void afterwards.
            factor: what a gradient is multiplied by.
            phase: what is done, for the message of an error.

        Raises:
            RanksError: another rank has ended or did not come in time.
        """
        slices = whole.view(self.num_ranks, -1)
        with self._named(phase):
            if self.backend == "gloo":
                self._reduce(slices, factor)
            else:
                whole.mul_(factor)
                _reduce_scatter(slices[self.rank], whole, group=self._data)
            if self._replicas is not None:
                self._reduce_over_replicas(slices[self.rank], self._replicas)
        self.moved_bytes["reduce-scatter"] += slices[self.rank].nbytes * (self.num_ranks - 1)

    def _reduce_over_replicas(self, own: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Make a slice the sum of all copies': each sums a part of it, and tells the others."""
        if self.backend != "gloo":
            dist.all_reduce(own, group=group)
            return
        number, count = dist.get_rank(group), self.num_replicas
        parts = own.tensor_split(count)
        received = torch.empty(count, parts[number].numel(), dtype=own.dtype)
        others = [(number + step) % count for step in range(1, count)]
        received[number].copy_(parts[number])
        self._swap([(peer, parts[peer]) for peer in others], [(peer, received[peer]) for peer in others], group)
        _sum_into(parts[number], received)
        self._swap([(peer, parts[number]) for peer in others], [(peer, parts[peer]) for peer in others], group)
        self.moved_bytes["all-reduce"] += sum(parts[peer].nbytes + parts[number].nbytes for peer in others)

    def _reduce(self, slices: torch.Tensor, factor: float) -> None:
        """A piece of all slices at a time, so that what is staged is bounded."""
        length = slices.shape[1]
        size = min(max(_STAGED_ELEMENTS // self.num_ranks, _LEAST_PIECE), length)
        sent, received = (torch.empty(self.num_ranks, size, dtype=slices.dtype) for _ in range(2))
        for start in range(0, length, size):
            pieces = slices[:, start : start + size]
            width = pieces.shape[1]
            out, rows = sent[:, :width], received[:, :width]
            torch.mul(pieces, factor, out=out)
            rows[self.rank].copy_(out[self.rank])
            self._swap(((peer, out[peer]) for peer in self._others()), ((peer, rows[peer]) for peer in self._others()))
            _sum_into(pieces[self.rank], rows)

    def _others(self) -> Iterator[int]:
        """The other ranks, each rank's in another order."""
        return ((self.rank + step) % self.num_ranks for step in range(1, self.num_ranks))

    def _swap(
        self,
        sent: Iterable[tuple[int, torch.Tensor]],
        received: Iterable[tuple[int, torch.Tensor]],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Send and receive contiguous tensors, each to or from one rank."""
        group = group or self._data
        receiving = [dist.irecv(each.view(torch.uint8), group=group, group_src=peer) for peer, each in received]
        sending = [dist.isend(each.view(torch.uint8), group=group, group_dst=peer) for peer, each in sent]
        for work in (*receiving, *sending):
            if work is not None:
                work.wait()

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, phase: str = "broadcast") -> None:
        """Give every rank what one has: contiguous, on the device.

        Raises:
            RanksError: another rank has ended or did not come in time.
        """
        with self._named(phase):
            if tensor.numel():
                dist.broadcast(tensor.view(-1).view(torch.uint8), group=self._data, group_src=source)

    def share(self, tensor: torch.Tensor, *, phase: str = "sharing") -> None:
        """Give every rank of the job what the first has: contiguous, on the device.

        Raises:
            RanksError: another rank has ended or did not come in time.
        """
        with self._named(phase):
            if self._replicas is not None and tensor.numel():
                dist.broadcast(tensor.view(-1).view(torch.uint8), group=self._replicas, group_src=0)
        self.broadcast(tensor, phase=phase)

    def agree(self, what: str, failure: BaseException | None = None) -> None:
        """Make sure that every rank is about to do the same.

        Args:
            what: what this one is about to do.
            failure: why it cannot.

        Raises:
            RanksError: another rank cannot, or is about to do something else.
        """
        mine = np.array([xxhash.xxh3_64_intdigest(what.encode()) >> 1, failure is not None], dtype=np.int64)
        with self._named(what):
            everyone = torch.empty(self.job_size * 2, dtype=torch.int64)
            _all_gather(everyone.view(torch.uint8), torch.from_numpy(mine).view(torch.uint8), group=self.control)
        found = everyone.view(self.job_size, 2)
        if bool((found[:, 0] == found[0, 0]).all()) and not bool(found[:, 1].any()):
            return
        doing: list[list[str]] = self.exchange([what, "" if failure is None else str(failure) or repr(failure)], what)
        raise RanksError(f"rank {self.job_rank} of {self.job_size}, {what}: {disagreement(doing)}")

    def unite(self, present: Iterable[int], count: int, *, phase: str = "saying what there is") -> set[int]:
        """The numbers below ``count`` that any rank has.

        Raises:
            RanksError: another rank has ended or did not come in time.
        """
        mask = torch.zeros(count, dtype=torch.uint8)
        mask[list(present)] = 1
        everyone = torch.empty(self.job_size * count, dtype=torch.uint8)
        with self._named(phase):
            _all_gather(everyone, mask, group=self.control)
        return set(everyone.view(self.job_size, count).amax(0).nonzero().flatten().tolist())

    def exchange(self, fact: Any, phase: str = "exchanging facts") -> list[Any]:
        """What every rank has to say, in the order of ranks; small, and such that JSON can hold it.

        Raises:
            RanksError: another rank has ended or did not come in time.
        """
        words = torch.frombuffer(bytearray(json.dumps(fact).encode()), dtype=torch.uint8)
        with self._named(phase):
            sizes = torch.empty(self.job_size, dtype=torch.int64)
            size = torch.tensor([words.numel()])
            _all_gather(sizes.view(torch.uint8), size.view(torch.uint8), group=self.control)
            longest = int(sizes.max())
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: words.numel()] = words
            everything = torch.empty(self.job_size * longest, dtype=torch.uint8)
            _all_gather(everything, padded, group=self.control)
        pieces = zip(everything.view(self.job_size, longest), sizes.tolist(), strict=True)
        return [json.loads(bytes(piece[:num_bytes].tolist())) for piece, num_bytes in pieces]

    def sharing(self, said: Sequence[T]) -> list[T]:
        """Of what all ranks of the job have said, that of those who share this rank's copy of the state, in order."""
        return [said[rank] for rank in self._sharing]

    def barrier(self, phase: str = "barrier") -> None:
        """Wait until every rank has come here.

        Raises:
            RanksError: another rank has ended or did not come in time; rank 0's says which.
        """
        with self._named(phase):
            dist.monitored_barrier(self.control, self._patience, wait_all_ranks=True)

    @property
    def group(self) -> dist.ProcessGroup:
        """The group that moves tensors."""
        assert self._data is not None, "closed"
        return self._data

    def close(self) -> None:
        """Leave the groups; a wait of another rank for this one ends with an error. Closing twice is harmless."""
        if self._data is not None:
            self._data = self._replicas = None
            del self.control  # or its connections stay, and others wait for this rank
            self._close()

    def _check(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        assert whole.ndim == part.ndim == 1
        assert whole.dtype == part.dtype
        assert whole.numel() == part.numel() * self.num_ranks
        assert self._data is not None, "closed"

    def _named(self, phase: str) -> contextlib.AbstractContextManager[None]:
        return named_errors(self.job_rank, self.job_size, phase)


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
