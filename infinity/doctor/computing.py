"""Judges what computes: accelerator, processors, memory."""

from __future__ import annotations

from collections.abc import Iterator

from infinity.console.formats import format_bytes
from infinity.doctor.facts import Accelerator, HugePages, Memory, Place, Processors
from infinity.doctor.findings import Finding, good

_LITTLE_MEMORY_BYTES = 2 << 30
_LITTLE_SWAP_BYTES = 256 << 20
_LITTLE_FREE = 0.5
_ENOUGH_HUGE = 0.9
_SLOW_GOVERNORS = frozenset({"powersave", "conservative"})
_INDEX = "https://download.pytorch.org/whl/"


def judge_accelerator(accelerator: Accelerator, place: Place) -> Iterator[Finding]:
    """About the accelerator."""
    if accelerator.name is None:
        yield _no_accelerator(accelerator, place)
        return
    parts = [f"{accelerator.count} x {accelerator.name}"]
    if accelerator.total_bytes is not None:
        free = accelerator.free_bytes
        parts.append(
            f"{format_bytes(accelerator.total_bytes)}" + ("" if free is None else f", {format_bytes(free)} free")
        )
    parts += [f"driver {accelerator.driver}"] if accelerator.driver else []
    text = ", ".join(parts)
    if accelerator.fault is not None:
        yield Finding(
            "accelerator",
            "missing",
            text,
            f"a small model does not train on it: {accelerator.fault}",
            (
                f"pip install --force-reinstall torch --index-url {_INDEX}cu130  # the build for your driver",
                "infinity train --device cpu",
            ),
            essential=True,
        )
    elif (free := accelerator.free_bytes) is not None and free < _LITTLE_FREE * (accelerator.total_bytes or 0):
        yield Finding("accelerator", "slow", text, "others hold most of its memory", ("nvidia-smi  # who they are",))
    else:
        yield good("accelerator", text)
    if accelerator.pin_fault is not None:
        yield Finding(
            "pinned memory",
            "missing",
            accelerator.pin_fault,
            "copies to the accelerator need it",
            memlock_repairs(place),
            essential=True,
        )
    elif accelerator.pins:
        yield good("pinned memory", "host memory can be pinned")


def _no_accelerator(accelerator: Accelerator, place: Place) -> Finding:
    if accelerator.unused is None:
        return Finding("accelerator", "missing", "none in this machine", "training runs on the CPU")
    repairs = [f"pip install torch --index-url {_INDEX}cu130  # or the build for your accelerator"]
    if place.in_container:
        repairs.insert(0, "docker run --gpus all")
    why = "torch finds none: its build is for the CPU, the driver is missing, or the container was not given it"
    return Finding("accelerator", "missing", accelerator.unused, why, repairs)


def judge_processors(processors: Processors, place: Place) -> Iterator[Finding]:
    """About the processors and how they are used."""
    cores, host = processors.cores, place.host
    parts = [f"{processors.name}: {processors.num_cores} cores, {cores.num_allowed} by affinity"]
    parts.append("no cgroup quota" if cores.quota is None else f"cgroup quota {cores.quota:g}")
    if host.numa_nodes is not None and host.numa_nodes > 1:
        parts.append(f"{host.numa_nodes} memory nodes")
    text = ", ".join(parts)
    excess = cores.excess(processors.num_threads)
    if excess is not None:
        why = f"torch computes with {processors.num_threads} threads: they hold each other up"
        yield Finding("cores", "slow", text, why, (f"export OMP_NUM_THREADS={cores.num_usable}",))
    else:
        yield good("cores", text)
    slow = sorted(_SLOW_GOVERNORS.intersection(host.governors))
    if slow:
        why = "the clock is governed to save power"
        yield Finding("clock", "slow", ", ".join(slow), why, (place.on_host("cpupower frequency-set -g performance"),))
    elif host.governors:
        yield good("clock", f"governor {', '.join(host.governors)}")
    if host.on_battery:
        yield Finding(
            "power", "slow", "battery", "processors and drives may be slowed down", ("# connect it to mains",)
        )


def judge_memory(memory: Memory, place: Place) -> Iterator[Finding]:
    """About host memory."""
    text = f"{format_bytes(memory.total_bytes)}, {format_bytes(memory.available_bytes)} available"
    text += ", no cgroup limit" if memory.limit_bytes is None else f", cgroup limit {format_bytes(memory.limit_bytes)}"
    if memory.available_bytes < _LITTLE_MEMORY_BYTES:
        repairs = ["ps -eo rss,pid,cmd --sort=-rss | head  # who holds it"]
        if memory.limit_bytes is not None:
            repairs.insert(
                0, "docker run --memory 16g" if place.in_container else "systemctl set-property UNIT MemoryMax=16G"
            )
        yield Finding("RAM", "slow", text, "little is left for the ram budget", repairs)
    else:
        yield good("RAM", text)
    swap = (
        "none"
        if not memory.swap_total_bytes
        else (f"{format_bytes(memory.swap_used_bytes)} of {format_bytes(memory.swap_total_bytes)} used")
    )
    if memory.swap_used_bytes > _LITTLE_SWAP_BYTES:
        why = "memory has been short; what training swaps costs more than what infinity moves"
        yield Finding("swap", "slow", swap, why, (place.on_host("swapoff -a && swapon -a  # once memory is free"),))
    else:
        yield good("swap", swap)


def judge_huge_pages(pages: HugePages, place: Place) -> Iterator[Finding]:
    """About huge pages."""
    setting = "unknown" if pages.setting is None else pages.setting
    share = "" if pages.share is None else f", {pages.share:.0%} of what was asked for came in them"
    text = f"transparent huge pages: {setting}{share}"
    why = "direct I/O with small pages costs up to half of the bandwidth, and several times the CPU"
    if pages.setting not in ("always", "madvise"):
        command = place.on_host("echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")
        repair = "# boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE" if pages.setting is None else command
        yield Finding("huge pages", "slow", text, why, (repair,))
    elif pages.share is not None and pages.share < _ENOUGH_HUGE:
        yield Finding("huge pages", "slow", text, why, (place.on_host("echo 1 > /proc/sys/vm/compact_memory"),))
    else:
        yield good("huge pages", text)
    if pages.populates:
        yield good("MADV_POPULATE", "buffers are filled with pages at once")
    else:
        why = "the kernel is older than 5.14: buffers are touched page by page, once, at start"
        yield Finding("MADV_POPULATE", "slow", "not in this kernel", why, ("# boot a newer kernel",))


def memlock_repairs(place: Place) -> tuple[str, ...]:
    """How the limit of locked memory is raised."""
    shell = ("ulimit -l unlimited", "echo '* - memlock unlimited' >> /etc/security/limits.conf  # then log in again")
    return ("docker run --ulimit memlock=-1",) if place.in_container else shell
