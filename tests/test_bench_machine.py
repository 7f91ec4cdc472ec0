"""What the machine is, what else went on in it, and which figures not to trust: from made-up /proc and /sys."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.bench.cautions import host_cautions, machine_cautions, path_cautions, result_cautions, run_cautions
from infinity.bench.host import Observation, observe
from infinity.bench.machine import machine_document, matmul_tflops
from infinity.bench.results import GB, Result, Run
from infinity.io.open import Choice
from infinity.machine.host import Host, host_facts
from infinity.machine.memory import available_memory_bytes
from infinity.machine.paths import PathFacts, parse_mounts, path_facts

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def lay_out(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Make a tree of small files."""

    def make(files: dict[str, str]) -> Path:
        root = tmp_path / "root"
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return root

    return make


# What is under a path.

MOUNTS = """\
21 1 259:1 / / rw,relatime - ext4 /dev/nvme0n1p1 rw,discard
22 21 259:2 / /mnt/fabric ro,noatime - xfs /dev/nvme1n1 rw
23 21 253:0 / /mnt/raid rw - xfs /dev/mapper/raid rw
24 21 0:40 / /mnt/a\\040b ro,noatime shared:1 master:2 - tmpfs none rw,size=1k
25 21 0:41 / /mnt/nfs rw - nfs4 host:/share rw,vers=4.2
26 21 259:1 / /mnt/nfs rw - ext4 /dev/nvme0n1p1 rw
no line of mounts
"""


@pytest.fixture
def facts_of(lay_out: Callable[[dict[str, str]], Path]) -> Callable[[str], PathFacts]:
    root = lay_out(
        {
            "mountinfo": MOUNTS,
            "devices/nvme0n1/queue/scheduler": "[none] mq-deadline kyber\n",
            "devices/nvme0n1/queue/write_cache": "write through\n",
            "devices/nvme0n1/queue/max_sectors_kb": "128\n",
            "devices/nvme0n1/queue/rotational": "0\n",
            "devices/nvme0n1/device/model": "Fast One  \n",
            "devices/nvme0n1/device/firmware_rev": "GDC7\n",
            "devices/nvme0n1/device/transport": "pcie\n",
            "devices/nvme0n1/device/numa_node": "1\n",
            "devices/nvme0n1/nvme0n1p1/partition": "1\n",
            "devices/nvme1n1/queue/scheduler": "none [mq-deadline]\n",
            "devices/nvme1n1/device/transport": "tcp\n",
            "devices/nvme1n1/device/numa_node": "-1\n",
            "devices/dm-0/queue/rotational": "0\n",
            "block/none": "",
        }
    )
    (root / "devices/dm-0/slaves").mkdir()
    for name in ("nvme0n1", "nvme1n1"):
        (root / "devices/dm-0/slaves" / name).symlink_to(root / "devices" / name)
    for number, target in {"259:1": "nvme0n1/nvme0n1p1", "259:2": "nvme1n1", "253:0": "dm-0"}.items():
        (root / "block" / number).symlink_to(root / "devices" / target)
    return lambda path: path_facts(Path(path), mountinfo=root / "mountinfo", block_devices=root / "block")


def test_the_drive_and_how_it_is_driven(facts_of: Callable[[str], PathFacts]) -> None:
    assert facts_of("/x") == PathFacts(
        "/x",
        "/dev/nvme0n1",
        "ext4",
        "rw,relatime,discard",
        rotational=False,
        model="Fast One",
        nvme=True,
        scheduler="none",
        transport="pcie",
        firmware="GDC7",
        write_cache="write through",
        largest_request_bytes=128 << 10,
        numa_node=1,
    )
    raid = facts_of("/mnt/raid/x")
    assert (raid.scheduler, raid.transport, raid.model) == ("mq-deadline, none", "pcie, tcp", "Fast One")
    assert raid.numa_node == 1
    fabric = facts_of("/mnt/fabric")
    assert (fabric.rotational, fabric.firmware, fabric.numa_node, fabric.largest_request_bytes) == (None,) * 4


