"""``NewCheckpoint``: a state directory of its own, written shard by shard, that is there whole or not at all.

It is made under a partial name beside its place and renamed when all of it is durable, so what stood in that place
before is there until then. What is replaced must be a checkpoint of ours; anything else is refused untouched.

Everything here is synchronous and belongs on a worker thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from infinity.errors import DirectoryError, DiskFullError, StorageError, storage_error
from infinity.store.held import sync_directory
from infinity.store.manifest import (
    COMMIT_NAME,
    DATA_NAME,
    Manifest,
    StoredExtent,
    StoredFile,
    StoredShard,
    checksum,
    encode,
    manifest_name,
    tensors_name,
)
from infinity.store.owner import OWNER, write_owner
from infinity.store.shard import ShardKey
from infinity.store.state import new_file_name

_BLOCK_BYTES = 8 << 20


class NewCheckpoint:
    """A checkpoint that is being written; a context manager that leaves nothing if it is left by an exception.

    Args:
        path: where it is to be: nothing, or a checkpoint that it replaces.
        num_bytes: what its shards will take, for a look at the room there is.

    Raises:
        DirectoryError: something else is there, or the directory that is to hold it is not.
        DiskFullError: there is no room.
        StorageError: the system reported an error.

    Attributes:
        path: where it is to be, absolute.
        directory: where it is until then.
    """

    def __init__(self, path: str | os.PathLike[str], num_bytes: int) -> None:
        self.path = Path(path).absolute()
        self.directory = self.path.with_name(f"{self.path.name}.{secrets.token_hex(8)}.partial")
        _refuse_strangers(self.path)
        _refuse_too_large(self.path, num_bytes)
        with _doing("making the checkpoint", self.directory):
            self.directory.mkdir(0o700)
            self._descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
            write_owner(self._descriptor, 0)
        self._name = new_file_name()
        self._file: int | None = None
        self._end = 0
        self._shards: list[StoredShard] = []

    def __enter__(self) -> NewCheckpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave nothing, unless it is complete."""
        if self._file is not None:
            os.close(self._file)
        os.close(self._descriptor)
        shutil.rmtree(self.directory, ignore_errors=True)  # which is there no more if all went well

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
        path = self.directory / self._name
        with _doing("writing the checkpoint", path):
            if self._file is None:
                self._file = _create(path)
            done = 0
            while done < len(memory):
                written = os.pwrite(self._file, memory[done : done + _BLOCK_BYTES], self._end + done)
                if written % 4096:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
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
        with _doing("completing the checkpoint", self.directory):
            if self._file is not None:
                os.fdatasync(self._file)
            if tensors is not None:
                _write(self.directory / tensors_name(manifest.number), tensors)
            _write(self.directory / manifest_name(manifest.number), encode(manifest))
            os.fsync(self._descriptor)
            _refuse_strangers(self.path)
            replaced = self.path.with_name(f"{self.path.name}.{secrets.token_hex(8)}.partial")
            is_replaced = self.path.exists()
            if is_replaced:
                self.path.rename(replaced)
            self.directory.rename(self.path)
            sync_directory(self.path.parent)
            if is_replaced:
                shutil.rmtree(replaced, ignore_errors=True)


def _create(path: Path) -> int:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return os.open(path, flags, 0o600)


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _refuse_strangers(path: Path) -> None:
    """Refuse a place where something is that is no checkpoint."""
    if not path.parent.is_dir():
        raise DirectoryError(
            f"the directory that is to hold the checkpoint is missing: mkdir -p {path.parent}", path=path
        )
    if not os.path.lexists(path):
        return
    names = [each.name for each in path.iterdir()] if path.is_dir() and not path.is_symlink() else None
    if names is None or OWNER not in names or not all(_is_ours(name) for name in names):
        raise DirectoryError(
            "expected nothing here, or a checkpoint of infinity's to replace; this is something else, and stays "
            "untouched: give another path",
            path=path,
        )


def _is_ours(name: str) -> bool:
    return name == OWNER or bool(COMMIT_NAME.fullmatch(name) or DATA_NAME.fullmatch(name))


def _refuse_too_large(path: Path, num_bytes: int) -> None:
    with _doing("looking at the room for the checkpoint", path):
        status = os.statvfs(path.parent)
    free_bytes = status.f_bavail * status.f_frsize
    if num_bytes > free_bytes:
        raise DiskFullError(
            f"a checkpoint takes {num_bytes} bytes, and {free_bytes} are free there: free space, or give another path",
            path=path,
            errno=errno.ENOSPC,
        )


@contextlib.contextmanager
def _doing(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(action, error, path=path) from error
