"""``StoredCommit``: one commit on disk, read without an engine, every byte checked.

A shard's bytes are handed out either whole, in memory of their own, or block by block as they come. In both cases all
bytes of every extent that is touched are read and compared with its checksum: there is no reading of less, since what
was not checked may be anything. Of a shard that is streamed the checksum is known only at the end of each extent, so
whoever streams must be able to drop what was made of it.

Files are read around the page cache, which a state of hundreds of gigabytes would empty of everything else. Nothing
here is written, and everything is synchronous, on one thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import xxhash
from safetensors.torch import load

from infinity.errors import (
    EngineStateError,
    ManifestError,
    MismatchError,
    NoCommitError,
    ShortTransferError,
    StorageError,
    storage_error,
)
from infinity.io.backend import DIRECT_ALIGNMENT
from infinity.io.memory import allocate, as_bytes
from infinity.store.finding import (
    CommitFile,
    find_directories,
    hold_off_jobs,
    list_commits,
    open_regular,
    read_manifest,
    read_tensors,
)
from infinity.store.manifest import Manifest, StoredExtent, StoredShard
from infinity.store.shard import ShardKey

BLOCK_BYTES = 4 << 20
"""How much is read at a time."""


class _DataFile:
    """A file of shards.

    Args:
        path: where it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = open_regular(path, os.O_DIRECT)
            self._direct = True
        except StorageError as error:
            if error.errno != errno.EINVAL:
                raise
            self._descriptor = open_regular(path)
            self._direct = False

    @property
    def num_bytes(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read(self, offset: int, memory: memoryview) -> None:
        """Fill ``memory``, which is page aligned.

        Raises:
            ShortTransferError: the file ends before that.
            StorageError: it could not be read.
        """
        done = 0
        while done < len(memory):
            try:
                got = os.preadv(self._descriptor, [memory[done:]], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and self._direct:  # some file systems tell only now
                    self._reopen()
                    continue
                raise storage_error(
                    "read", error, path=self.path, offset=offset, expected_bytes=len(memory), got_bytes=done
                ) from error
            done += got
            if got == 0 or (self._direct and done < len(memory) and done % DIRECT_ALIGNMENT):
                raise ShortTransferError(
                    "the file ends early", path=self.path, offset=offset, expected_bytes=len(memory), got_bytes=done
                )
        if not self._direct:
            with contextlib.suppress(OSError):  # a hint
                os.posix_fadvise(self._descriptor, offset, len(memory), os.POSIX_FADV_DONTNEED)

    def _reopen(self) -> None:
        self.close()
        self._descriptor = open_regular(self.path)
        self._direct = False

    def close(self) -> None:
        os.close(self._descriptor)


class StoredCommit:
    """A commit that is read; made by ``StoredCommit.open``, a context manager that closes itself.

    Args:
        manifest: what the commit says.
        path: its file.
        directories: where data files are looked for.

    Attributes:
        manifest: what the commit says.
        path: its file.
        directories: where data files are looked for.
        shards: all of them.
        passed_over: what is wrong with newer commits that could not be used.
    """

    def __init__(self, manifest: Manifest, path: Path, directories: Sequence[Path]) -> None:
        self.manifest = manifest
        self.path = path
        self.directories = list(directories)
        self.shards: dict[ShardKey, StoredShard] = {shard.key: shard for shard in manifest.shards}
        self.passed_over: list[StorageError] = []
        self._files: dict[int, _DataFile] = {}
        self._closing = contextlib.ExitStack()
        self._is_closed = False

    def __repr__(self) -> str:
        closed = ", closed" if self._is_closed else ""
        return f"<{type(self).__name__} {self.manifest.number} of {self.path.parent}{closed}>"

    @classmethod
    def open(
        cls,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        number: int | None = None,
        *,
        lock: bool = True,
    ) -> StoredCommit:
        """Open a commit, and hold off jobs until it is closed.

        Args:
            paths: state directories, or NVMe paths that hold them: all of one state.
            number: which commit; ``None`` for the newest that can be used.
            lock: false for whoever owns the directories.

        Raises:
            ConfigError: these are no paths.
            DirectoryError: a path is not such a directory.
            DirectoryInUseError: a live job owns one.
            ManifestError: the commit ``number`` is damaged.
            NoCommitError: there is no such commit, or none that can be used.
            StorageError: a file could not be read.
        """
        directories = find_directories(paths)
        with contextlib.ExitStack() as stack:
            for directory in directories if lock else ():
                held = hold_off_jobs(directory)
                if held is not None:
                    stack.callback(os.close, held)
            file, manifest, passed_over = _choose(list_commits(directories), number, directories)
            commit = cls(manifest, file.path, directories)
            commit.passed_over = passed_over
            commit._closing = stack.pop_all()
            return commit

    def __contains__(self, key: object) -> bool:
        return key in self.shards

    def __enter__(self) -> StoredCommit:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Let jobs in again. Closing twice is harmless."""
        self._is_closed = True
        while self._files:
            self._files.popitem()[1].close()
        self._closing.close()

    def keep(self, closing: contextlib.ExitStack) -> None:
        """Close something else, too, when this is closed."""
        self._closing.push(closing)

    def check_open(self) -> None:
        """Refuse to read what may be replaced by now.

        Raises:
            EngineStateError: it was closed.
        """
        if self._is_closed:
            raise EngineStateError(f"{self!r}: read what you need before it is closed, or open it again")

    def read(self, key: ShardKey) -> torch.Tensor:
        """A shard, whole: ``uint8``, page aligned, in memory of its own.

        Raises:
            ManifestError: the commit has none of this name.
            MismatchError: its bytes are not those that were written.
            ShortTransferError: a file ends early.
            StorageError: a file is missing or could not be read.
        """
        shard = self.shard(key)
        for extent in shard.extents:
            self._check_size(shard, extent)  # before memory is taken for what is not there
        whole = allocate(shard.num_bytes)
        memory, end = as_bytes(whole), 0
        for extent in shard.extents:
            start, end = end, end + extent.num_bytes
            for _ in self._stream(shard, extent, memory[start:end]):
                pass
        return whole

    def blocks(
        self, key: ShardKey, start: int = 0, stop: int | None = None, *, block_bytes: int = BLOCK_BYTES
    ) -> Iterator[memoryview]:
        """The bytes of a shard from ``start`` to ``stop``, as they come; each block is void once the next is asked for.

        What is wrong is known, and raised, at the end of each extent.

        Raises:
            ManifestError: the commit has none of this name.
            MismatchError: the bytes of the extent that has just ended are not those that were written.
            ShortTransferError: a file ends early.
            StorageError: a file is missing or could not be read.
        """
        shard = self.shard(key)
        stop = shard.num_bytes if stop is None else stop
        assert 0 <= start <= stop <= shard.num_bytes
        memory: memoryview | None = None
        end = 0
        for extent in shard.extents:
            begin, end = end, end + extent.num_bytes
            if begin >= stop or end <= start:
                continue
            if memory is None:
                memory = as_bytes(allocate(min(block_bytes, max(each.num_bytes for each in shard.extents))))
            position = begin
            for block in self._stream(shard, extent, memory):
                first, last = max(start - position, 0), min(stop - position, len(block))
                if first < last:
                    yield block[first:last]
                position += len(block)

    def digest(self, shard: StoredShard, extent: StoredExtent, memory: memoryview) -> str:
        """The checksum that an extent's bytes have now.

        Args:
            shard: whose extent it is.
            extent: which.
            memory: what it is read into, block by block; page aligned.

        Raises:
            ShortTransferError: the file ends early.
            StorageError: it is missing or could not be read.
        """
        digest = xxhash.xxh3_64()
        for _ in self._read(shard, extent, memory, digest.update):
            pass
        return digest.hexdigest()

    def shard(self, key: ShardKey) -> StoredShard:
        """Where a shard is.

        Raises:
            ManifestError: the commit has none of this name.
        """
        if key not in self.shards:
            raise ManifestError(f"the commit has no shard {key}", path=self.path)
        return self.shards[key]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors beside the manifest, by the names that its documents give them.

        Raises:
            ManifestError: they are damaged.
            ShortTransferError: their file ends early.
            StorageError: it could not be read.
        """
        self.check_open()
        if self.manifest.tensors is None:
            return {}
        return load_tensors(read_tensors(self.manifest, self.path), self.path)

    def file(self, shard: StoredShard, extent: StoredExtent) -> Path:
        """Where the file of an extent is.

        Raises:
            StorageError: it is missing, or no regular file.
        """
        return self._file(shard, extent).path

    def _stream(self, shard: StoredShard, extent: StoredExtent, memory: memoryview) -> Iterator[memoryview]:
        """Read an extent, a block at a time, and compare its checksum."""
        digest = xxhash.xxh3_64()
        yield from self._read(shard, extent, memory, digest.update)
        got = digest.hexdigest()
        if got != extent.checksum:
            raise MismatchError(
                f"shard {shard.key} is damaged: expected checksum {extent.checksum}, got {got}",
                path=self._file(shard, extent).path,
                offset=extent.offset,
                expected_bytes=extent.num_bytes,
            )

    def _read(
        self, shard: StoredShard, extent: StoredExtent, memory: memoryview, see: Callable[[memoryview], object]
    ) -> Iterator[memoryview]:
        """Fill ``memory`` with an extent: over and over where the extent is the longer of the two."""
        file, step = self._file(shard, extent), min(len(memory), BLOCK_BYTES)
        wraps = len(memory) < extent.num_bytes
        for done in range(0, extent.num_bytes, step):
            length = min(step, extent.num_bytes - done)
            at = 0 if wraps else done
            block = memory[at : at + length]
            try:
                file.read(extent.offset + done, block)
            except ShortTransferError as error:
                raise self._too_short(shard, extent, file) from error
            see(block)
            yield block

    def _check_size(self, shard: StoredShard, extent: StoredExtent) -> None:
        file = self._file(shard, extent)
        if file.num_bytes < extent.offset + extent.num_bytes:
            raise self._too_short(shard, extent, file)

    def _too_short(self, shard: StoredShard, extent: StoredExtent, file: _DataFile) -> ShortTransferError:
        return ShortTransferError(
            f"shard {shard.key} is not whole: the file ends early",
            path=file.path,
            offset=extent.offset,
            expected_bytes=extent.num_bytes,
            got_bytes=max(0, min(file.num_bytes - extent.offset, extent.num_bytes)),
        )

    def _file(self, shard: StoredShard, extent: StoredExtent) -> _DataFile:
        self.check_open()
        if extent.file not in self._files:
            stored = self.manifest.files[extent.file]
            path = next((each / stored.name for each in self.directories if (each / stored.name).exists()), None)
            if path is None:
                raise StorageError(
                    f"the file of shard {shard.key} is missing; searched: {', '.join(map(str, self.directories))}. It "
                    f"was in {stored.directory}: give that directory too",
                    path=stored.name,
                    errno=errno.ENOENT,
                )
            self._files[extent.file] = _DataFile(path)
        return self._files[extent.file]


def _choose(
    files: Sequence[CommitFile], number: int | None, directories: Sequence[Path]
) -> tuple[CommitFile, Manifest, list[StorageError]]:
    """The commit that is asked for, and what is wrong with newer ones."""
    damaged: list[StorageError] = []
    for file in files:
        if number is not None:
            if file.number == number:
                return file, read_manifest(file), []
            continue
        try:
            return file, read_manifest(file), damaged
        except StorageError as error:
            damaged.append(error)
    where = directories[0] if directories else Path()
    if number is not None:
        there = ", ".join(str(file.number) for file in files) or "none"
        raise NoCommitError(f"there is no commit {number}; there are: {there}", path=where)
    if damaged:
        raise NoCommitError(f"no commit can be used; of the newest: {damaged[0]}", path=where) from damaged[0]
    raise NoCommitError("nothing has been committed here", path=where)


def load_tensors(content: bytes, path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a commit's file.

    Raises:
        ManifestError: it is no such file.
    """
    try:
        return load(content)
    except Exception as error:  # safetensors' own errors have no common class
        raise ManifestError(f"commit cannot be used: its file of tensors cannot be read: {error}", path=path) from error