def test_devices_that_a_container_hides_are_unknown(
    facts_of: Callable[[str], PathFacts], monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = os.stat

    def hidden(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if "/block/" in str(path):
            raise PermissionError(13, "Permission denied")
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", hidden)
    monkeypatch.setattr(os, "access", lambda path, _: "/block/" not in str(path))
    assert facts_of("/x") == PathFacts("/x", "/dev/nvme0n1p1", "ext4", "rw,relatime,discard")


def test_mounts_are_found_as_the_kernel_writes_them(facts_of: Callable[[str], PathFacts], tmp_path: Path) -> None:
    assert facts_of("/mnt/a b/c") == PathFacts("/mnt/a b/c", "none", "tmpfs", "ro,noatime,rw,size=1k")
    assert facts_of("/mnt/nfs").device == "/dev/nvme0n1"  # the mount on top of another hides it
    missing = tmp_path / "missing"
    assert path_facts(tmp_path, mountinfo=missing, block_devices=missing) == PathFacts(str(tmp_path))
    assert list(parse_mounts("")) == []


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (PathFacts("/p", "none", "tmpfs"), "is memory, not a disk"),
        (PathFacts("/p", "/dev/zram0", "ext4", rotational=False, nvme=False), "is memory, not a disk"),
        (PathFacts("/p", "overlay", "overlay"), "container's layered"),
        (PathFacts("/p", "host:/share", "nfs4"), "network or shared"),
        (PathFacts("/p", "bucket", "fuse.s3fs"), "network or shared"),
        (PathFacts("/p", "/dev/vda", "ext4", rotational=True, nvme=False), "virtual disk"),
        (PathFacts("/p", "/dev/sda", "ext4", rotational=True, nvme=False), "rotating"),
        (PathFacts("/p", "/dev/sdb", "ext4", rotational=False, nvme=False), "not NVMe"),
        (PathFacts("/p", "pool/set", "zfs"), "does not say what device"),
        (PathFacts("/p"), "does not say which file system"),
    ],
)
def test_what_is_not_nvme_is_said(facts: PathFacts, words: str) -> None:
    [caution] = path_cautions([facts])
    assert caution.startswith("/p: ")
    assert words in caution
    assert facts.describe() in caution


def test_two_directories_on_one_device_gain_nothing() -> None:
    apart = [PathFacts(f"/p{i}", f"/dev/nvme{i}n1", "xfs", rotational=False, nvme=True) for i in range(2)]
    assert list(path_cautions(apart)) == []
    together = [PathFacts(f"/p{i}", "/dev/nvme0n1", "xfs", rotational=False, nvme=True) for i in range(2)]
    [caution] = path_cautions(together)
    assert "/p0 and /p1 are on one device, /dev/nvme0n1" in caution


def test_a_caution_names_what_is_there_and_what_to_do(facts_of: Callable[[str], PathFacts]) -> None:
    assert list(path_cautions([facts_of("/x")])) == []
    there = "(xfs on /dev/nvme1n1, scheduler mq-deadline, attached by tcp, mounted ro,noatime,rw)"
    elsewhere = "give a directory on local NVMe"
    assert list(path_cautions([facts_of("/mnt/fabric")])) == [
        f"/mnt/fabric: it is mounted read-only {there}: remount it for writing, or give another directory",
        f"/mnt/fabric: /dev/nvme1n1 is NVMe over a network (tcp): others may slow it {there}; {elsewhere}",
    ]
    disk = PathFacts("/p", "/dev/sdb", "ext4", "rw", rotational=True, model="Slow", nvme=False, scheduler="bfq")
    assert list(path_cautions([disk])) == [
        (
            "/p: /dev/sdb is a rotating disk, or says so: expect far less than of NVMe (ext4 on /dev/sdb, model Slow, "
            "scheduler bfq, mounted rw); give a directory on local NVMe"
        )
    ]


# What the host is.


