"""Host memory for direct I/O: where it lies, that it is there, and how long it lives."""

from __future__ import annotations

import gc
import mmap
import struct
import weakref
from pathlib import Path

import pytest
import torch

from infinity.io import memory
from infinity.io.memory import HUGE_PAGE_BYTES, PAGE_BYTES, allocate, as_bytes, round_up


def num_present(tensor: torch.Tensor) -> int:
    """How many pages of a tensor the system holds in memory now."""
    num_pages = tensor.numel() // PAGE_BYTES
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(tensor.data_ptr() // PAGE_BYTES * 8)
        entries = struct.unpack(f"={num_pages}Q", pagemap.read(8 * num_pages))
    return sum(entry >> 63 for entry in entries)


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
