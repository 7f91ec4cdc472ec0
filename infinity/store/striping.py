"""How bytes are divided among directories of different speed: a shard among their files, and the capacity.

A weight is a directory's relative speed. Dividing decides how fast bytes move, never which: a shard is wherever its
extents are, and where a file is full the others take what is left (``volumes.py``).

A shard is cut in proportion to the weights, so that all directories end at the same time. Each piece has at least
``STRIPE_BYTES``, since smaller ones would only be smaller requests: a shard for which that leaves a slow directory out
goes to the fastest set of directories that may share it, counting what each holds already. For a training run reads
and writes all that the tier holds every step, so what a directory holds, over its weight, is the time it takes. A slow
directory that no single shard reaches thus gets whole ones now and then, and what all hold keeps to the weights.

Rejected: cutting each shard so that it evens out what the directories hold (a shard written while gradients lie
unevenly would stay unevenly cut for the rest of the run); weights that follow the load while it runs (a shard is
written in place, so it could follow only by being moved).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from infinity.io.backend import DIRECT_ALIGNMENT

STRIPE_BYTES = 1 << 20
"""A directory's piece of a shard has at least this much, or it gets none."""

_LEAST = 1e-6
"""The smallest relative speed that is told from none: below it, a directory gets nothing in either case."""


def relative(speeds: Sequence[float]) -> tuple[float, ...]:
    """Weights of the speeds, all positive: the fastest has 1."""
    fastest = max(speeds)
    return tuple(max(speed / fastest, _LEAST) for speed in speeds)


def apportion(num_pages: int, weights: Sequence[float]) -> list[int]:
    """Divide pages in proportion to the weights: all of them, each share within a page of its exact part."""
    total = sum(weights)
    exact = [num_pages * weight / total for weight in weights]
    shares = [int(part) for part in exact]
    by_remainder = sorted(range(len(weights)), key=lambda index: shares[index] - exact[index])
    for index in by_remainder[: num_pages - sum(shares)]:
        shares[index] += 1
    return shares


def cut(num_bytes: int, weights: Sequence[float], used_bytes: Sequence[int]) -> list[int]:
    """Divide a shard: how many bytes each directory is to get, in proportion to their weights, or none.

    Args:
        num_bytes: length of the shard, a multiple of ``DIRECT_ALIGNMENT``.
        weights: relative speed of each directory, positive.
        used_bytes: what each holds now.

    Returns:
        One multiple of ``DIRECT_ALIGNMENT`` for each directory.
    """
    members = _members(num_bytes, weights, used_bytes)
    sizes = [0] * len(weights)
    pages = apportion(num_bytes // DIRECT_ALIGNMENT, [weights[index] for index in members])
    for index, num_pages in zip(members, pages, strict=True):
        sizes[index] = num_pages * DIRECT_ALIGNMENT
    return sizes


def _members(num_bytes: int, weights: Sequence[float], used_bytes: Sequence[int]) -> list[int]:
    """The directories that share a shard: all, or of the sets that may the one whose last member ends first."""
    everyone = list(range(len(weights)))
    if _may_share(num_bytes, [weights[index] for index in everyone]):
        return everyone
    loads = [used / weight for used, weight in zip(used_bytes, weights, strict=True)]
    by_load = sorted(everyone, key=lambda index: loads[index])
    best: tuple[float, list[int]] | None = None
    for num_members in range(1, len(everyone) + 1):
        members = sorted(by_load[:num_members], key=lambda index: -weights[index])
        while not _may_share(num_bytes, [weights[index] for index in members]):
            members.pop()  # the slowest, and of equals the one that holds most
        end = max(loads[index] for index in members) + num_bytes / sum(weights[index] for index in members)
        if best is None or end < best[0]:
            best = (end, members)
    assert best is not None
    return best[1]


def _may_share(num_bytes: int, weights: Sequence[float]) -> bool:
    return len(weights) == 1 or num_bytes * min(weights) >= STRIPE_BYTES * sum(weights)


def divide_capacity(
    capacity_bytes: int, weights: Sequence[float], devices: Sequence[int], room_bytes: Mapping[int, int]
) -> list[int] | None:
    """Divide the capacity: how large the file of each directory is to be.

    In proportion to the weights where the file systems have room for that; where one has not, the others take more.

    Args:
        capacity_bytes: what all together must hold.
        weights: relative speed of each directory, positive.
        devices: the file system of each directory, by any number; directories may share one.
        room_bytes: what each file system can take.

    Returns:
        One multiple of ``DIRECT_ALIGNMENT`` for each directory, together the capacity rounded up; ``None`` if the file
        systems cannot hold it.
    """
    rooms = {device: room // DIRECT_ALIGNMENT for device, room in room_bytes.items()}
    num_pages = -(-capacity_bytes // DIRECT_ALIGNMENT)
    if num_pages > sum(rooms[device] for device in set(devices)):
        return None
    shares = [0] * len(weights)
    rest = list(range(len(weights)))
    while rest:
        wanted = apportion(num_pages, [weights[index] for index in rest])
        totals = dict.fromkeys((devices[index] for index in rest), 0)
        for index, pages in zip(rest, wanted, strict=True):
            shares[index] = pages
            totals[devices[index]] += pages
        full = {device for device, total in totals.items() if total > rooms[device]}
        for device in full:
            filling = [index for index in rest if devices[index] == device]
            fitting = apportion(rooms[device], [weights[index] for index in filling])
            for index, pages in zip(filling, fitting, strict=True):
                shares[index] = pages
            num_pages -= rooms[device]
        rest = [index for index in rest if devices[index] not in full] if full else []
    return [pages * DIRECT_ALIGNMENT for pages in shares]
