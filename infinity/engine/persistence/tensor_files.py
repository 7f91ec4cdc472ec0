"""safetensors files written piece by piece, of tensors that are never whole in memory.

The format is small: the length of the header in eight bytes, a JSON header with each tensor's type, shape and place,
then the tensors' bytes. So a file's size and every place in it are known before the first byte is, and pieces may come
in any order. Several files are what Hugging Face's libraries expect of a model that is cut: ``model-00001-of-00002``,
and so on, with an index beside them.

Everything is written into a directory of another name, which gets its own only when all of it is durable: whoever sees
the directory sees all of it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from infinity.errors import DirectoryError, DiskFullError, ModelError, storage_error, system_errors
from infinity.io.memory import as_bytes
from infinity.store.held import sync_directory

DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What the format calls each dtype."""

INDEX_NAME = "model.safetensors.index.json"

_ALIGNMENT = 8
_WINDOW_BYTES = 32 << 20


class Entry(NamedTuple):
    """A tensor that is to be written.

    Attributes:
        name: what it is called.
        dtype: of its elements.
        shape: its sizes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


class PlannedFile(NamedTuple):
    """A file that is to be written.

    Attributes:
        name: what it is called.
        header: what comes before the tensors.
        places: where each tensor begins.
        num_bytes: its size.
    """

    name: str
    header: bytes
    places: Mapping[str, int]
    num_bytes: int


def plan_files(
    entries: Sequence[Entry], max_file_bytes: float = math.inf, *, tied: Mapping[str, str] | None = None
) -> list[PlannedFile]:
    """Divide tensors, in order, into files of at most so many bytes of them; a larger one gets a file of its own.

    Args:
        entries: the tensors.
        max_file_bytes: how many bytes of them there are in a file.
        tied: further names of tensors, kept in the header as ``safetensors.torch.save_model`` keeps them.

    Raises:
        ModelError: the format has no word for a dtype.
    """
    for entry in entries:
        if entry.dtype not in DTYPES:
            raise ModelError(f"tensor {entry.name}: safetensors files cannot hold {entry.dtype}; export another dtype")
    groups: list[list[Entry]] = [[]]
    room = max_file_bytes
    for entry in entries:
        if groups[-1] and entry.num_bytes > room:
            groups.append([])
            room = max_file_bytes
        groups[-1].append(entry)
        room -= entry.num_bytes
    count = len(groups)
    names = (
        ["model.safetensors"]
        if count == 1
        else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    )
    return [_plan_file(name, group, tied or {}) for name, group in zip(names, groups, strict=True)]


def _plan_file(name: str, entries: Sequence[Entry], tied: Mapping[str, str]) -> PlannedFile:
    names = {entry.name for entry in entries}
    aliases = {alias: of for alias, of in tied.items() if of in names}
    header: dict[str, object] = {"__metadata__": {"format": "pt", **aliases}}
    offsets, end = {}, 0
    for entry in sorted(entries, key=lambda entry: -entry.dtype.itemsize):  # so that all of them are aligned
        offsets[entry.name], start = end, end
        end += entry.num_bytes
        header[entry.name] = {"dtype": DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    before = len(text).to_bytes(8, "little") + text
    return PlannedFile(
        name, before, {name: len(before) + offset for name, offset in offsets.items()}, len(before) + end
    )


class OutputFile:
    """A file of known size that is filled in any order, and is not kept in the page cache.

    Args:
        path: where.
        num_bytes: its size.
        is_new: whether it is made, and given this size; else it is there.

    Raises:
        StorageError: it cannot be made.
    """

    def __init__(self, path: Path, num_bytes: int, *, is_new: bool = True) -> None:
        self.path = path
        self._written_bytes = 0
        self._dirty = (0, 0)
        try:
            self._descriptor = os.open(
                path, os.O_WRONLY | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if is_new else 0), 0o666
            )
            if is_new:
                os.ftruncate(self._descriptor, num_bytes)
        except OSError as error:
            raise storage_error("creating a file", error, path=path) from error

    def write(self, offset: int, data: memoryview | bytes) -> None:
        """Put bytes in their place.

        Raises:
            DiskFullError: there is no room.
            StorageError: the system reported an error.
        """
        rest = memoryview(data)
        position = offset
        try:
            while rest:
                done = os.pwrite(self._descriptor, rest, position)
                rest, position = rest[done:], position + done
        except OSError as error:
            raise storage_error("writing", error, path=self.path, offset=offset, expected_bytes=len(data)) from error
        self._written_bytes += len(data)
        if self._written_bytes >= _WINDOW_BYTES:
            self._give_way()

    def _give_way(self) -> None:
        """Have the system write what it holds of this file, and forget what it has written: others need the memory."""
        self._written_bytes = 0
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, *, durable: bool) -> None:
        """Close it, once all that was written is on the disk if that is wanted.

        Raises:
            StorageError: the system reported an error; it is closed all the same.
        """
        try:
            if durable:
                os.fsync(self._descriptor)
                self._give_way()
        except OSError as error:
            raise storage_error("making a file durable", error, path=self.path) from error
        finally:
            os.close(self._descriptor)


class TensorFiles:
    """safetensors files that are being written.

    Args:
        directory: where; it exists.
        files: which.

    Raises:
        StorageError: a file cannot be made.
    """

    def __init__(self, directory: Path, files: Sequence[PlannedFile]) -> None:
        self._open: dict[str, OutputFile] = {}
        self._places: dict[str, tuple[OutputFile, int]] = {}
        try:
            for file in files:
                self._open[file.name] = output = OutputFile(directory / file.name, file.num_bytes)
                output.write(0, file.header)
                self._places |= {name: (output, offset) for name, offset in file.places.items()}
        except BaseException:
            self.close(durable=False)
            raise

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        """Elements of a tensor, from the element ``start`` on in the order of its indices; dense, of its dtype.

        Raises:
            StorageError: the system reported an error.
        """
        if values.numel():
            output, offset = self._places[name]
            output.write(offset + start * values.element_size(), bytes_of(values))

    def close(self, *, durable: bool) -> None:
        """Close all files.

        Raises:
            StorageError: the system reported an error; they are closed all the same.
        """
        with contextlib.ExitStack() as stack:
            for output in self._open.values():
                stack.callback(output.close, durable=durable)


def bytes_of(values: torch.Tensor) -> memoryview:
    """The memory of a dense tensor on the CPU."""
    return as_bytes(values.detach().contiguous().view(-1).view(torch.uint8))


def index_of(files: Sequence[PlannedFile], entries: Sequence[Entry]) -> dict[str, object]:
    """The index that tells in which file each tensor is."""
    return {
        "metadata": {"total_size": sum(entry.num_bytes for entry in entries)},
        "weight_map": {name: file.name for file in files for name in file.places},
    }


def check_output(path: Path, num_bytes: int) -> None:
    """Refuse, before anything is written, a directory that could not be made of so many bytes.

    Raises:
        DirectoryError: something is there that is no empty directory, or its parent is none.
        DiskFullError: there is no room.
        StorageError: the system reported an error.
    """
    parent = path.absolute().parent
    with system_errors("looking at the output directory", path):
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise DirectoryError("the output is a file or a link; give a directory that does not exist", path=path)
        if path.is_dir() and any(path.iterdir()):
            raise DirectoryError("the output directory is not empty; give one that does not exist", path=path)
        if not parent.is_dir():
            raise DirectoryError("the output's parent directory does not exist; create it first", path=path)
        status = os.statvfs(parent)
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes < num_bytes:
        raise DiskFullError(
            f"the output takes {num_bytes} bytes, and {free_bytes} are free: short by {num_bytes - free_bytes}; free "
            "space there, or give a directory on another disk",
            path=path,
            expected_bytes=num_bytes,
            got_bytes=free_bytes,
        )


@contextlib.contextmanager
def output_directory(path: Path) -> Iterator[Path]:
    """A directory to write to, which becomes ``path`` at the end; nothing of it is left where that fails.

    Raises:
        StorageError: the system reported an error.
    """
    path = path.absolute()
    partial = path.with_name(f"{path.name}.partial-{secrets.token_hex(4)}")
    try:
        with system_errors("creating the output directory", partial):
            partial.mkdir()
        yield partial
        with system_errors("giving the output directory its name", path):
            sync_directory(partial)
            partial.rename(path)
            sync_directory(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_text(path: Path, text: str) -> None:
    """A small new file, durable.

    Raises:
        StorageError: the system reported an error.
    """
    content = text.encode()
    output = OutputFile(path, len(content))
    try:
        output.write(0, content)
    finally:
        output.close(durable=True)


def sync_files(directory: Path) -> None:
    """Make durable what others have written into a directory, and into those inside it.

    Raises:
        StorageError: the system reported an error.
    """
    for path in (*directory.rglob("*"), directory):
        with system_errors("making a file durable", path):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
