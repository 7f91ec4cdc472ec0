"""Paths that users give, and two names that change places."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from infinity.errors import ConfigError

_EXCHANGE = 2
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def user_path(path: object, what: str) -> Path:
    """A path as a user gives it, ``~`` expanded.

    Args:
        path: what came.
        what: is to have it, for the message.

    Raises:
        ConfigError: it is none, or of a user that does not exist.
    """
    given = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(given, str) or not given or "\0" in given:
        raise ConfigError(f"{what}: expected a path, a str or os.PathLike that is not empty, got {path!r}")
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{what}: expected a path, and {given!r} names no user's home") from error


def exchange(directory: int, one: str, other: str) -> bool:
    """Have two names in an open directory change places, in one step. Whether the system can.

    Raises:
        OSError: the system reported an error.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        return False
    renameat2 = library.renameat2
    renameat2.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    if renameat2(directory, os.fsencode(one), directory, os.fsencode(other), _EXCHANGE):
        number = ctypes.get_errno()
        if number in _UNSUPPORTED:
            return False
        raise OSError(number, os.strerror(number))
    return True
