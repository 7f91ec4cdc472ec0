"""Memory near to whoever uses it, on machines with more than one memory node.

On such a machine a page lies on one node for life: by default on that of the thread that touches it first, which for
pools is a worker thread of I/O, anywhere. Copies to an accelerator from another socket's memory pass through the link
between the sockets, which is often slower than the accelerator's own; so pools are asked to lie on its node.

Which node (``node_of_user``)
    The accelerator's. Where a virtual machine does not tell it, the drives', if they agree: what moves between the
    two then crosses once at most. Where the CPU computes, the node that all of its processors are on. A CPU process on
    several nodes is left to the system: on one of them, half of the threads would be far from all of the memory, and
    one memory controller would carry everything.

It is a wish, never a condition (``MPOL_PREFERRED``): a full node gives memory from another one rather than an error,
and a container that forbids ``mbind`` changes nothing but speed; what came of it is kept in ``reason``. On a machine
with one node nothing is called at all. Rejected: ``set_mempolicy``, which changes a whole thread; ``libnuma``, one
dependency more for one system call; pinning I/O threads to the node's processors, since a thread waiting in ``preadv``
touches no byte of what the device writes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

_ROOT = Path("/")
_MBIND = {"x86_64": 237, "aarch64": 235, "riscv64": 235, "loongarch64": 235}
_MPOL_PREFERRED = 1
_MASK_BITS = 1024

SystemCall = Callable[[int, int, int, Sequence[int]], int]
"""Asks for memory from an address on, of so many bytes, under a policy, on nodes; returns an error number, or 0."""


class Placement(Protocol):
    """Where memory that has just been mapped is to lie."""

    def place(self, address: int, num_bytes: int) -> None:
        """Ask for the pages of whole, untouched pages from ``address`` on; never fails."""


class Anywhere:
    """Leaves it to the system."""

    def place(self, address: int, num_bytes: int) -> None:
        """Nothing."""


ANYWHERE = Anywhere()


class NearNode:
    """Asks for pages on one node, and takes others where there are none.

    Attributes:
        node: its number.
        reason: why the system refused, the last time that it did; empty while it does not.
    """

    def __init__(self, node: int, call: SystemCall | None = None) -> None:
        self.node = node
        self.reason = ""
        self._call = call or mbind

    def place(self, address: int, num_bytes: int) -> None:
        """Ask for the pages of whole, untouched pages from ``address`` on; never fails."""
        error = self._call(address, num_bytes, _MPOL_PREFERRED, [self.node])
        if error:
            self.reason = f"memory is not placed on node {self.node} (mbind: {os.strerror(error)})"


@dataclass(frozen=True, slots=True)
class Topology:
    """The memory nodes of a machine.

    Attributes:
        nodes: those with memory, each with its processors.
    """

    nodes: dict[int, frozenset[int]]

    @classmethod
    def find(cls, root: Path = _ROOT) -> Topology:
        """What the system tells below ``root``; no nodes where it tells nothing."""
        base = root / "sys/devices/system/node"
        with_memory = parse_list(_read(base / "has_memory") or _read(base / "online"))
        return cls({node: parse_list(_read(base / f"node{node}/cpulist")) for node in sorted(with_memory)})

    def node_of_processors(self, processors: Iterable[int]) -> int | None:
        """The node that all of them are on, if there is one."""
        wanted = frozenset(processors)
        return next((node for node, has in self.nodes.items() if wanted and wanted <= has), None)


def choose_placement(
    device: torch.device,
    directories: Sequence[Path],
    *,
    root: Path = _ROOT,
    processors: Iterable[int] | None = None,
    call: SystemCall | None = None,
) -> Placement:
    """Where the host memory of an engine should lie.

    Args:
        device: what computes.
        directories: the NVMe directories.
        root: where ``sys`` is.
        processors: those that this process may run on; ``None``: ask the system.
        call: how to ask for it; ``None``: by ``mbind``.
    """
    topology = Topology.find(root)
    if len(topology.nodes) < 2:
        return ANYWHERE
    if processors is None:
        processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    node = node_of_user(device, directories, topology, root=root, processors=processors)
    return ANYWHERE if node is None or node not in topology.nodes else NearNode(node, call)


def node_of_user(
    device: torch.device,
    directories: Sequence[Path],
    topology: Topology,
    *,
    root: Path = _ROOT,
    processors: Iterable[int] = (),
) -> int | None:
    """The node of whoever uses the pools most, as the head of this file says; ``None`` where there is no such node."""
    if device.type == "cpu":
        return topology.node_of_processors(processors)
    address = pci_address(device)
    node = None if address is None else node_of_pci(address, root)
    if node is not None:
        return node
    nodes = {node_of_directory(directory, root) for directory in directories}
    return nodes.pop() if len(nodes) == 1 else None


def pci_address(device: torch.device) -> str | None:
    """The address on the PCI bus of an accelerator, as the system names it; ``None`` where torch does not tell."""
    if device.type != "cuda":
        return None
    facts = torch.cuda.get_device_properties(device)
    numbers = [getattr(facts, f"pci_{name}_id", -1) for name in ("domain", "bus", "device")]
    if min(numbers) < 0:
        return None
    return "{:04x}:{:02x}:{:02x}.0".format(*numbers)


def node_of_pci(address: str, root: Path = _ROOT) -> int | None:
    """The node of a device on the PCI bus; ``None`` where the system does not say."""
    return _node_in(root / "sys/bus/pci/devices" / address / "numa_node")


def node_of_directory(directory: Path, root: Path = _ROOT) -> int | None:
    """The node of the block device under a directory; of a striped device, that of all its members."""
    try:
        number = directory.stat().st_dev
    except OSError:
        return None
    return _node_of_block(root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}")


def _node_of_block(device: Path) -> int | None:
    try:
        device = device.resolve(strict=True)
        members = sorted((device / "slaves").iterdir()) if (device / "slaves").is_dir() else []
    except OSError:
        return None
    if members:
        nodes = {_node_of_block(member) for member in members}
        return nodes.pop() if len(nodes) == 1 else None
    found = (_node_in(above / "numa_node") for above in (device, *device.parents))  # a partition's disk is above it
    return next((node for node in found if node is not None), None)


def _node_in(file: Path) -> int | None:
    text = _read(file).strip()
    return int(text) if text.isdecimal() else None  # -1: the system does not know


def parse_list(text: str) -> frozenset[int]:
    """The numbers of a list as the kernel writes it: ``0-3,8,10-11``."""
    numbers: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def mbind(address: int, num_bytes: int, policy: int, nodes: Sequence[int]) -> int:
    """The system call: returns its error number, 0 where it worked."""
    number = _MBIND.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None or max(nodes) >= _MASK_BITS:
        return errno.ENOSYS
    word_bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MASK_BITS // word_bits))()
    for node in nodes:
        mask[node // word_bits] |= 1 << node % word_bits
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    failed = call(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(num_bytes),
        ctypes.c_int(policy),
        mask,
        ctypes.c_ulong(_MASK_BITS + 1),  # the kernel takes one less than it is told
        ctypes.c_uint(0),
    )
    return ctypes.get_errno() if failed else 0


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
