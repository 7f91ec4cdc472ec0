"""Every error that infinity raises for a user, as one small tree.

Each says what was expected, what came, which parameter, shard or file it concerns, and what to do about it.
``assert`` is kept for what cannot happen.
"""

from __future__ import annotations

import contextlib
import errno as _errno
import os
from collections.abc import Iterator
from pathlib import Path


class InfinityError(Exception):
    """Root of all errors raised on purpose by infinity."""


class ConfigError(InfinityError, ValueError):
    """A configuration field is unknown, missing or has a value that cannot be used."""


class ModelError(InfinityError, ValueError):
    """The model or the optimizer cannot be managed, or was used in a way the engine refuses."""


class EngineStateError(InfinityError, RuntimeError):
    """An operation came at a time when it has no meaning: after ``close()``, or after a step that failed half-way."""


class MicroBatchError(InfinityError, RuntimeError):
    """A micro-batch of ``engine.accumulate()`` failed; ``__cause__`` is what it failed with.

    Attributes:
        index: which, counted from 0.
    """

    def __init__(self, message: str, *, index: int) -> None:
        super().__init__(message)
        self.index = index


class NonFiniteError(InfinityError, RuntimeError):
    """A norm of gradients is infinite or NaN where it must not be."""


class RanksError(InfinityError, RuntimeError):
    """The ranks of a job could not meet, do not do the same, or one of them has ended or did not come in time."""


class NonFiniteWarning(UserWarning):
    """The engine has gone back to a commit because a gradient was infinite or NaN."""


class BudgetError(InfinityError, MemoryError):
    """A need can never fit a tier's budget; the message shows the arithmetic and the smallest budget that would do."""


class StorageError(InfinityError, OSError):
    """A transfer or a file operation failed.

    Attributes:
        path: the file concerned.
        offset: byte offset of the transfer within the file, or ``None`` for whole-file operations.
        expected_bytes: how many bytes the operation should have moved.
        got_bytes: how many it did move.
        errno: the system's error number, or ``None`` where no system call failed.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str],
        offset: int | None = None,
        expected_bytes: int | None = None,
        got_bytes: int | None = None,
        errno: int | None = None,
    ) -> None:
        self.path = Path(path)
        self.offset = offset
        self.expected_bytes = expected_bytes
        self.got_bytes = got_bytes
        details = [f"file {os.fspath(path)}"]
        if offset is not None:
            details.append(f"offset {offset}")
        if expected_bytes is not None:
            details.append(f"expected {expected_bytes} bytes")
        if got_bytes is not None:
            details.append(f"got {got_bytes} bytes")
        if errno is not None:
            details.append(f"{_errno.errorcode.get(errno, errno)}: {os.strerror(errno)}")
        self.message = f"{message} ({', '.join(details)})"
        super().__init__(self.message)
        self.errno = errno

    def __str__(self) -> str:
        return self.message


class ShortTransferError(StorageError):
    """The file ended, or the device stopped, before all bytes had moved."""


class MismatchError(StorageError):
    """What was read back is not what was written."""


class ManifestError(StorageError):
    """The record of a commit is damaged, is none, or does not fit what is asked of it."""


class NoCommitError(StorageError):
    """There is no committed state to resume from, roll back to or read."""


class UncertainCommitError(StorageError):
    """A commit failed, and so did taking back its record: it may be there after a crash, whole."""


class RankFailedError(StorageError):
    """What all ranks do together (a commit, a checkpoint, a start) failed on another one, so it counts on none."""


class RanksApartError(StorageError):
    """Ranks cannot agree on their state any more: one has ended, or did not come in time.

    Start all of them again: they go on from the newest commit that all have.
    """


class DiskFullError(StorageError):
    """The file system has no room (ENOSPC, EDQUOT or EFBIG), found at preflight or while writing."""


class DirectoryError(StorageError):
    """An NVMe path is missing, not a directory, not writable, or otherwise unusable."""


class DirectoryInUseError(DirectoryError):
    """Another live job owns the NVMe path, or somebody reads what is in it."""


_FULL = {
    _errno.ENOSPC: "the file system is full; free space there, or give a path on another disk",
    _errno.EDQUOT: "the quota on this file system is used up; free space there, or give a path on another disk",
    _errno.EFBIG: "a file may not grow that large here; raise the limit (ulimit -f), or give a path on another "
    "file system",
}


def storage_error(
    action: str,
    error: OSError,
    *,
    path: str | os.PathLike[str],
    offset: int | None = None,
    expected_bytes: int | None = None,
    got_bytes: int | None = None,
) -> StorageError:
    """Turn an ``OSError`` of a system call into the typed error for its kind.

    Args:
        action: what was being done, in words ("read", "preallocate").
        error: what the system call raised.
        path: the file concerned.
        offset: byte offset of the transfer.
        expected_bytes: bytes that should have moved.
        got_bytes: bytes that did move before the failure.
    """
    if error.errno in _FULL:
        kind: type[StorageError] = DiskFullError
        message = f"{action} failed: {_FULL[error.errno]}"
    else:
        kind = StorageError
        message = f"{action} failed"
        if error.errno in (_errno.EMFILE, _errno.ENFILE):
            message += ": no descriptors are left; raise the limit of open files (ulimit -n)"
    return kind(
        message,
        path=path,
        offset=offset,
        expected_bytes=expected_bytes,
        got_bytes=got_bytes,
        errno=error.errno,
    )


@contextlib.contextmanager
def system_errors(action: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """A context that turns what system calls raise into the typed error for its kind.

    Args:
        action: what is being done, in words.
        path: the file concerned.
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(action, error, path=path) from error
