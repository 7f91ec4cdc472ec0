"""What is known of the machine: facts only, no judgement. ``None`` where the system does not say.

``fault`` is what went wrong when a thing was tried, in words; ``None`` where it worked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infinity.io.cores import Cores
from infinity.machine.host import Host
from infinity.machine.paths import PathFacts


@dataclass(frozen=True, slots=True)
class Software:
    """The programs.

    Attributes:
        python: its version.
        executable: of Python.
        system: the kernel and its version, such as ``"Linux 6.1.0"``.
        architecture: of the processor.
        infinity: its version.
        directory: where it is imported from.
    """

    python: tuple[int, int, int]
    executable: str
    system: str
    architecture: str
    infinity: str
    directory: Path


@dataclass(frozen=True, slots=True)
class Torch:
    """The build of torch.

    Attributes:
        version: with its local suffix.
        build: what it is made for: ``"CPU"``, ``"CUDA 13.0"``, …
        num_threads: that compute.
        fault: of a small forward and backward on the CPU.
    """

    version: str
    build: str
    num_threads: int
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator, the one that training would take, or none.

    Attributes:
        name: as its maker calls it; ``None``: torch finds none.
        count: how many there are.
        total_bytes: its memory.
        free_bytes: of it.
        driver: version of the driver.
        unused: an accelerator that is in the machine though torch finds none.
        fault: of a small forward and backward on it.
        pins: whether host memory could be pinned for it; ``None``: not tried.
        pin_fault: of that.
    """

    name: str | None = None
    count: int = 0
    total_bytes: int | None = None
    free_bytes: int | None = None
    driver: str | None = None
    unused: str | None = None
    fault: str | None = None
    pins: bool | None = None
    pin_fault: str | None = None


@dataclass(frozen=True, slots=True)
class Processors:
    """The processors.

    Attributes:
        name: of the processor.
        num_cores: of the machine.
        cores: what of it this process may use.
        num_threads: that torch computes with.
    """

    name: str
    num_cores: int
    cores: Cores
    num_threads: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Host memory.

    Attributes:
        total_bytes: the machine's.
        available_bytes: what this process can have now, without swapping and within its cgroups.
        limit_bytes: the limit of its cgroups; ``None``: none.
        swap_total_bytes: size of swap.
        swap_used_bytes: of it.
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None = None
    swap_total_bytes: int = 0
    swap_used_bytes: int = 0


@dataclass(frozen=True, slots=True)
class HugePages:
    """Huge pages for the memory that is read and written directly.

    Attributes:
        setting: of ``transparent_hugepage/enabled``.
        populates: whether the kernel can make many pages present at once.
        share: of memory that was asked for in huge pages, the part that came in them.
    """

    setting: str | None
    populates: bool
    share: float | None


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of this process.

    Attributes:
        locked_bytes: memory that it may lock; ``None``: any.
        num_files: files that it may have open.
        max_files: to how many it may raise that itself.
        shm_bytes: size of /dev/shm; ``None``: there is none.
    """

    locked_bytes: int | None
    num_files: int
    max_files: int
    shm_bytes: int | None


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """What a moment of reading and writing has shown, in GB (1e9 bytes) per second."""

    read_gb_s: float
    write_gb_s: float


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory that was given for the NVMe tier.

    Attributes:
        facts: what is under the path, or under what of it there is.
        exists: whether anything is there.
        mount_point: of its file system.
        mount_options: of it.
        fault: why it cannot be used; all below is then ``None``.
        errno: of the fault.
        backend: how files are read and written here.
        direct: whether that bypasses the page cache.
        alignment: what the file system declares direct I/O to need, in bytes; 0: it has none.
        reasons: what was tried, and what became of it.
        free_bytes: room that this user may fill.
        total_bytes: of the file system.
        clones: whether files can share blocks.
        hard_links: whether a file can have two names.
        bandwidth: ``None`` where it was not measured.
    """

    facts: PathFacts
    exists: bool = True
    mount_point: str | None = None
    mount_options: str | None = None
    fault: str | None = None
    errno: int | None = None
    backend: str | None = None
    direct: bool | None = None
    alignment: int | None = None
    reasons: tuple[str, ...] = ()
    free_bytes: int | None = None
    total_bytes: int | None = None
    clones: bool | None = None
    hard_links: bool | None = None
    bandwidth: Bandwidth | None = None


@dataclass(frozen=True, slots=True)
class Ranks:
    """Whether ranks can talk to each other.

    Attributes:
        library: for collectives between devices of the kind that training would take; ``None``: none.
        device: that kind.
        seconds: how long two processes on the CPU took to meet and add; ``None``: not tried.
        fault: of that.
    """

    library: str | None
    device: str
    seconds: float | None = None
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Extras:
    """What some features need.

    Attributes:
        versions: of the optional packages, by name; ``None``: not installed.
        compiling: what ``compile`` lacks, and how to get it.
    """

    versions: Mapping[str, str | None]
    compiling: str | None


@dataclass(frozen=True, slots=True)
class Place:
    """Where all this runs: a machine, a virtual one, a container. Repairs depend on it."""

    host: Host

    @property
    def in_container(self) -> bool:
        """Whether limits are set by whoever starts the container."""
        return self.host.container is not None

    def on_host(self, command: str) -> str:
        """A command that works outside of containers only."""
        return f"{command}  # on the host" if self.in_container else command