def test_the_memory_of_a_container_is_its_cgroups(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("4:memory:/job\n0::/job\n")
    for group, files in {
        "job": {"memory.max": "1000000", "memory.current": "700000", "memory.stat": "anon 1\ninactive_file 200000\n"},
        "memory/job": {"memory.limit_in_bytes": "900000", "memory.usage_in_bytes": "100000"},
        ".": {"memory.max": "max", "memory.current": "5"},
    }.items():
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / group / name).write_text(text)
    assert available_memory_bytes(own_cgroup=own, cgroups=tmp_path) == 500_000
    (tmp_path / "job/memory.max").write_text("10")
    assert available_memory_bytes(own_cgroup=own, cgroups=tmp_path) == 0
    missing = tmp_path / "missing"
    assert available_memory_bytes(own_cgroup=missing, cgroups=missing) > 0


def test_a_busy_or_full_machine_is_cautioned_of() -> None:
    assert list(machine_cautions(0.9, 2, 8 * GIB)) == []
    assert ["busy" in caution for caution in machine_cautions(1.1, 2, 8 * GIB)] == [True]
    assert ["little host memory" in caution for caution in machine_cautions(0.0, 2, GIB)] == [True]


def test_a_host_says_what_it_is(lay_out: Callable[[dict[str, str]], Path]) -> None:
    root = lay_out(
        {
            "proc/meminfo": "MemTotal: 9 kB\nSwapTotal: 3000 kB\nSwapFree: 1000 kB\nHugePages_Total: 7\n"
            "HugePages_Free: 5\nHugepagesize: 2048 kB\n",
            "proc/cpuinfo": "model name : X\nflags\t\t: fpu hypervisor sse\n",
            "proc/sys/kernel/io_uring_disabled": "2\n",
            "proc/1/cgroup": "0::/kubepods/x\n",
            "sys/class/dmi/id/sys_vendor": "QEMU\n",
            "sys/class/dmi/id/product_name": "Standard PC\n",
            "sys/devices/system/node/node0/x": "",
            "sys/devices/system/node/node1/x": "",
            "sys/devices/system/node/possible": "0-1",
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
            "sys/devices/system/cpu/cpu11/cpufreq/scaling_governor": "performance\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            "sys/class/power_supply/AC/type": "Mains\n",
            "sys/class/power_supply/AC/online": "0\n",
            "sys/class/power_supply/BAT0/type": "Battery\n",
        }
    )
    host = host_facts(root)
    assert (host.virtualization, host.container, host.numa_nodes) == ("QEMU Standard PC", "kubepods", 2)
    assert (host.governors, host.on_battery, host.io_uring) == (("performance", "powersave"), True, "refused")
    assert (host.huge_page_bytes, host.huge_pages_total, host.huge_pages_free) == (2 * MIB, 7, 5)
    assert (host.transparent_huge_pages, host.swap_used_bytes) == ("madvise", 2000 << 10)
    (root / ".dockerenv").touch()
    (root / "sys/class/power_supply/AC/online").write_text("1\n")
    assert (host_facts(root).container, host_facts(root).on_battery) == ("docker", False)


def test_a_host_that_says_nothing_is_no_error(tmp_path: Path) -> None:
    host = host_facts(tmp_path / "missing")
    assert host == Host(locked_memory_bytes=host.locked_memory_bytes)
    assert list(host_cautions(host)) == []
    before, after = (observe(["nvme0n1"], tmp_path / "missing") for _ in range(2))
    assert (before.device_bytes, before.own_io_bytes) == ({}, None)
    assert list(run_cautions(before, after)) == []


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (Host(swap_used_bytes=GIB), ["swap is in use", "swapoff"]),
        (Host(governors=("powersave",)), ["powersave", "cpupower frequency-set -g performance"]),
        (Host(on_battery=True), ["battery", "mains"]),
    ],
)
def test_how_a_host_is_set_up_is_cautioned_of(host: Host, words: list[str]) -> None:
    [caution] = host_cautions(host)
    assert all(word in caution for word in words)


def test_the_document_holds_all_of_it(tmp_path: Path) -> None:
    facts = PathFacts(str(tmp_path), scheduler="none", numa_node=0)
    document = machine_document([facts], [Choice("threads", True, ("it works",))], "cpu")
    [path] = document["paths"]
    assert (path["scheduler"], path["numa_node"], path["backend"], path["reasons"]) == (
        "none",
        0,
        "threads",
        ["it works"],
    )
    assert (document["cores"], document["device"]) == (os.cpu_count(), "cpu")
    assert document.keys() >= {"io_uring", "huge_pages_free", "governors", "numa_nodes", "virtualization", "container"}


