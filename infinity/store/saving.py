"""``NewCheckpoint``: a state directory of its own, written shard by shard, that is there whole or not at all.

It is made beside its place, and put there when all of it is durable (``partial.py``), so what stood there before stays
until then. What is replaced must be a checkpoint of ours; anything else is refused untouched.

Everything here is synchronous and belongs on a worker thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from pathlib import Path

from infinity.errors import DirectoryError, DiskFullError, system_errors
from infinity.io.backend import DIRECT_ALIGNMENT
from infinity.io.paths import user_path
from infinity.store.files import write_new
from infinity.store.manifest import (
    Manifest,
    StoredExtent,
    StoredFile,
    StoredShard,
    checksum,
    encode,
    manifest_name,
    tensors_name,
)
from infinity.store.owner import is_marked
from infinity.store.partial import PartialDirectory, is_checkpoint
from infinity.store.shard import ShardKey
from infinity.store.state import new_file_name

_BLOCK_BYTES = 8 << 20
_STATE_NAME = re.compile(r"infinity-(state-)?rank\d+")


class NewCheckpoint:
    """A checkpoint that is being written; a context manager that leaves nothing if it is left by an exception.

    Args:
        path: where it is to be: nothing, or a checkpoint that it replaces.
        num_bytes: what its shards will take, for a look at the room there is.
        later: where it will be found, if it is one rank's part of a checkpoint that is made at ``path`` and then moved.

    Raises:
        DirectoryError: something else is there, or the directory that is to hold it is not.
        DiskFullError: there is no room.
        StorageError: the system reported an error.

    Attributes:
        path: where it is to be found, absolute.
        directory: where it is until then.
    """

    def __init__(self, path: str | os.PathLike[str], num_bytes: int, *, later: Path | None = None) -> None:
        self._place = check_place(path) if later is None else Path(path)
        self.path = later or self._place
        with system_errors("making the checkpoint", self._place):
            self._partial = PartialDirectory(self._place)
        self.directory = self._partial.path
        self._name = new_file_name()
        self._file: int | None = None
        self._end = 0
        self._shards: list[StoredShard] = []
        try:
            _refuse_too_large(self._place, num_bytes)  # without what dead ones took
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> NewCheckpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave nothing, unless it is complete."""
        if self._file is not None:
            os.close(self._file)
        self._partial.close()

    def add(self, key: ShardKey, dtype: str, generation: int, memory: memoryview) -> None:
        """Write a shard.

        Args:
            key: which.
            dtype: of its elements.
            generation: the commit that it was made for.
            memory: its bytes, page aligned, a multiple of 4096 of them.

        Raises:
            DiskFullError: there is no room.
            StorageError: the system reported an error.
        """
        with system_errors("writing the checkpoint", self.directory / self._name):
            if self._file is None:
                self._file = _create(self._partial.descriptor, self._name)
            done = 0
            while done < len(memory):
                written = os.pwrite(self._file, memory[done : done + _BLOCK_BYTES], self._end + done)
                if written % DIRECT_ALIGNMENT:  # the disk is nearly full; what comes next says so
                    _go_through_cache(self._file)
                done += written
        extent = StoredExtent(file=0, offset=self._end, num_bytes=len(memory), checksum=checksum(memory))
        self._shards.append(
            StoredShard(
                unit=key.unit, part=key.part, kind=key.kind, dtype=dtype, generation=generation, extents=[extent]
            )
        )
        self._end += len(memory)

    def complete(self, manifest: Manifest, tensors: bytes | None) -> None:
        """All shards are written: describe them, make everything durable, and put it in its place.

        Args:
            manifest: all but files and shards.
            tensors: a file of tensors that it names.

        Raises:
            StorageError: the system reported an error; what was in its place stays.
        """
        files = [StoredFile(name=self._name, num_bytes=self._end, directory=str(self.path))] if self._shards else []
        self.finish(manifest.model_copy(update={"files": files, "shards": self._shards}), tensors)

    def finish(self, manifest: Manifest, tensors: bytes | None) -> None:
        """All data files are there that a manifest names: as ``complete``."""
        with system_errors("completing the checkpoint", self.directory):
            if self._file is not None:
                os.fdatasync(self._file)
            directory = self._partial.descriptor
            if tensors is not None:
                write_new(directory, tensors_name(manifest.number), tensors)
            write_new(directory, manifest_name(manifest.number), encode(manifest))
            os.fsync(directory)
            refuse_strangers(self._place)
            self._partial.put()


def check_place(path: object) -> Path:
    """Where a checkpoint is to be, absolute, if it may be there; nothing is changed.

    Raises:
        ConfigError: that is no path.
        DirectoryError: something else is there, or the directory that is to hold it is missing, or infinity's own.
        StorageError: the system reported an error.
    """
    place = user_path(path, "save_checkpoint").absolute()
    if place.name in ("", ".."):
        raise DirectoryError("expected a directory to be made, or a checkpoint to replace: give its name", path=place)
    with system_errors("looking at the place of the checkpoint", place):
        refuse_strangers(place)
        if _STATE_NAME.fullmatch(place.name):
            raise DirectoryError("this is the name of a run's own directory: give the checkpoint another", path=place)
        parent = place.parent.resolve()
        for each in (parent, *parent.parents):
            if is_marked(each):
                raise DirectoryError(
                    f"{each} is a state directory or a checkpoint, and holds nothing else: give a path beside it",
                    path=place,
                )
    return place


def _create(directory: int, name: str) -> int:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    try:
        return os.open(name, flags | os.O_DIRECT, 0o600, dir_fd=directory)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)
    return os.open(name, flags, 0o600, dir_fd=directory)


def _go_through_cache(file: int) -> None:
    """Have a file take any number of bytes at any place."""
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)


def refuse_strangers(path: Path) -> None:
    """Refuse a place where something is that is no checkpoint.

    Raises:
        DirectoryError: there is; or the directory that is to hold the place is missing.
        OSError: the system reported an error.
    """
    if not path.parent.is_dir():
        raise DirectoryError(
            f"the directory that is to hold the checkpoint is missing: mkdir -p {path.parent}", path=path
        )
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir() or not is_checkpoint(path):
        raise DirectoryError(
            "expected nothing here, or a checkpoint of infinity's to replace; this is something else, and stays "
            "untouched: give another path",
            path=path,
        )


def _refuse_too_large(path: Path, num_bytes: int) -> None:
    with system_errors("looking at the room for the checkpoint", path):
        status = os.statvfs(path.parent)
    free_bytes = status.f_bavail * status.f_frsize
    if num_bytes > free_bytes:
        raise DiskFullError(
            f"a checkpoint takes {num_bytes} bytes, and {free_bytes} are free there: free space, or give another path",
            path=path,
            errno=errno.ENOSPC,
        )
