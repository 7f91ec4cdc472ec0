"""Blocks of files: giving back those of ranges that nobody needs, and sharing those of whole files."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_FICLONE = 0x40049409
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTTY, errno.EXDEV, errno.EPERM)


def punch(path: Path, holes: Sequence[tuple[int, int]]) -> bool:
    """Give back the blocks of ranges of a file, which read as zeros then; durably. Whether the file system can.

    Args:
        path: the file.
        holes: where each begins and ends, in bytes.

    Raises:
        OSError: the system reported an error.
    """
    if not holes:
        return True
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for start, stop in holes:
            if fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, start, stop - start):
                number = ctypes.get_errno()
                if number in _UNSUPPORTED:
                    return False
                raise OSError(number, os.strerror(number))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return True


def clone(source: Path, target: Path) -> bool:
    """Make a new file that shares all blocks of another until one of the two is written. Whether the file system can.

    Raises:
        OSError: the system reported an error; no new file is left.
    """
    with source.open("rb") as file:
        descriptor = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            fcntl.ioctl(descriptor, _FICLONE, file.fileno())
            os.fsync(descriptor)
        except BaseException as error:
            target.unlink()
            if isinstance(error, OSError) and error.errno in _UNSUPPORTED:
                return False
            raise
        finally:
            os.close(descriptor)
    return True