def test_matrices_are_multiplied_at_some_rate() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert 1e-6 < matmul_tflops(torch.device("cpu"), dtype, seconds=0.01) < 1e4


# What else went on.


def test_counters_are_read(lay_out: Callable[[dict[str, str]], Path]) -> None:
    tick = os.sysconf("SC_CLK_TCK")
    root = lay_out(
        {
            "proc/stat": f"cpu  {3 * tick} {tick} {2 * tick} 100 100 {tick} {tick} {5 * tick} 0 0\ncpu0 1 2 3\n",
            "proc/vmstat": "pswpin 2\npswpout 3\n",
            "proc/self/io": "rchar: 9\nread_bytes: 1000\nwrite_bytes: 500\ncancelled_write_bytes: 7\n",
            "proc/diskstats": " 259 0 nvme0n1 1 2 4 8 16 32 8 1 0 0 0\n 259 1 nvme0n1p1 1 2 9 9 9 9 9 9 0 0\n 8 0 x\n",
            "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "3\n",
            "sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count": "4\n",
            "sys/class/block/nvme0n1/device/hwmon1/temp1_input": "70000\n",
            "sys/class/block/nvme0n1/device/hwmon1/temp1_max": "70000\n",
        }
    )
    seen = observe(["/dev/nvme0n1", "none"], root)
    assert (seen.busy_cpu_seconds, seen.stolen_cpu_seconds) == (8.0, 5.0)
    assert (seen.device_bytes, seen.own_io_bytes) == ({"nvme0n1": 12 * 512}, 1500)
    assert (seen.swapped_bytes, seen.num_throttles, seen.hot) == (5 * os.sysconf("SC_PAGE_SIZE"), 7, ("nvme0n1",))
    assert seen.own_cpu_seconds > 0


def seen(seconds: float = 0.0, **changes: Any) -> Observation:
    figures: dict[str, Any] = {"num_cores": 2, "device_bytes": {"nvme0n1": 0}, "own_io_bytes": 0}
    return Observation(seconds=seconds, **(figures | changes))


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (seen(10.0, busy_cpu_seconds=7.0, own_cpu_seconds=4.0), ["others used 15% of the processors"]),
        (seen(10.0, stolen_cpu_seconds=1.0), ["hypervisor gave 5%"]),
        (seen(10.0, device_bytes={"nvme0n1": 10 * GIB}, own_io_bytes=8 * GIB), ["others moved 2.1 GB on /dev/nvme0n1"]),
        (seen(10.0, swapped_bytes=5 * MIB), ["swapped 5.2 MB", "smaller --size"]),
        (seen(10.0, num_throttles=1), ["slowed down to cool"]),
        (seen(10.0, hot=("nvme0n1",)), ["/dev/nvme0n1 is as hot"]),
    ],
)
def test_what_else_went_on_is_cautioned_of(after: Observation, words: list[str]) -> None:
    [caution] = run_cautions(seen(), after)
    assert all(word in caution for word in words)


@pytest.mark.parametrize(
    "after",
    [
        seen(10.0, busy_cpu_seconds=19.0, own_cpu_seconds=18.0),
        seen(10.0, device_bytes={"nvme0n1": 100 * GIB}, own_io_bytes=95 * GIB),
        seen(10.0, device_bytes={"nvme0n1": 200 * MIB}, own_io_bytes=0),
        seen(10.0, device_bytes={"nvme0n1": GIB}, own_io_bytes=None),
        seen(0.0),
    ],
)
def test_what_a_quiet_machine_does_is_not(after: Observation) -> None:
    assert list(run_cautions(seen(), after)) == []


def test_real_counters_know_our_own_work() -> None:
    """A busy loop of our own is nobody else's."""
    before = observe([])
    while observe([]).own_cpu_seconds - before.own_cpu_seconds < 0.05:
        sum(range(10000))
    after = observe([])
    assert after.seconds > before.seconds
    assert after.busy_cpu_seconds >= before.busy_cpu_seconds > 0


