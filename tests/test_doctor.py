"""What doctor makes of facts, each changed alone in a machine in order; and one real machine: this one."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import infinity.doctor.cli as cli
import infinity.doctor.directory as directory_module
import infinity.doctor.view as view_module
from fakes_doctor import (
    ACCELERATOR,
    CONTAINER,
    DIRECTORY,
    EXTRAS,
    GB,
    LIMITS,
    MEMORY,
    PAGES,
    PLACE,
    PROCESSORS,
    RANKS,
    SOFTWARE,
    TORCH,
    FakeView,
    under,
)
from fakes_io import HookedSyscalls, Operation, fail, ring_refusal
from infinity.__main__ import main
from infinity.doctor.directory import look_at, measure
from infinity.doctor.examine import Section, examine
from infinity.doctor.facts import Accelerator, Bandwidth, Directory, Ranks
from infinity.doctor.findings import Finding
from infinity.doctor.meeting import meet_here
from infinity.doctor.page import as_document, can_train, show_section, show_verdict
from infinity.doctor.view import OPTIONAL, View
from infinity.errors import StorageError
from infinity.io.cores import Cores
from infinity.io.ring import explain_refusal
from infinity.io.threads import ThreadBackend
from infinity.machine.host import Host
from infinity.machine.memory import memory_limit_bytes
from infinity.machine.paths import PathFacts


def findings_of(view: FakeView, *paths: str) -> list[Finding]:
    return [finding for section in examine(view, [Path(path) for path in paths]) for finding in section.findings]


def faults_of(view: FakeView, *paths: str) -> list[Finding]:
    return [finding for finding in findings_of(view, *paths) if finding.state != "good"]


def left_in(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


def test_a_machine_in_order_has_nothing_to_mend() -> None:
    view = FakeView(directories={"/data": DIRECTORY})
    assert faults_of(view, "/data") == []
    assert can_train(list(examine(view, [Path("/data")])))
    names = [finding.name for finding in findings_of(view, "/data")]
    assert {"Python", "torch", "accelerator", "cores", "RAM", "memlock", "io_uring", "direct I/O", "two ranks"} <= {
        *names
    }
    assert len({*names}) == len(names)


# Of the machine: what changes, what is found, and a repair that is among those given.

NO_GPU = Accelerator()
UNUSED = Accelerator(unused="an NVIDIA accelerator (PCI 0000:01:00.0)")
URING_OFF = "sysctl kernel.io_uring_disabled=0"


@pytest.mark.parametrize(
    ("facts", "name", "state", "repair"),
    [
        (
            {"software": replace(SOFTWARE, python=(3, 9, 2))},
            "Python",
            "missing and essential",
            "python3.12 -m venv venv",
        ),
        ({"software": replace(SOFTWARE, system="Darwin 25")}, "system", "missing and essential", "docker build"),
        ({"software": replace(SOFTWARE, architecture="i686")}, "system", "missing and essential", "docker build"),
        ({"torch": replace(TORCH, version="2.5.1")}, "torch", "missing and essential", "pip install 'torch>=2.6'"),
        ({"torch": replace(TORCH, fault="illegal instruction")}, "torch", "missing and essential", "pip install"),
        ({"accelerator": NO_GPU}, "accelerator", "missing", None),
        ({"accelerator": UNUSED}, "accelerator", "missing", "pip install torch --index-url"),
        ({"accelerator": UNUSED, "place": CONTAINER}, "accelerator", "missing", "docker run --gpus all"),
        (
            {"accelerator": replace(ACCELERATOR, fault="no kernel image")},
            "accelerator",
            "missing and essential",
            "--device cpu",
        ),
        ({"accelerator": replace(ACCELERATOR, free_bytes=GB)}, "accelerator", "slow", "nvidia-smi"),
        (
            {"accelerator": replace(ACCELERATOR, pins=False, pin_fault="out of memory")},
            "pinned memory",
            "missing and essential",
            "ulimit -l unlimited",
        ),
        ({"processors": replace(PROCESSORS, cores=Cores(64, 1.5))}, "cores", "slow", "export OMP_NUM_THREADS=2"),
        ({"processors": replace(PROCESSORS, cores=Cores(4))}, "cores", "slow", "export OMP_NUM_THREADS=4"),
        (
            {"place": replace(PLACE, host=Host(governors=("powersave",)))},
            "clock",
            "slow",
            "cpupower frequency-set -g performance",
        ),
        ({"place": replace(PLACE, host=Host(on_battery=True))}, "power", "slow", "# connect it"),
        ({"memory": replace(MEMORY, available_bytes=GB)}, "RAM", "slow", "ps -eo"),
        ({"memory": replace(MEMORY, available_bytes=GB, limit_bytes=2 * GB)}, "RAM", "slow", "systemctl set-property"),
        (
            {"memory": replace(MEMORY, available_bytes=GB, limit_bytes=2 * GB), "place": CONTAINER},
            "RAM",
            "slow",
            "docker run --memory",
        ),
        ({"memory": replace(MEMORY, swap_total_bytes=8 * GB, swap_used_bytes=GB)}, "swap", "slow", "swapoff -a"),
        (
            {"pages": replace(PAGES, setting="never", share=0.0)},
            "huge pages",
            "slow",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        ({"pages": replace(PAGES, setting=None)}, "huge pages", "slow", "# boot a kernel"),
        ({"pages": replace(PAGES, share=0.5)}, "huge pages", "slow", "compact_memory"),
        ({"pages": replace(PAGES, populates=False)}, "MADV_POPULATE", "slow", "newer kernel"),
        ({"limits": replace(LIMITS, locked_bytes=65536)}, "memlock", "slow", "ulimit -l unlimited"),
        (
            {"limits": replace(LIMITS, locked_bytes=65536), "place": CONTAINER},
            "memlock",
            "slow",
            "docker run --ulimit memlock=-1",
        ),
        ({"limits": replace(LIMITS, num_files=1024)}, "open files", "slow", "ulimit -n 65536"),
        ({"limits": replace(LIMITS, num_files=256, max_files=512)}, "open files", "slow", "limits.conf"),
        (
            {"limits": replace(LIMITS, num_files=256, max_files=512), "place": CONTAINER},
            "open files",
            "slow",
            "docker run --ulimit nofile",
        ),
        ({"limits": replace(LIMITS, shm_bytes=None)}, "/dev/shm", "missing", "mount -t tmpfs"),
        ({"limits": replace(LIMITS, shm_bytes=64 << 20)}, "/dev/shm", "slow", "mount -o remount,size=8G /dev/shm"),
        (
            {"limits": replace(LIMITS, shm_bytes=64 << 20), "place": CONTAINER},
            "/dev/shm",
            "slow",
            "docker run --shm-size 8g",
        ),
        ({"uring": explain_refusal(fail(errno.ENOSYS))}, "io_uring", "slow", "# boot a newer kernel"),
        ({"uring": explain_refusal(fail(errno.EPERM))}, "io_uring", "slow", "--security-opt seccomp="),
        ({"uring": explain_refusal(fail(errno.ENOMEM))}, "io_uring", "slow", "ulimit -l unlimited"),
        (
            {"uring": explain_refusal(fail(errno.ENOMEM)), "place": CONTAINER},
            "io_uring",
            "slow",
            "docker run --ulimit memlock=-1",
        ),
        ({"ranks": Ranks(None, "cuda")}, "collectives", "missing", "pip install"),
        (
            {"ranks": replace(RANKS, seconds=None, fault="connection refused")},
            "two ranks",
            "missing",
            "GLOO_SOCKET_IFNAME",
        ),
        ({"ranks": replace(RANKS, seconds=12.0)}, "two ranks", "slow", "GLOO_SOCKET_IFNAME"),
        ({"extras": replace(EXTRAS, versions={"peft": None})}, "peft", "missing", "pip install peft"),
        (
            {
                "extras": replace(
                    EXTRAS, compiling="a C++ compiler, and there is none: install one (Debian: apt install g++)"
                )
            },
            "compile",
            "missing",
            "apt install g++",
        ),
        (
            {"extras": replace(EXTRAS, compiling="Triton, which does not work here: install it (pip)")},
            "compile",
            "missing",
            "install it (pip)",
        ),
    ],
)
def test_a_fact_that_is_not_in_order_is_found(facts: dict[str, Any], name: str, state: str, repair: str | None) -> None:
    view = FakeView(facts=facts)
    [fault] = faults_of(view)
    assert (fault.name, fault.state) == (name, state.partition(" ")[0])
    assert fault.why
    if repair is None:
        assert fault.repairs == ()
    else:
        assert any(repair in each for each in fault.repairs), fault.repairs
    assert can_train(list(examine(view, []))) is not state.endswith("essential")


def test_a_switched_off_io_uring_is_told_from_a_filtered_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.io.ring._DISABLED", tmp_path / "disabled")
    monkeypatch.setattr("infinity.io.ring._STATUS", tmp_path / "status")

    def fault(place: Any) -> Finding:
        [found] = faults_of(FakeView(facts={"uring": explain_refusal(fail(errno.EPERM)), "place": place}))
        return found

    assert "security module" in fault(PLACE).text
    (tmp_path / "status").write_text("Name:\tpython\nSeccomp:\t2\nSeccomp_filters:\t1\n")
    assert "the seccomp filter of a container" in fault(CONTAINER).text
    assert "security module" not in fault(CONTAINER).text
    assert "outside of the sandbox" in explain_refusal(fail(errno.ENOSYS)).repair
    (tmp_path / "disabled").write_text("2\n")
    assert "kernel.io_uring_disabled=2" in fault(PLACE).text
    assert fault(PLACE).repairs == (URING_OFF,)
    assert fault(CONTAINER).repairs == (f"{URING_OFF}  # on the host",)


def test_a_limit_of_locked_memory_matters_to_accelerators_only() -> None:
    limits = replace(LIMITS, locked_bytes=65536)
    faults = faults_of(FakeView(facts={"limits": limits, "accelerator": NO_GPU}))
    assert [fault.name for fault in faults] == ["accelerator"]


# Of directories.

DENIED = "this user may not write to the directory: change its mode or owner (file /data, EACCES: Permission denied)"
REFUSED = ("threads, direct I/O: O_DIRECT is accepted, but what was written stays in the page cache",)


@pytest.mark.parametrize(
    ("directory", "name", "state", "essential", "words", "repair"),
    [
        (
            replace(DIRECTORY, fault="cannot use it", errno=errno.ENOENT, exists=False),
            "directory",
            "missing",
            True,
            "does not exist",
            "mkdir -p /data",
        ),
        (
            under("xfs", options="ro,noatime", fault="no", errno=errno.EROFS),
            "directory",
            "missing",
            True,
            "read-only at /data",
            "mount -o remount,rw /data",
        ),
        (
            replace(DIRECTORY, fault=DENIED),
            "directory",
            "missing",
            True,
            "may not be written",
            "sudo chown $(id -u) /data",
        ),
        (
            replace(DIRECTORY, fault="full", errno=errno.ENOSPC),
            "directory",
            "missing",
            True,
            "is full",
            "du -xsh /data/*",
        ),
        (
            replace(DIRECTORY, fault="expected a directory, found a file"),
            "directory",
            "missing",
            True,
            "found a file",
            "another directory",
        ),
        (
            under("tmpfs", "tmpfs", direct=False, reasons=REFUSED),
            "device",
            "slow",
            False,
            "tmpfs",
            "# give a directory on local NVMe",
        ),
        (under("ext4", "/dev/vda"), "device", "slow", False, "ext4 on /dev/vda", "lsblk -d"),
        (under("nfs4", "host:/share"), "device", "slow", False, "nfs4", "# give a directory on local NVMe"),
        (under("xfs", options="rw,sync,noatime"), "mount", "slow", False, "sync", "mount -o remount,async /data"),
        (under("xfs", options="rw"), "mount", "slow", False, "/data: rw", "mount -o remount,noatime /data"),
        (
            under("ext4", options="rw,noatime,nobarrier"),
            "mount",
            "slow",
            False,
            "nobarrier",
            "mount -o remount,barrier /data",
        ),
        (under("btrfs", direct=False, reasons=REFUSED), "direct I/O", "slow", False, "page cache", "chattr +C /data"),
        (
            under("zfs", direct=False, reasons=REFUSED),
            "direct I/O",
            "slow",
            False,
            "page cache",
            "zfs set direct=always",
        ),
        (
            under("ext4", options="rw,noatime,data=journal", direct=False),
            "direct I/O",
            "slow",
            False,
            "page cache",
            "mount -o data=ordered /dev/nvme0n1 /data",
        ),
        (under("f2fs", direct=False), "direct I/O", "slow", False, "page cache", "ext4 or xfs"),
        (replace(DIRECTORY, free_bytes=10**6), "room", "missing", True, "1 MB free", "du -xsh /data/*"),
        (replace(DIRECTORY, clones=False, hard_links=False), "checkpoints", "slow", False, "neither", "xfs"),
        (
            replace(DIRECTORY, bandwidth=Bandwidth(0.5, 5.0)),
            "bandwidth",
            "slow",
            False,
            "reads 0.5",
            "infinity bench --nvme /data",
        ),
        (
            replace(DIRECTORY, bandwidth=Bandwidth(5.0, 0.2)),
            "bandwidth",
            "slow",
            False,
            "writes 0.2",
            "infinity bench --nvme /data",
        ),
    ],
)
def test_a_directory_that_is_not_in_order_is_found(
    directory: Directory, name: str, state: str, essential: bool, words: str, repair: str
) -> None:
    view = FakeView(directories={"/data": directory})
    fault = faults_of(view, "/data")[0]
    assert (fault.name, fault.state, fault.prevents_training) == (name, state, essential)
    assert words in fault.text
    assert fault.why
    assert any(repair in each for each in fault.repairs), fault.repairs
    assert can_train(list(examine(view, [Path("/data")]))) is not essential


def test_in_a_container_a_directory_is_mended_from_outside() -> None:
    layered = under("overlay", "overlay", direct=False)
    faults = faults_of(FakeView(facts={"place": CONTAINER}, directories={"/data": layered}), "/data")
    assert [fault.repairs for fault in faults] == [("docker run -v /mnt/nvme0:/data",)] * 2
    denied = replace(DIRECTORY, fault=DENIED)
    [fault] = faults_of(FakeView(facts={"place": CONTAINER}, directories={"/data": denied}), "/data")
    assert "docker run --user" in fault.repairs[0]
    plain = under("xfs", options="rw")
    [fault] = faults_of(FakeView(facts={"place": CONTAINER}, directories={"/data": plain}), "/data")
    assert fault.repairs == ("mount -o remount,noatime /data  # on the host",)


def test_hard_links_do_where_there_are_no_reflinks_and_bandwidth_may_be_unknown() -> None:
    view = FakeView(directories={"/data": replace(DIRECTORY, clones=False, bandwidth=None, alignment=None)})
    assert faults_of(view, "/data") == []
    texts = {finding.name: finding.text for finding in findings_of(view, "/data")}
    assert "hard links" in texts["checkpoints"]
    assert "bandwidth" not in texts
    assert texts["I/O"] == "threads; io_uring passed over; it is not clearly better"


def test_two_directories_on_one_device_gain_nothing() -> None:
    second = replace(DIRECTORY, facts=replace(DIRECTORY.facts, path="/more"))
    view = FakeView(directories={"/data": DIRECTORY, "/more": second})
    [fault] = faults_of(view, "/data", "/more")
    assert (fault.name, fault.state) == ("striping", "slow")
    assert "/data and /more are on one device" in fault.text


def test_after_a_directory_or_a_check_that_fails_the_page_goes_on() -> None:
    missing = replace(DIRECTORY, facts=PathFacts("/gone"), fault="no", errno=errno.ENOENT, exists=False)
    view = FakeView(facts={"memory": OSError(5, "I/O error")}, directories={"/gone": missing, "/data": DIRECTORY})
    sections = list(examine(view, [Path("/gone"), Path("/data")]))
    assert [section.title for section in sections][3:] == [
        "directory /gone",
        "directory /data",
        "several ranks",
        "optional",
    ]
    faults = faults_of(view, "/gone", "/data")
    assert [(fault.name, fault.prevents_training) for fault in faults] == [("RAM", False), ("directory", True)]
    assert "OSError: [Errno 5] I/O error" in faults[0].text
    broken = FakeView(facts={"torch": RuntimeError("no symbol"), "accelerator": RuntimeError("no driver")})
    assert [(fault.name, fault.prevents_training) for fault in faults_of(broken)] == [
        ("torch", True),
        ("accelerator", True),
    ]


# The page.


def page_of(view: FakeView, *paths: str, color: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=color, color_system="standard" if color else None)
    sections = list(examine(view, [Path(path) for path in paths]))
    for section in sections:
        show_section(console, section)
    show_verdict(console, sections)
    return out.getvalue()


def test_each_line_says_its_state_in_words_and_in_colour() -> None:
    view = FakeView(facts={"limits": replace(LIMITS, locked_bytes=65536, shm_bytes=None)})
    page = page_of(view)
    assert "\n  good    torch         2.9.0+cu130, built for CUDA 13.0, 8 threads\n" in page
    assert "\n  slow    memlock       65.5 kB\n" in page
    assert "\n                        $ ulimit -l unlimited\n" in page
    assert page.endswith("Training can run (1 slow, 1 missing).\n")
    coloured = page_of(view, color=True)
    for state, code in {"good": 32, "slow": 33, "missing": 31}.items():
        assert f"\x1b[{code}m{state}" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == page


def test_the_verdict_names_what_is_in_the_way() -> None:
    page = page_of(FakeView(facts={"torch": replace(TORCH, version="2.1")}))
    assert page.endswith("Training cannot run: see torch (0 slow, 1 missing).\n")


def test_the_document_has_all_of_the_page() -> None:
    sections = [
        Section("s", (Finding("a", "slow", "text", "why", ("cure",)), Finding("b", "missing", "", essential=True)))
    ]
    document = json.loads(json.dumps(as_document(sections)))
    assert document["can_train"] is False
    [section] = document["sections"]
    assert section["title"] == "s"
    assert section["findings"][0] == {
        "name": "a", "state": "slow", "text": "text", "why": "why", "repairs": ["cure"], "essential": False
    }  # fmt: skip


# The command.


def run(monkeypatch: pytest.MonkeyPatch, view: View, *arguments: str) -> int:
    monkeypatch.setattr(cli, "View", lambda **_: view)
    with pytest.raises(SystemExit) as end:
        main(["doctor", *arguments])
    return int(end.value.code or 0)


def test_the_exit_code_says_whether_training_can_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "page.json"
    assert run(monkeypatch, FakeView(), "--json", str(file)) == 0
    assert json.loads(file.read_text())["can_train"] is True
    assert "Training can run" in capsys.readouterr().out
    assert run(monkeypatch, FakeView(facts={"torch": replace(TORCH, version="1.13")}), "--json", "-") == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["can_train"] is False
    assert "Training cannot run" in captured.err
    assert run(monkeypatch, FakeView(), "--json", str(tmp_path / "none" / "page.json")) == 2
    assert "create it first" in capsys.readouterr().err


def test_directories_are_given_as_to_other_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["/a", "/b", "/c0"]
    view = FakeView(directories=dict.fromkeys(names, DIRECTORY))
    assert run(monkeypatch, view, "--nvme", "/a,/b", "--nvme", "/c{local_rank}") == 0
    page = capsys.readouterr().out
    assert re.findall(r"^directory (\S+)$", page, re.MULTILINE) == names
    assert run(monkeypatch, view, "--nvme", "/c{nobody}") == 2
    assert "no placeholder is called {nobody}" in capsys.readouterr().err


def test_of_the_ranks_of_a_machine_one_looks_at_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run(monkeypatch, FakeView(facts={"torch": RuntimeError()})) == 0
    assert capsys.readouterr().out == ""


# This machine.


def test_this_machine_can_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of the page for real, the two ranks included; nothing is left behind."""
    missing = tmp_path / "missing"
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--nvme", f"{tmp_path},{missing}", "--json", "-"])
    assert end.value.code == 1  # for the missing directory
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    findings = {finding["name"]: finding for section in document["sections"] for finding in section["findings"]}
    preventing = [name for name, each in findings.items() if each["essential"] and each["state"] == "missing"]
    assert preventing == ["directory"], captured.err
    assert findings["directory"]["repairs"] == [f"mkdir -p {missing}"]
    assert findings["two ranks"]["state"] != "missing", findings["two ranks"]
    assert (findings["io_uring"]["state"] == "good") == (ring_refusal() is None)
    assert "room" in findings
    assert left_in(tmp_path) == []


