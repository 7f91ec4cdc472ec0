"""A machine in order, of which tests change one fact at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from infinity.doctor.facts import (
    Accelerator,
    Bandwidth,
    Directory,
    Extras,
    HugePages,
    Limits,
    Memory,
    Place,
    Processors,
    Ranks,
    Software,
    Torch,
)
from infinity.doctor.view import OPTIONAL, View
from infinity.io.cores import Cores
from infinity.io.ring import Refusal
from infinity.machine.host import Host
from infinity.machine.paths import PathFacts

GB = 10**9

PLACE = Place(Host(numa_nodes=1))
CONTAINER = Place(Host(container="docker"))
SOFTWARE = Software((3, 12, 1), "/usr/bin/python3", "Linux 6.8", "x86_64", "0.1.0", Path("/venv/infinity"))
TORCH = Torch("2.9.0+cu130", "CUDA 13.0", 8)
ACCELERATOR = Accelerator("H200", 8, 150 * GB, 149 * GB, "580.1", pins=True)
PROCESSORS = Processors("EPYC", 64, Cores(64), 32)
MEMORY = Memory(512 * GB, 500 * GB)
PAGES = HugePages("madvise", True, 1.0)
LIMITS = Limits(None, 65536, 65536, 256 * GB)
EXTRAS = Extras(dict.fromkeys(OPTIONAL, "1.0"), None)
RANKS = Ranks("nccl", "cuda", 0.2)
DIRECTORY = Directory(
    PathFacts("/data", "/dev/nvme0n1", "xfs", "rw,noatime", rotational=False, nvme=True, model="Fast One"),
    mount_point="/data",
    mount_options="rw,noatime",
    backend="threads",
    direct=True,
    alignment=512,
    reasons=("uring, direct I/O: passed over; it is not clearly better", "threads, direct I/O: chosen; it bypasses"),
    free_bytes=1600 * GB,
    total_bytes=2000 * GB,
    clones=True,
    hard_links=True,
    bandwidth=Bandwidth(6.5, 5.0),
)


def under(filesystem: str, device: str = "/dev/nvme0n1", options: str = "rw,relatime", **changes: Any) -> Directory:
    """A directory on another file system or device."""
    facts = replace(DIRECTORY.facts, filesystem=filesystem, device=device, options=options)
    return replace(DIRECTORY, facts=facts, mount_options=options, **changes)


@dataclass
class FakeView(View):
    """A machine of facts; what is an exception is raised."""

    facts: dict[str, Any] = field(default_factory=dict)
    directories: dict[str, Directory] = field(default_factory=dict)

    def _fact(self, name: str, default: Any) -> Any:
        fact = self.facts.get(name, default)
        if isinstance(fact, Exception):
            raise fact
        return fact

    def place(self) -> Place:
        place: Place = self._fact("place", PLACE)
        return place

    def software(self) -> Software:
        software: Software = self._fact("software", SOFTWARE)
        return software

    def torch_build(self) -> Torch:
        torch: Torch = self._fact("torch", TORCH)
        return torch

    def accelerator(self) -> Accelerator:
        accelerator: Accelerator = self._fact("accelerator", ACCELERATOR)
        return accelerator

    def processors(self) -> Processors:
        processors: Processors = self._fact("processors", PROCESSORS)
        return processors

    def memory(self) -> Memory:
        memory: Memory = self._fact("memory", MEMORY)
        return memory

    def huge_pages(self) -> HugePages:
        pages: HugePages = self._fact("pages", PAGES)
        return pages

    def limits(self) -> Limits:
        limits: Limits = self._fact("limits", LIMITS)
        return limits

    def uring(self) -> Refusal | None:
        refusal: Refusal | None = self._fact("uring", None)
        return refusal

    def directory(self, path: Path) -> Directory:
        return self.directories[str(path)]

    def ranks(self) -> Ranks:
        ranks: Ranks = self._fact("ranks", RANKS)
        return ranks

    def extras(self) -> Extras:
        extras: Extras = self._fact("extras", EXTRAS)
        return extras
