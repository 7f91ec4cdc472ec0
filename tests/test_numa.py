"""Memory near to whoever uses it: nodes read from the files of a system that is not this one, asked by a fake call."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from infinity.io import numa
from infinity.io.memory import HUGE_PAGE_BYTES, allocate
from infinity.io.numa import (
    ANYWHERE,
    NearNode,
    Topology,
    choose_placement,
    mbind,
    node_of_directory,
    node_of_pci,
    node_of_user,
    parse_list,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TWO = Topology({0: frozenset({0, 1, 4, 5}), 1: frozenset({2, 3, 6, 7})})


class FakeCall:
    """Remembers what was asked for; answers with ``error``."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.calls: list[tuple[int, int, int, list[int]]] = []

    def __call__(self, address: int, num_bytes: int, policy: int, nodes: Sequence[int]) -> int:
        self.calls.append((address, num_bytes, policy, list(nodes)))
        return self.error


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two sockets, each with memory; an accelerator on node 1."""
    nodes = tmp_path / "sys/devices/system/node"
    write(nodes / "has_memory", "0-1\n")
    write(nodes / "online", "0-2\n")
    write(nodes / "node0/cpulist", "0-1,4-5\n")
    write(nodes / "node1/cpulist", "2-3,6-7\n")
    write(tmp_path / "sys/bus/pci/devices/0000:8a:00.0/numa_node", "1\n")
    write(tmp_path / "sys/bus/pci/devices/0000:8b:00.0/numa_node", "-1\n")
    return tmp_path


def disk(machine: Path, name: str, node: int, *, under: Path) -> Path:
    """A partition on an NVMe drive of a node, under a directory."""
    drive = machine / f"sys/devices/pci/{name}"
    write(drive / "numa_node", f"{node}\n")
    partition = drive / f"nvme/{name}/{name}n1/{name}n1p1"
    partition.mkdir(parents=True)
    link_block(machine, under, partition)
    return partition


def link_block(machine: Path, under: Path, device: Path) -> None:
    number = under.stat().st_dev
    link = machine / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(device)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("", set()), ("\n", set()), ("0\n", {0}), ("0-3\n", {0, 1, 2, 3}), ("0,2-3,7\n", {0, 2, 3, 7})],
)
def test_lists_of_the_kernel(text: str, numbers: set[int]) -> None:
    assert parse_list(text) == numbers


def test_nodes_with_memory_are_found_with_their_processors(machine: Path) -> None:
    assert Topology.find(machine) == TWO


def test_a_system_without_nodes_has_none(tmp_path: Path) -> None:
    assert Topology.find(tmp_path) == Topology({})


@pytest.mark.parametrize(
    ("processors", "node"), [({0, 5}, 0), ({2}, 1), ({0, 2}, None), ({9}, None), (set(), None), ({2, 3, 6, 7}, 1)]
)
def test_processors_are_on_a_node_if_all_of_them_are(processors: set[int], node: int | None) -> None:
    assert TWO.node_of_processors(processors) == node


@pytest.mark.parametrize(("address", "node"), [("0000:8a:00.0", 1), ("0000:8b:00.0", None), ("0000:8c:00.0", None)])
def test_the_node_of_a_device_on_the_bus(machine: Path, address: str, node: int | None) -> None:
    assert node_of_pci(address, machine) == node


def test_the_node_of_a_directory_is_that_of_the_drive_above_its_partition(machine: Path, tmp_path: Path) -> None:
    assert node_of_directory(tmp_path, machine) is None
    disk(machine, "nvme0", 1, under=tmp_path)
    assert node_of_directory(tmp_path, machine) == 1
    assert node_of_directory(tmp_path / "missing", machine) is None


@pytest.mark.parametrize(("nodes", "expected"), [((1, 1), 1), ((0, 1), None), ((1, -1), None)])
def test_a_striped_device_is_on_the_node_of_all_its_members(
    machine: Path, tmp_path: Path, nodes: tuple[int, int], expected: int | None
) -> None:
    striped = machine / "sys/devices/virtual/block/md0"
    (striped / "slaves").mkdir(parents=True)
    for index, node in enumerate(nodes):
        member = machine / f"sys/devices/pci/nvme{index}/nvme{index}n1"
        write(member.parent / "numa_node", f"{node}\n")
        member.mkdir()
        (striped / f"slaves/nvme{index}n1").symlink_to(member)
    link_block(machine, tmp_path, striped)
    assert node_of_directory(tmp_path, machine) == expected


def test_memory_follows_the_accelerator(machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk(machine, "nvme0", 0, under=tmp_path)
    monkeypatch.setattr(numa, "pci_address", lambda device: "0000:8a:00.0")
    assert node_of_user(CUDA, [tmp_path], TWO, root=machine, processors={0}) == 1


def test_where_the_accelerators_node_is_not_told_it_follows_the_drives(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk(machine, "nvme0", 0, under=tmp_path)
    for address in (None, "0000:8b:00.0"):
        monkeypatch.setattr(numa, "pci_address", lambda device, address=address: address)
        assert node_of_user(CUDA, [tmp_path, tmp_path], TWO, root=machine, processors={2}) == 0
        assert node_of_user(CUDA, [tmp_path, tmp_path / "missing"], TWO, root=machine, processors={2}) is None
        assert node_of_user(CUDA, [], TWO, root=machine, processors={2}) is None


def test_on_the_cpu_it_follows_the_processors_and_not_the_drives(machine: Path, tmp_path: Path) -> None:
    disk(machine, "nvme0", 1, under=tmp_path)
    assert node_of_user(CPU, [tmp_path], TWO, root=machine, processors={0, 4}) == 0
    assert node_of_user(CPU, [tmp_path], TWO, root=machine, processors={0, 2}) is None


def test_memory_is_asked_to_be_near_and_need_not_be(machine: Path) -> None:
    call = FakeCall()
    placement = choose_placement(CPU, [], root=machine, processors={2, 3}, call=call)
    assert isinstance(placement, NearNode)
    tensor = allocate(HUGE_PAGE_BYTES, placement=placement)
    preferred = 1
    assert call.calls == [(tensor.data_ptr(), HUGE_PAGE_BYTES, preferred, [1])]
    assert (placement.node, placement.reason) == (1, "")


def test_a_refusal_is_remembered_and_nothing_else(machine: Path) -> None:
    placement = choose_placement(CPU, [], root=machine, processors={2}, call=FakeCall(errno.EPERM))
    tensor = allocate(HUGE_PAGE_BYTES, placement=placement)
    assert not tensor.any()
    assert isinstance(placement, NearNode)
    assert placement.reason == f"memory is not placed on node 1 (mbind: {os.strerror(errno.EPERM)})"


def test_with_one_node_nothing_is_called(machine: Path) -> None:
    write(machine / "sys/devices/system/node/has_memory", "0\n")
    call = FakeCall()
    placement = choose_placement(CPU, [], root=machine, processors={0}, call=call)
    assert placement is ANYWHERE
    allocate(HUGE_PAGE_BYTES, placement=placement)
    assert call.calls == []


def test_processes_on_several_nodes_are_left_to_the_system(machine: Path) -> None:
    assert choose_placement(CPU, [], root=machine, processors={0, 2}, call=FakeCall()) is ANYWHERE


def test_a_node_without_memory_is_not_asked(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(machine / "sys/bus/pci/devices/0000:8c:00.0/numa_node", "2\n")
    monkeypatch.setattr(numa, "pci_address", lambda device: "0000:8c:00.0")
    assert choose_placement(CUDA, [], root=machine, processors={0}, call=FakeCall()) is ANYWHERE


def test_this_machine_is_read_without_failing(tmp_path: Path) -> None:
    placement = choose_placement(CPU, [tmp_path])
    assert (placement is ANYWHERE) or len(Topology.find().nodes) > 1


@pytest.mark.skipif(platform.system() != "Linux", reason="mbind is Linux's")
def test_the_system_call_says_why_it_fails_and_takes_what_is_there() -> None:
    tensor = allocate(HUGE_PAGE_BYTES, populate=False)
    here = mbind(tensor.data_ptr(), HUGE_PAGE_BYTES, 1, [0])
    if here in (errno.EPERM, errno.ENOSYS):
        pytest.skip(f"mbind is refused here: {os.strerror(here)}")
    assert here == 0
    assert mbind(tensor.data_ptr() + 1, HUGE_PAGE_BYTES, 1, [0]) == errno.EINVAL  # not at a page's start
    assert mbind(tensor.data_ptr(), HUGE_PAGE_BYTES, 99, [0]) == errno.EINVAL
    assert mbind(tensor.data_ptr(), HUGE_PAGE_BYTES, 1, [5000]) == errno.ENOSYS
    tensor.fill_(1)
    text = next(
        line
        for line in Path("/proc/self/numa_maps").read_text().splitlines()
        if line.startswith(f"{tensor.data_ptr():x} ")
    )
    assert "prefer" in text.split()[1]