def test_quick_neither_measures_nor_starts_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("not when quick")

    monkeypatch.setattr(directory_module, "measure", refuse)
    monkeypatch.setattr(view_module, "meet_here", refuse)
    view = View(quick=True)
    assert view.directory(tmp_path).bandwidth is None
    assert view.directory(tmp_path).fault is None
    assert view.ranks().seconds is None


async def test_a_file_in_the_place_of_a_directory_is_said(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    found = await look_at(file)
    assert found.exists
    assert found.fault is not None
    assert "found a file" in found.fault


async def test_links_are_tried_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = await look_at(tmp_path, measured=False)
    assert found.hard_links is True

    def no_link(*_: Any) -> None:
        raise fail(errno.EPERM)

    monkeypatch.setattr(os, "link", no_link)
    monkeypatch.setattr(directory_module, "clone", lambda source, target: bool(target.touch()))
    found = await look_at(tmp_path, measured=False)
    assert (found.hard_links, found.clones) == (False, False)
    for name in left_in(tmp_path):  # of the faked clone
        (tmp_path / name).unlink()
    monkeypatch.setattr(directory_module, "clone", lambda source, target: not target.touch())
    assert (await look_at(tmp_path, measured=False)).clones is True
    assert left_in(tmp_path) == []


async def test_bandwidth_is_that_of_what_was_written(tmp_path: Path) -> None:
    moved = {"read": 0, "write": 0}

    def count(operation: Operation) -> None:
        if operation.action in moved:
            moved[operation.action] += 1

    backend = ThreadBackend(4, 8 << 20, False, HookedSyscalls(count))
    assert await measure(tmp_path, backend, (32 << 20) - 1) is None
    assert moved == {"read": 0, "write": 0}
    bandwidth = await measure(tmp_path, backend, 32 << 20, seconds=1e-6)
    await backend.aclose()
    assert moved == {"read": 4, "write": 4}
    assert bandwidth is not None
    assert min(bandwidth.read_gb_s, bandwidth.write_gb_s) > 0
    assert left_in(tmp_path) == []


async def test_a_device_that_fails_is_a_fault_and_leaves_nothing(tmp_path: Path) -> None:
    def broken(operation: Operation) -> None:
        if operation.action == "read":
            raise fail(errno.EIO)

    backend = ThreadBackend(4, 8 << 20, False, HookedSyscalls(broken))
    with pytest.raises(StorageError):
        await measure(tmp_path, backend, 32 << 20, seconds=1e-6)
    await backend.aclose()
    assert left_in(tmp_path) == []


def test_processes_that_do_not_meet_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert meet_here() == (None, "a process ended with 1")
    monkeypatch.setattr(sys, "executable", "/bin/cat")  # complains of its arguments
    seconds, fault = meet_here()
    assert seconds is None
    assert fault is not None
    assert "cat" in fault


@pytest.fixture
def lay_out(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    def make(files: dict[str, str]) -> Path:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("vendor", "kind", "words"),
    [("0x10de", "0x030200", "an NVIDIA accelerator"), ("0x1002", "0x120000", "an AMD"), ("0x10de", "0x020000", None)],
)
def test_an_accelerator_that_torch_does_not_find_is_seen(
    lay_out: Callable[[dict[str, str]], Path], vendor: str, kind: str, words: str | None
) -> None:
    device = "sys/bus/pci/devices/0000:01:00.0"
    root = lay_out({f"{device}/vendor": f"{vendor}\n", f"{device}/class": f"{kind}\n"})
    unused = view_module._unused_accelerator(root)
    assert unused is None if words is None else unused is not None and words in unused


def test_memory_limits_of_both_versions_of_cgroups(lay_out: Callable[[dict[str, str]], Path]) -> None:
    def limit(files: dict[str, str], own: str) -> int | None:
        root = lay_out({**files, "own": own})
        return memory_limit_bytes(own_cgroup=root / "own", cgroups=root / "groups")

    assert limit({}, "0::/\n") is None
    assert limit({"groups/a/memory.max": "max\n"}, "0::/a\n") is None
    assert limit({"groups/a/memory.max": "1000000\n"}, "0::/a\n") == 1000000
    assert limit({"groups/memory/b/memory.limit_in_bytes": f"{1 << 62}\n"}, "4:memory:/b\n") is None
    assert limit({"groups/memory/b/memory.limit_in_bytes": "2000000\n"}, "4:memory:/b\n") == 2000000


def test_every_optional_package_has_a_use_and_a_command() -> None:
    faults = faults_of(FakeView(facts={"extras": replace(EXTRAS, versions=dict.fromkeys(OPTIONAL))}))
    assert [fault.name for fault in faults] == list(OPTIONAL)
    assert all(fault.repairs[0].startswith("pip install") for fault in faults)
