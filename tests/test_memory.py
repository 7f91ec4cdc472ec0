"""Host memory for direct I/O: where it lies, that it is there, and how long it lives."""

from __future__ import annotations

import gc
import mmap
import re
import struct
import weakref
from pathlib import Path

import pytest
import torch

from infinity.io import memory
from infinity.io.memory import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    allocate,
    as_bytes,
    drop_pages,
    move_pages,
    round_up,
)


def num_present(tensor: torch.Tensor) -> int:
    """How many pages of a tensor the system holds in memory now."""
    num_pages = tensor.numel() // PAGE_BYTES
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(tensor.data_ptr() // PAGE_BYTES * 8)
        entries = struct.unpack(f"={num_pages}Q", pagemap.read(8 * num_pages))
    return sum(entry >> 63 for entry in entries)


def mappings(start: int, stop: int) -> list[dict[str, str]]:
    """What the system says of each mapping in a range of addresses, whose bounds are under ``start`` and ``stop``."""
    found: list[dict[str, str]] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found.append({"start": str(int(bounds[1], 16)), "stop": str(int(bounds[2], 16))})
        else:
            name, _, value = line.partition(":")
            found[-1][name] = value.strip()
    return [each for each in found if int(each["start"]) < stop and int(each["stop"]) > start]


def of(tensor: torch.Tensor) -> list[dict[str, str]]:
    return mappings(tensor.data_ptr(), tensor.data_ptr() + tensor.numel())


def total_kib(found: list[dict[str, str]], name: str) -> int:
    return sum(int(each[name].removesuffix(" kB")) for each in found)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


SIZES = [2 * HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + PAGE_BYTES, 4 * HUGE_PAGE_BYTES - PAGE_BYTES]


@pytest.mark.parametrize(
    ("num_bytes", "alignment", "expected"),
    [(0, 8, 0), (1, 8, 8), (8, 8, 8), (9, 8, 16), (5, 3, 6), (1 << 40, 7, (1 << 40) + 5)],
)
def test_round_up(num_bytes: int, alignment: int, expected: int) -> None:
    assert round_up(num_bytes, alignment) == expected


@pytest.mark.parametrize("populate", [True, False])
@pytest.mark.parametrize(
    "num_bytes",
    [PAGE_BYTES, 3 * PAGE_BYTES, HUGE_PAGE_BYTES - PAGE_BYTES, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + PAGE_BYTES],
)
def test_memory_is_exact_aligned_and_zeroed(num_bytes: int, populate: bool) -> None:
    tensor = allocate(num_bytes, populate=populate)
    assert (tensor.dtype, tensor.shape, tensor.device.type) == (torch.uint8, (num_bytes,), "cpu")
    assert tensor.data_ptr() % (HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else PAGE_BYTES) == 0
    assert not tensor.any()
    tensor.fill_(7)
    assert int(tensor.sum(dtype=torch.int64)) == 7 * num_bytes


@pytest.mark.parametrize("num_bytes", [5 * PAGE_BYTES, 2 * HUGE_PAGE_BYTES])
def test_pages_are_present_if_asked_for(num_bytes: int) -> None:
    assert num_present(allocate(num_bytes)) == num_bytes // PAGE_BYTES
    lazily = allocate(num_bytes, populate=False)
    assert num_present(lazily) == 0
    lazily[-1] = 1
    assert num_present(lazily) > 0


def test_pages_are_present_where_the_kernel_cannot_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", 9999)
    assert num_present(allocate(5 * PAGE_BYTES)) == 5


@pytest.mark.parametrize("num_bytes", SIZES)
def test_large_memory_is_a_mapping_of_its_own_that_asks_for_huge_pages(num_bytes: int) -> None:
    tensor = allocate(num_bytes)
    (mapping,) = of(tensor)
    assert int(mapping["start"]) == tensor.data_ptr()
    assert int(mapping["stop"]) == tensor.data_ptr() + num_bytes
    assert "hg" in mapping["VmFlags"].split()


@pytest.mark.parametrize("num_bytes", SIZES)
def test_large_memory_is_in_huge_pages_but_for_its_tail(num_bytes: int) -> None:
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("this system gives huge pages to nobody")
    tensors = [allocate(num_bytes, populate=populate) for populate in (True, False)]
    for tensor in tensors:
        tensor.fill_(1)
        got = total_kib(of(tensor), "AnonHugePages") * 1024
        assert got <= num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if got == 0:
            pytest.skip("the system has no huge page free now")


@pytest.mark.parametrize("populate", [True, False])
@pytest.mark.parametrize("num_bytes", [3 * PAGE_BYTES, *SIZES])
def test_memory_takes_its_exact_size_and_the_room_around_it_nothing(num_bytes: int, populate: bool) -> None:
    earlier = mappings(0, 1 << 64)
    tensor = allocate(num_bytes, populate=populate)
    tensor.fill_(1)
    found = of(tensor)
    # The system makes one mapping of two that touch and are alike: what lay beside a small one is not its own.
    spans = [(int(each["start"]), int(each["stop"])) for each in found]
    touching = [each for each in earlier if any(start <= int(each["start"]) < stop for start, stop in spans)]
    assert (total_kib(found, "Rss") - total_kib(touching, "Rss")) * 1024 == num_bytes
    around = mappings(tensor.data_ptr() - PAGE_BYTES, tensor.data_ptr() + num_bytes + PAGE_BYTES)
    assert all("hg" not in each["VmFlags"].split() for each in around if each["start"] != of(tensor)[0]["start"])


def test_small_memory_and_the_room_beside_large_are_barred_from_huge_pages() -> None:
    small, large = allocate(5 * PAGE_BYTES), allocate(HUGE_PAGE_BYTES)
    after = large.data_ptr() + large.numel()
    (beside,) = mappings(after, after + PAGE_BYTES)
    assert all("nh" in each["VmFlags"].split() for each in [*of(small), beside])
    assert int(beside["Rss"].removesuffix(" kB")) == 0


@pytest.mark.parametrize("num_bytes", [64 * PAGE_BYTES, 17 * HUGE_PAGE_BYTES + PAGE_BYTES])
def test_memory_that_is_given_back_leaves_the_process(num_bytes: int) -> None:
    allocate(num_bytes).fill_(1)
    before = resident_bytes()
    tensors = [allocate(num_bytes) for _ in range(4)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert resident_bytes() >= before + 4 * num_bytes - (1 << 20)
    tensors.clear()
    assert resident_bytes() <= before + (1 << 20)
    assert not any(each["VmFlags"].split().count("hg") for at in addresses for each in mappings(at, at + num_bytes))


def test_it_is_placed_before_any_page_is_present() -> None:
    placed: list[tuple[int, int, float]] = []

    class Seen:
        def place(self, address: int, num_bytes: int) -> None:
            placed.append((address, num_bytes, total_kib(mappings(address, address + num_bytes), "Rss")))

    for num_bytes in (3 * PAGE_BYTES, HUGE_PAGE_BYTES):
        tensor = allocate(num_bytes, placement=Seen())
        assert placed.pop() == (tensor.data_ptr(), num_bytes, 0)


def test_memory_lives_as_long_as_any_view() -> None:
    tensor = allocate(HUGE_PAGE_BYTES)
    tensor.fill_(1)
    address = tensor.data_ptr()
    part = as_bytes(tensor)[PAGE_BYTES:]
    typed = tensor.view(torch.float32)[:16]
    del tensor
    gc.collect()
    assert set(part) == {1}
    del part
    gc.collect()
    assert typed.view(torch.uint8).tolist() == [1] * 64
    assert typed.data_ptr() == address


def test_memory_goes_with_the_last_view(monkeypatch: pytest.MonkeyPatch) -> None:
    class Map(mmap.mmap):
        """Can be watched."""

    maps: list[weakref.ref[Map]] = []

    def make(*args: int, **kwargs: int) -> Map:
        made = Map(*args, **kwargs)
        maps.append(weakref.ref(made))
        return made

    monkeypatch.setattr("infinity.io.memory.mmap.mmap", make)
    tensor = allocate(HUGE_PAGE_BYTES)
    view = as_bytes(tensor)
    del tensor
    gc.collect()
    assert maps[0]() is not None
    del view
    gc.collect()
    assert maps[0]() is None


def test_a_failed_mapping_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match=f"cannot map {1 << 60} bytes of host memory"):
        allocate(1 << 60)


def test_as_bytes_is_the_same_memory() -> None:
    tensor = allocate(PAGE_BYTES)
    view = as_bytes(tensor)
    assert (view.format, view.nbytes, view.readonly, view.contiguous) == ("B", PAGE_BYTES, False, True)
    view[5] = 9
    assert tensor[5] == 9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_memory_is_known_to_the_device() -> None:
    tensor = allocate(HUGE_PAGE_BYTES, pin=True)
    assert tensor.is_pinned()
    tensor.fill_(3)
    copied = tensor.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert bool((copied == 3).all())
    del tensor
    gc.collect()
    assert allocate(HUGE_PAGE_BYTES, pin=True).is_pinned()  # also at the same address, which was given back


@pytest.mark.parametrize("run_pages", [1, 2])
def test_pages_move_to_other_memory_and_leave_none_behind(run_pages: int) -> None:
    run_bytes = run_pages * HUGE_PAGE_BYTES
    source, target = (allocate(5 * HUGE_PAGE_BYTES + size, populate=False) for size in (PAGE_BYTES, 0))
    source.fill_(7)
    target.fill_(3)
    moved_bytes = move_pages(source, target, run_bytes=run_bytes)
    assert moved_bytes == 5 // run_pages * run_bytes
    assert (target[:moved_bytes] == 7).all()
    assert (target[moved_bytes:] == 3).all()
    assert num_present(source) == (source.numel() - moved_bytes) // PAGE_BYTES
    assert (source[moved_bytes:] == 7).all()
    assert not source[:moved_bytes].any()
    again = allocate(3 * HUGE_PAGE_BYTES, populate=False)  # from memory that is in two pieces itself
    assert move_pages(target[run_bytes:], again, run_bytes=run_bytes) == 3 // run_pages * run_bytes
    assert (target[:run_bytes] == 7).all()
    del source, target
    gc.collect()
    again.fill_(9)
    assert (again == 9).all()


def test_less_than_a_huge_page_stays() -> None:
    source, target = allocate(HUGE_PAGE_BYTES - PAGE_BYTES), allocate(HUGE_PAGE_BYTES)
    assert move_pages(source, target) == 0


def test_a_system_that_cannot_move_pages_moves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = allocate(HUGE_PAGE_BYTES), allocate(HUGE_PAGE_BYTES)
    source.fill_(7)
    for mremap in (lambda *arguments: None, lambda *arguments: (1 << 64) - 1, None):
        monkeypatch.setattr(memory, "_mremap", mremap)
        assert move_pages(source, target) == 0
    assert (source == 7).all()


def test_dropped_pages_are_the_systems() -> None:
    tensor = allocate(2 * HUGE_PAGE_BYTES + PAGE_BYTES)
    tensor.fill_(7)
    drop_pages(tensor[HUGE_PAGE_BYTES:])
    drop_pages(tensor[:0])
    assert num_present(tensor) == HUGE_PAGE_BYTES // PAGE_BYTES
    assert (tensor[:HUGE_PAGE_BYTES] == 7).all()
    assert not tensor[HUGE_PAGE_BYTES:].any()
