"""What a reader of the figures should know: why they may be worse, or look better, than the machine is; what to do.

Pure functions of facts and figures. A caution that is always there is not read, so each has a threshold above what a
machine in order shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from infinity.bench.host import Observation
from infinity.bench.results import GB, Result, best_results
from infinity.console.formats import format_bytes
from infinity.machine.host import Host
from infinity.machine.paths import IN_MEMORY, VIRTUAL_DEVICES, PathFacts, not_nvme

_BUSY_LOAD_PER_CORE = 0.5
_LITTLE_MEMORY_BYTES = 2 << 30
_LITTLE_SWAP_BYTES = 256 << 20
_SLOW_GOVERNORS = frozenset({"powersave", "conservative"})

_READ, _WRITE = "nvme->host", "host->nvme"
_MEMORY_ROUTES = ("memcpy", "host->device", "device->host", "checksum")
_WRITES_OVER_READS = 1.25
"""Flash reads at least as fast as it writes; what is written this much faster has not reached it."""

_FALLEN = 0.75
"""Of the rate of the first half: no more in all of the second is a cache that filled."""

_UNEVEN = 1.6
"""Fastest over slowest repeat, of a route's best result."""

_LIKE_MEMORY = 0.6
"""Of the fastest route within memory."""

_FASTEST_DRIVE_GB_S = 16.0
"""What four lanes of PCIe 5 carry."""

_DRIVE_CACHE_BYTES = 2 << 30
"""Memory that a large drive has for writes on their way to flash."""

_OTHERS_CPU = 0.1
_STOLEN_CPU = 0.03
_OTHERS_IO = 0.1
_OTHERS_IO_BYTES = 256 << 20
_SWAPPED_BYTES = 1 << 20


def machine_cautions(load: float, num_cores: int, available_bytes: int) -> Iterator[str]:
    """About the machine.

    Args:
        load: runnable and waiting tasks, averaged over a minute, before the benchmark adds its own.
        num_cores: processors.
        available_bytes: host memory that is free.
    """
    if load > _BUSY_LOAD_PER_CORE * num_cores:
        yield (
            f"the machine is busy: load average {load:.2f} on {num_cores} cores; figures may be low and uneven; "
            "end what else runs, and measure again"
        )
    if available_bytes < _LITTLE_MEMORY_BYTES:
        yield (
            f"little host memory is free: {format_bytes(available_bytes)}; it bounds what can be measured; "
            "end what holds it, or raise the container's limit"
        )


def host_cautions(host: Host) -> Iterator[str]:
    """About how the machine is set up.

    Args:
        host: what the system says of itself.
    """
    if host.swap_used_bytes > _LITTLE_SWAP_BYTES:
        yield (
            f"swap is in use ({format_bytes(host.swap_used_bytes)}): memory has been short; end what holds it, then "
            "swapoff -a and swapon -a as root"
        )
    if slow := sorted(_SLOW_GOVERNORS.intersection(host.governors)):
        yield (
            f"the processors' clock is governed by {', '.join(slow)}, which saves power: CPU cost and copies may look "
            "worse than they are; as root: cpupower frequency-set -g performance"
        )
    if host.on_battery:
        yield "the machine runs on battery: processors and drives may be slowed down; connect it to mains"


def run_cautions(before: Observation, after: Observation) -> Iterator[str]:
    """About what else went on while the benchmark ran.

    Args:
        before: the counters at its begin.
        after: the counters at its end.
    """
    cpu_seconds = max(after.seconds - before.seconds, 1e-9) * after.num_cores
    own = after.own_cpu_seconds - before.own_cpu_seconds
    others = (after.busy_cpu_seconds - before.busy_cpu_seconds - own) / cpu_seconds
    stolen = (after.stolen_cpu_seconds - before.stolen_cpu_seconds) / cpu_seconds
    if others > _OTHERS_CPU:
        yield (
            f"others used {others:.0%} of the processors meanwhile: figures may be low and uneven; end what else "
            "runs, and measure again"
        )
    if stolen > _STOLEN_CPU:
        yield (
            f"the hypervisor gave {stolen:.0%} of the processors to other machines meanwhile: figures may be low and "
            "uneven; measure at another time, or on dedicated cores"
        )
    yield from _others_io(before, after)
    if (swapped := after.swapped_bytes - before.swapped_bytes) > _SWAPPED_BYTES:
        yield f"the machine swapped {format_bytes(swapped)} meanwhile: memory was short; give a smaller --size"
    if after.num_throttles > before.num_throttles:
        yield "a processor was slowed down to cool meanwhile: figures may be low; see to its cooling"
    for name in after.hot:
        yield f"/dev/{name} is as hot as its maker allows, and may slow down: see to its cooling, and measure again"


