"""A checkpoint of a commit without a copy of its bytes: the run's data files under a second name.

Where the file system shares blocks between files (XFS, btrfs), the checkpoint gets clones of them. Elsewhere it gets
hard links, and the run must not write these files any more: it goes on in new ones, of the same size, and its old ones
are only read until nothing that it keeps is in them. What no commit needs of a linked file is given back first, so the
disk holds what a copy would need, and nothing has been copied.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from infinity.errors import DirectoryError, DiskFullError, StorageError, storage_error
from infinity.io.completion import call_in_thread
from infinity.io.holes import clone, punch
from infinity.store.commits import Commit
from infinity.store.manifest import DATA_NAME
from infinity.store.nvme import NvmeTier
from infinity.store.saving import NewCheckpoint
from infinity.store.state import OpenState
from infinity.store.versions import Held
from infinity.store.volumes import MARGIN_BYTES, Volume


async def link(
    nvme: NvmeTier, state: OpenState, commit: Commit, path: str | os.PathLike[str], *, later: Path | None = None
) -> bool:
    """Make a checkpoint of a commit that shares the run's bytes; false, and nothing is changed, where that cannot be.

    Args:
        nvme: has the data files; nobody writes meanwhile.
        state: has the commit's tensors.
        commit: the commit.
        path: where the checkpoint is to be.
        later: where it will be found, if it is one rank's part of a checkpoint that is moved when all are made.

    Raises:
        DirectoryError: something else is there, or the directory that is to hold it is missing; or the run's own
            directory is not where it was.
        StorageError: the system reported an error.
    """
    with _typed_errors(path):
        return await _link(nvme, state, commit, path, later)


async def _link(
    nvme: NvmeTier, state: OpenState, commit: Commit, path: str | os.PathLike[str], later: Path | None
) -> bool:
    volumes = list(dict.fromkeys(volume for version in commit.held.values() for volume in version.extents))
    await call_in_thread(lambda: _check_places(volumes))
    checkpoint = await call_in_thread(lambda: NewCheckpoint(path, 0, later=later))
    try:
        if not await call_in_thread(lambda: _is_one_device(volumes, checkpoint.directory)):
            return False
        if not await call_in_thread(lambda: _clone_all(volumes, commit.held, checkpoint.directory)):
            written = [volume for volume in volumes if nvme.volumes.is_written(volume)]
            if not await call_in_thread(lambda: _has_room(written)):
                return False
            try:
                for volume in written:
                    await nvme.volumes.retire(volume)
            except DiskFullError:
                return False
            finally:
                state.has_new_files()
            await call_in_thread(lambda: _link_all(volumes, checkpoint.directory))
        manifest, target = commit.manifest, str(checkpoint.path)
        files = [file.model_copy(update={"directory": target}) for file in manifest.files]
        tensors = await call_in_thread(lambda: state.read_tensors(manifest))
        await call_in_thread(lambda: checkpoint.finish(manifest.model_copy(update={"files": files}), tensors))
        return True
    finally:
        await call_in_thread(checkpoint.close)


def _check_places(volumes: Sequence[Volume]) -> None:
    """Files are linked by name, and the names must be those of the files that are open."""
    for volume in volumes:
        if not volume.file.path.is_file():
            raise DirectoryError(
                "the run's NVMe directory was moved or removed while it runs: move it back",
                path=volume.file.path.parent,
            )


def _is_one_device(volumes: Sequence[Volume], directory: Path) -> bool:
    device = directory.stat().st_dev
    return all(volume.file.path.stat().st_dev == device for volume in volumes)


def _clone_all(volumes: Sequence[Volume], held: Held, directory: Path) -> bool:
    """Share the blocks of all files; whether the file system can. Of each clone only what is held is kept."""
    for volume in volumes:
        target = directory / volume.file.path.name
        if not clone(volume.file.path, target):
            return False
        extents = sorted(extent for version in held.values() for extent in version.extents.get(volume, ()))
        holes, end = [], 0
        for extent in extents:
            if extent.offset > end:
                holes.append((end, extent.offset))
            end = extent.offset + extent.num_bytes
        if end < volume.allocator.size_bytes:
            holes.append((end, volume.allocator.size_bytes))
        punch(target, holes)
    return True


def _has_room(volumes: Sequence[Volume]) -> bool:
    """Whether new files can take the place of these, once what is free in these has been given back."""
    needed = sum(volume.allocator.size_bytes - volume.allocator.free_bytes for volume in volumes)
    if not volumes:
        return True
    status = os.statvfs(volumes[0].file.path.parent)
    return needed + MARGIN_BYTES <= status.f_bavail * status.f_frsize


def _link_all(volumes: Sequence[Volume], directory: Path) -> None:
    for volume in volumes:
        assert DATA_NAME.fullmatch(volume.file.path.name)
        os.link(volume.file.path, directory / volume.file.path.name)


@contextlib.contextmanager
def _typed_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise storage_error("linking the checkpoint", error, path=path) from error
