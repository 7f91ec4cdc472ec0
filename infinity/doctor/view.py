"""``View``: asks the machine for the facts. Tries what can be tried, in a moment, and changes nothing."""

from __future__ import annotations

import asyncio
import mmap
import os
import platform
import re
import resource
import sys
from importlib import metadata
from pathlib import Path

import psutil
import torch

import infinity
from infinity.doctor.directory import look_at
from infinity.doctor.facts import (
    Accelerator,
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
from infinity.doctor.meeting import meet_here
from infinity.engine.compiled import missing_for_compiling
from infinity.engine.meeting import collectives_library
from infinity.io.cores import find_cores
from infinity.io.memory import HUGE_PAGE_BYTES, allocate
from infinity.io.ring import Refusal, Ring, explain_refusal
from infinity.machine.files import chosen, read_text
from infinity.machine.host import ROOT, host_facts
from infinity.machine.memory import available_memory_bytes, cpu_name, memory_limit_bytes

OPTIONAL = ("transformers", "accelerate", "peft", "lightning", "matplotlib")

_TRIED_BYTES = 16 * HUGE_PAGE_BYTES
_MADV_POPULATE_WRITE = 23
_MAKERS = {"0x10de": ("NVIDIA", ("0x03",)), "0x1002": ("AMD", ("0x0380", "0x12"))}
"""By the number of a PCI vendor: its name, and how the classes of its accelerators begin."""


class View:
    """The machine that this process runs on. Each method may take a moment; none fails where the system is silent.

    Args:
        quick: do not measure bandwidth, nor start processes.
        root: where ``proc`` and ``sys`` are.
    """

    def __init__(self, *, quick: bool = False, root: Path = ROOT) -> None:
        self.quick = quick
        self._root = root

    def place(self) -> Place:
        """Where this is."""
        return Place(host_facts(self._root))

    def software(self) -> Software:
        """The programs."""
        return Software(
            python=sys.version_info[:3],
            executable=sys.executable,
            system=f"{platform.system()} {platform.release()}",
            architecture=platform.machine(),
            infinity=infinity.__version__,
            directory=Path(infinity.__file__).parent,
        )

    def torch_build(self) -> Torch:
        """The build of torch, tried on the CPU."""
        kinds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": getattr(torch.version, "xpu", None)}
        builds = [f"{kind} {version}" for kind, version in kinds.items() if version]
        fault = _fault_of_training(torch.device("cpu"))
        return Torch(torch.__version__, ", ".join(builds) or "CPU", torch.get_num_threads(), fault)

    def accelerator(self) -> Accelerator:
        """The accelerator that ``device="auto"`` takes, tried."""
        device = self._device()
        if device.type == "cpu":
            return Accelerator(unused=_unused_accelerator(self._root))
        properties = getattr(torch, device.type).get_device_properties(0)
        pin_fault = _fault_of_pinning() if device.type == "cuda" else None
        free: int | None = None
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(0)
        return Accelerator(
            name=properties.name,
            count=torch.accelerator.device_count(),
            total_bytes=properties.total_memory,
            free_bytes=free,
            driver=_driver(self._root),
            fault=_fault_of_training(device),
            pins=None if device.type != "cuda" else pin_fault is None,
            pin_fault=pin_fault,
        )

    def processors(self) -> Processors:
        """The processors, and what of them this process may use."""
        num_cores = os.cpu_count() or 1
        return Processors(cpu_name(), num_cores, find_cores(self._root), torch.get_num_threads())

    def memory(self) -> Memory:
        """Host memory."""
        swap = psutil.swap_memory()
        return Memory(
            total_bytes=psutil.virtual_memory().total,
            available_bytes=available_memory_bytes(),
            limit_bytes=memory_limit_bytes(),
            swap_total_bytes=swap.total,
            swap_used_bytes=swap.used,
        )

    def huge_pages(self) -> HugePages:
        """Huge pages, by asking for some."""
        setting = read_text(self._root / "sys/kernel/mm/transparent_hugepage/enabled")
        return HugePages(None if setting is None else chosen(setting), _populates(), _share_of_huge_pages(self._root))

    def limits(self) -> Limits:
        """Limits of this process."""
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        num_files, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        shm = self._root / "dev/shm"
        status = os.statvfs(shm) if shm.is_dir() else None
        return Limits(
            locked_bytes=None if locked == resource.RLIM_INFINITY else locked,
            num_files=_number(num_files),
            max_files=_number(max_files),
            shm_bytes=None if status is None else status.f_blocks * status.f_frsize,
        )

    def uring(self) -> Refusal | None:
        """Why there is no io_uring, by making one; ``None`` where there is."""
        try:
            Ring(1).close()
        except OSError as error:
            return explain_refusal(error)
        return None

    def directory(self, path: Path) -> Directory:
        """A directory, by a small file in it that is removed again."""
        return asyncio.run(look_at(path, measured=not self.quick))

    def ranks(self) -> Ranks:
        """Whether ranks can talk to each other."""
        device = self._device()
        library = collectives_library(device)
        if self.quick or library is None:
            return Ranks(library, device.type)
        seconds, fault = meet_here()
        return Ranks(library, device.type, seconds, fault)

    def extras(self) -> Extras:
        """What some features need."""
        versions = {name: _version_of(name) for name in OPTIONAL}
        return Extras(versions, missing_for_compiling(self._device()))

    def _device(self) -> torch.device:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")


def _number(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _fault_of_training(device: torch.device) -> str | None:
    """What goes wrong in a forward, a backward and a step of a small layer; the numbers are compared as well."""
    try:
        weight = torch.full((64, 64), 0.5, device=device, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=1.0)
        (torch.ones(8, 64, device=device) @ weight).sum().backward()
        optimizer.step()
        stepped = weight.detach().cpu()
    except Exception as error:  # of any library below torch
        return _first_line(error)
    return None if bool((stepped == -7.5).all()) else "it computes wrong numbers"


def _fault_of_pinning() -> str | None:
    try:
        memory = allocate(_TRIED_BYTES, pin=True)
    except (MemoryError, RuntimeError) as error:
        return _first_line(error)
    del memory
    return None


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return text or type(error).__name__


def _driver(root: Path) -> str | None:
    versions = (read_text(root / "sys/module" / name / "version") for name in ("nvidia", "amdgpu"))
    return next((version for version in versions if version), None)


def _unused_accelerator(root: Path) -> str | None:
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        maker, classes = _MAKERS.get(read_text(device / "vendor") or "", ("", ()))
        if classes and (read_text(device / "class") or "").startswith(classes):
            return f"an {maker} accelerator (PCI {device.name})"
    return None


def _populates() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        try:
            memory.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            return False
    return True


def _share_of_huge_pages(root: Path) -> float | None:
    """Of memory as transfers use it, how much comes in huge pages."""
    memory = allocate(_TRIED_BYTES)
    start = memory.data_ptr()
    huge_bytes: int | None = None
    inside = False
    for line in (read_text(root / "proc/self/smaps") or "").splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) < start + _TRIED_BYTES and int(bounds[2], 16) > start
        elif inside and (size := re.match(r"AnonHugePages:\s+(\d+) kB", line)):
            huge_bytes = (huge_bytes or 0) + (int(size[1]) << 10)
    return None if huge_bytes is None else min(1.0, huge_bytes / _TRIED_BYTES)