def result_cautions(results: Sequence[Result], facts: Sequence[PathFacts]) -> Iterator[str]:
    """About the figures themselves: what in them is likely a cache, or chance.

    Args:
        results: all of them.
        facts: of the directories.
    """
    ours = [result for result in results if not result.reference and result.path is None and result.runs]
    best = best_results(ours)
    if all(fact.filesystem in IN_MEMORY for fact in facts):
        return  # it is memory, which another caution says
    cache = "the host's memory behind the virtual disk" if _is_virtual(facts) else "the drive's own cache"
    yield from _cached_writes(best, ours, cache)
    memory = max((best[route].median_gb_s for route in _MEMORY_ROUTES if route in best), default=float("inf"))
    if _READ in best and best[_READ].median_gb_s > max(_LIKE_MEMORY * memory, _FASTEST_DRIVE_GB_S * len(facts)):
        source = "the memory of the host behind the virtual disk" if _is_virtual(facts) else "a cache in memory"
        yield (
            f"reads at {best[_READ].median_gb_s:.1f} GB/s are about as fast as copies in memory: they likely come from "
            f"{source}; measure with a --size several times larger than that memory"
        )
    for route in (_READ, _WRITE):
        if route in best and len(best[route].runs) > 2 and max(best[route].gb_s) > _UNEVEN * min(best[route].gb_s):
            yield (
                f"{route} is uneven: from {min(best[route].gb_s):.2f} to {max(best[route].gb_s):.2f} GB/s in "
                f"{len(best[route].runs)} repeats at one setting; see that nothing else uses the device, and give a "
                "longer --time"
            )


def path_cautions(facts: Sequence[PathFacts]) -> Iterator[str]:
    """About the directories that were given."""
    for fact in facts:
        yield from (f"{fact.path}: {caution}" for caution in _cautions(fact))
    seen: dict[str, str] = {}
    for fact in facts:
        first = seen.setdefault(fact.device or fact.path, fact.path)
        if first != fact.path:
            yield f"{first} and {fact.path} are on one device, {fact.device}: striping over them gains nothing"


def _cached_writes(best: dict[str, Result], ours: Sequence[Result], cache: str) -> Iterator[str]:
    if _WRITE not in best:
        return
    write = best[_WRITE]
    expected = f"expect less than {write.gb_s[-1]:.1f} GB/s"
    advice = f"a --size larger than that cache, or a longer --time, shows what lasts; {expected}"
    if _READ in best and write.median_gb_s > _WRITES_OVER_READS * best[_READ].median_gb_s:
        yield (
            f"writes ({write.median_gb_s:.1f} GB/s) are much faster than reads ({best[_READ].median_gb_s:.1f} GB/s): "
            f"they likely end in {cache}; {advice}"
        )
        return
    half = len(write.gb_s) // 2
    if len(write.gb_s) > 2 and max(write.gb_s[-half:]) < _FALLEN * min(write.gb_s[:half]):
        yield (
            f"the write rate fell from {write.gb_s[0]:.1f} to {write.gb_s[-1]:.1f} GB/s in the course of the run: "
            f"{cache} has likely filled; {advice}"
        )
        return
    written = sum(run.num_bytes for result in ours if result.route == _WRITE for run in result.runs)
    if written < _DRIVE_CACHE_BYTES:
        yield (
            f"only {written / GB:.1f} GB were written in all, which fits into {cache}: the write rate is likely that "
            f"cache's; {advice}"
        )


def _others_io(before: Observation, after: Observation) -> Iterator[str]:
    """What moved on our devices beyond what we moved; it can only be told for all of them together."""
    if before.own_io_bytes is None or after.own_io_bytes is None or not before.device_bytes or not after.device_bytes:
        return
    moved = sum(after.device_bytes[name] - num_bytes for name, num_bytes in before.device_bytes.items())
    others = moved - (after.own_io_bytes - before.own_io_bytes)
    if others > max(_OTHERS_IO_BYTES, _OTHERS_IO * moved):
        names = ", ".join(f"/dev/{name}" for name in sorted(before.device_bytes))
        yield (
            f"others moved {format_bytes(others)} on {names} meanwhile, of {format_bytes(moved)} in all: figures "
            "may be low and uneven; end what else uses it, and measure again"
        )


def _is_virtual(facts: Sequence[PathFacts]) -> bool:
    return any((fact.device or "").startswith(VIRTUAL_DEVICES) for fact in facts)


def _cautions(fact: PathFacts) -> Iterator[str]:
    """At most one about what the path is on; and whether it can be written."""
    if "ro" in (fact.options or "").split(",") and fact.filesystem not in IN_MEMORY:
        yield f"it is mounted read-only ({fact.describe()}): remount it for writing, or give another directory"
    what, repair = not_nvme(fact)
    if what:
        yield f"{what} ({fact.describe()}); {repair}"
