"""What the kernel knows about direct I/O on a file, for file systems that accept ``O_DIRECT`` and then ignore it.

Such are ext4 with ``data=journal``, tmpfs, and btrfs for files with checksums: ``open`` succeeds, bytes are right,
and every one of them is copied through the page cache. Two witnesses, both optional: ``statx`` reports what the file
system declares, ``mincore`` what became of pages just written.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from pathlib import Path

import numpy as np

_AT_FDCWD = -100
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_MASK_OFFSET = 0
_DIO_ALIGN_OFFSET = 0x98  # u32 stx_dio_mem_align, u32 stx_dio_offset_align


def declared_alignment(path: Path) -> int | None:
    """The alignment that direct I/O on a file needs, in bytes.

    Returns:
        The larger of that for addresses and that for offsets; 0 where the file has no direct I/O; ``None`` where the
        system does not say (Linux before 6.1, or the file system does not declare it).
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "statx"):
        return None
    result = ctypes.create_string_buffer(_STATX_BYTES)
    status = libc.statx(_AT_FDCWD, bytes(path), 0, _STATX_DIOALIGN, result)
    (mask,) = struct.unpack_from("=I", result, _MASK_OFFSET)
    if status != 0 or not mask & _STATX_DIOALIGN:
        return None
    memory_bytes, offset_bytes = struct.unpack_from("=II", result, _DIO_ALIGN_OFFSET)
    return int(max(memory_bytes, offset_bytes))


def is_cached(path: Path, num_bytes: int) -> bool | None:
    """Whether any of a file's first ``num_bytes`` are in the page cache; ``None`` where the system does not say."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mincore"):
        return None
    num_pages = -(-num_bytes // mmap.PAGESIZE)
    resident = (ctypes.c_ubyte * num_pages)()
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), num_bytes, prot=mmap.PROT_READ) as pages:
            address = np.frombuffer(pages, np.uint8).__array_interface__["data"][0]
            status = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), resident)
    except OSError:  # a file system without mmap
        return None
    return any(page & 1 for page in resident) if status == 0 else None