# What the figures say.

NVME = [PathFacts("/p", "/dev/nvme0n1", "xfs", nvme=True)]
VIRTUAL = [PathFacts("/p", "/dev/vda", "ext4", nvme=False)]


def result(route: str, *gb_s: float, num_bytes: int = 4 * GIB, **changes: Any) -> Result:
    runs = [Run(num_bytes=num_bytes, seconds=num_bytes / GB / rate, cpu_seconds=0.0) for rate in gb_s]
    return Result(route, "threads", 4 * MIB, 8, GIB, runs, **changes)


def cautions(results: Sequence[Result], facts: Sequence[PathFacts] = NVME) -> Iterator[str]:
    return result_cautions(results, facts)


def test_a_drive_in_order_gets_no_caution() -> None:
    steady = [
        result("nvme->host", 6.0, 6.5, 6.2, 6.4),
        result("host->nvme", 4.0, 4.4, 3.9, 3.6),
        result("nvme<->host", 7.0, 7.1, 3.0),
        result("memcpy", 14.0),
    ]
    assert list(cautions(steady)) == []
    assert list(cautions([])) == []
    assert list(cautions([result("host->nvme", 3.0)])) == []


def test_writes_much_faster_than_reads_end_in_a_cache() -> None:
    results = [result("nvme->host", 2.0, 2.1, 1.9), result("host->nvme", 5.0, 4.8, 5.2)]
    [caution] = cautions(results)
    assert "writes (5.0 GB/s) are much faster than reads (2.0 GB/s)" in caution
    assert "the drive's own cache" in caution
    assert "--size larger" in caution
    [caution] = cautions(results, VIRTUAL)
    assert "the host's memory behind the virtual disk" in caution
    assert list(cautions(results, [PathFacts("/p", "none", "tmpfs")])) == []


def test_a_write_rate_that_falls_is_a_cache_that_filled() -> None:
    [caution] = cautions([result("nvme->host", 7.0), result("host->nvme", 6.0, 5.5, 5.6, 4.0, 4.1)])
    assert "fell from 6.0 to 4.1 GB/s" in caution
    one_slow_repeat = result("host->nvme", 6.0, 5.5, 5.6, 4.0, 5.6)
    assert list(cautions([result("nvme->host", 7.0), one_slow_repeat])) == []


def test_little_written_may_never_have_reached_the_flash() -> None:
    little = result("host->nvme", 3.0, 3.1, num_bytes=GIB // 2)
    [caution] = cautions([result("nvme->host", 7.0), little])
    assert "only 1.1 GB were written in all" in caution
    assert list(cautions([result("nvme->host", 7.0), little, result("host->nvme", 2.0)])) == []


def test_reads_as_fast_as_memory_come_from_memory() -> None:
    memory = [result("memcpy", 20.0), result("checksum", 30.0)]
    [caution] = cautions([result("nvme->host", 19.0), *memory])
    assert "about as fast as copies in memory" in caution
    assert list(cautions([result("nvme->host", 19.0), *memory], NVME * 2)) == []  # two drives may
    assert list(cautions([result("nvme->host", 17.0), *memory])) == []
    assert list(cautions([result("nvme->host", 7.0), result("memcpy", 5.0)])) == []  # slow memory is no fast drive
    assert list(cautions([result("nvme->host", 19.0)])) == []


def test_repeats_that_differ_much_are_said() -> None:
    [caution] = cautions([result("nvme->host", 2.0, 6.0, 5.0), result("nvme->host", 1.0, 4.0, 1.0)])
    assert "nvme->host is uneven: from 2.00 to 6.00 GB/s in 3 repeats" in caution


def test_peers_and_single_directories_are_no_evidence() -> None:
    ours = [result("nvme->host", 6.0), result("host->nvme", 5.0)]
    others = [result("host->nvme", 50.0, reference=True), result("host->nvme", 50.0, path="/p")]
    assert list(cautions([*ours, *others])) == []
