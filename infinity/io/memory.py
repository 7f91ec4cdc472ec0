"""Page-aligned host memory of exact size, in huge pages where the system has them, pinned where a device needs it.

Why not ``torch.empty``: its addresses are not page aligned (O_DIRECT refuses them with EINVAL), and default 4 KiB pages
cost up to half the disk's bandwidth and five times the CPU per byte (measured; direct I/O pins every page of every
request). Why not ``pin_memory()``: it rounds sizes up to a power of two and caches what it frees.

To lie on a huge page's boundary, a mapping takes up to 2 MiB more of addresses, never of memory: nobody touches the
rest, and it is barred from huge pages, as are small mappings. Else, where the system gives huge pages to everybody
(``always`` in ``transparent_hugepage/enabled``), a touch nearby would fill 2 MiB across the border.

Memory that the system gives is cleared first, which takes as long as a copy. So pages of a tensor that is done with can
be given to another (``move_pages``), by changing page tables.

The memory lives as long as the tensor or any view of it does: ``torch.frombuffer`` keeps the map alive, and the map is
never closed by hand, so that a view held too long is a leak and not a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable
from typing import cast

import numpy as np
import torch

from infinity.io.numa import ANYWHERE, Placement

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20

_MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_MADV_NOHUGEPAGE: int | None = getattr(mmap, "MADV_NOHUGEPAGE", None)
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap does not name it
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4


def round_up(num_bytes: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that is at least ``num_bytes``."""
    return -(-num_bytes // alignment) * alignment


def allocate(
    num_bytes: int, *, pin: bool = False, populate: bool = True, placement: Placement = ANYWHERE
) -> torch.Tensor:
    """Allocate host memory for direct I/O.

    Args:
        num_bytes: how many bytes; a multiple of ``PAGE_BYTES`` and not zero.
        pin: register the memory with the accelerator's runtime, for asynchronous copies.
        populate: make every page present now; else pages come at the first touch, and the call costs microseconds.
        placement: which of the machine's memory nodes to ask for.

    Returns:
        A ``uint8`` tensor of shape ``(num_bytes,)``, page aligned (2 MiB aligned from 2 MiB on), zeroed.

    Raises:
        MemoryError: the system has no more memory.
        RuntimeError: the memory cannot be pinned.
    """
    assert num_bytes > 0
    assert num_bytes % PAGE_BYTES == 0
    huge = num_bytes >= HUGE_PAGE_BYTES
    slack = HUGE_PAGE_BYTES if huge else 0
    try:
        memory = mmap.mmap(-1, num_bytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot map {num_bytes} bytes of host memory: {error.strerror}") from error
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES if huge else 0
    with contextlib.suppress(OSError):  # a kernel without huge pages
        if _MADV_NOHUGEPAGE is not None:
            memory.madvise(_MADV_NOHUGEPAGE)
        if huge and _MADV_HUGEPAGE is not None:
            memory.madvise(_MADV_HUGEPAGE, start, num_bytes)
    tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=num_bytes)
    placement.place(tensor.data_ptr(), num_bytes)
    if populate:
        try:
            memory.madvise(_MADV_POPULATE_WRITE, start, num_bytes)
        except OSError:
            tensor[::PAGE_BYTES] = 0
    if pin:
        _pin(memory, tensor)
    return tensor


def move_pages(source: torch.Tensor, target: torch.Tensor, *, run_bytes: int = HUGE_PAGE_BYTES) -> int:
    """Give pages from the start of one tensor of ``allocate`` to the start of another, in the place of its own.

    Neither may be in use. What ``source`` has given away takes no memory until it is touched, and reads as zeros then;
    its addresses stay its own.

    Args:
        source: ``uint8``, or the rest of one from a multiple of ``run_bytes`` on.
        target: likewise.
        run_bytes: how much at a time, a multiple of ``HUGE_PAGE_BYTES``, and the same in all calls for one tensor: the
            system keeps a record for each run.

    Returns:
        How many bytes ``target`` now has from ``source``; 0 where the system cannot do it (Linux before 5.7).
    """
    moved_bytes, num_bytes = 0, min(source.numel(), target.numel())
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    while _mremap is not None and moved_bytes + run_bytes <= num_bytes:
        old, new = source.data_ptr() + moved_bytes, target.data_ptr() + moved_bytes
        if _mremap(old, run_bytes, run_bytes, flags, new) != new:
            break
        moved_bytes += run_bytes
    return moved_bytes


def drop_pages(tensor: torch.Tensor) -> None:
    """Give the pages of a tensor of ``allocate``, or of a part of it, back to the system; the addresses stay."""
    if _madvise is not None and tensor.numel():
        _madvise(tensor.data_ptr(), tensor.numel(), mmap.MADV_DONTNEED)


def _libc(name: str, result: type, *arguments: type) -> Callable[..., int] | None:
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function.restype, function.argtypes = result, arguments
    return cast("Callable[..., int] | None", function)


_mremap = _libc(
    "mremap", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
)
_madvise = _libc("madvise", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _pin(memory: mmap.mmap, tensor: torch.Tensor) -> None:
    runtime = torch.cuda.cudart()
    address = tensor.data_ptr()
    status = runtime.cudaHostRegister(address, tensor.numel(), 0)
    if int(status) != 0:
        raise RuntimeError(
            f"cannot pin {tensor.numel()} bytes of host memory (cudaHostRegister: {status}); "
            "raise the memlock limit (ulimit -l) or lower ram="
        )
    weakref.finalize(memory, runtime.cudaHostUnregister, address)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host ``uint8`` tensor as a writable memoryview; keeps the tensor alive."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]  # numpy for Python 3.10 declares no Buffer


def address_of(view: memoryview) -> int:
    """Where contiguous memory of one byte or more begins.

    Not by numpy where ctypes can: numpy tells it in a dictionary of much else, which took 30 us of code that a request
    now and then never has in the caches.
    """
    if view.readonly:
        return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Heap:
    """Gives back what large short-lived tensors of PyTorch's own leave behind; safe from any thread.

    glibc keeps freed blocks of up to 32 MiB for reuse. A small allocation that takes a bite of one makes it too small
    for the next tensor of its size, so a run of them would leave one hole each: all the memory after all. (Measured:
    88 blocks' worth of optimizer states, made in a first step, left 80 MB of holes.)
    """

    TRIM_BYTES = 16 << 20

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._used_bytes = 0
        self._lock = threading.Lock()

    def use(self, num_bytes: int) -> None:
        """Count a tensor that lives for a short while."""
        with self._lock:
            self._used_bytes += num_bytes

    def make_room(self) -> None:
        """Return the pages of freed tensors to the system, if there may be many."""
        with self._lock:
            if self._used_bytes < self.TRIM_BYTES:
                return
            self._used_bytes = 0
        if self._trim is not None:
            self._trim(0)


HEAP = Heap()
"""The process's heap."""
