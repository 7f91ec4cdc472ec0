"""``OpenState``: the state directories of a run, and the commits that are in them.

``open_state`` takes the directories over and finds the commits of which every record is whole; it changes nothing. Once
the caller has decided to start there, ``tidy`` removes what no commit has: files that a crash left half written, data
files that no commit names. Only a directory that was never part of a commit is as good as new: once the first record
of a run is there, and before its making ends, each of its other directories gets a mark that it belongs to this state.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from infinity.errors import ManifestError, StorageError
from infinity.store.directory import StateDirectory, open_state_directories
from infinity.store.files import DirectoryFiles
from infinity.store.held import PROBE_NAME
from infinity.store.manifest import (
    COMMIT_NAME,
    DATA_NAME,
    MARK_NAME,
    MEMBER_NAME,
    Manifest,
    StoredExtent,
    decode,
    long_checksum,
    manifest_name,
    tensors_name,
)

OpenFiles = Callable[[StateDirectory], DirectoryFiles]


@dataclass(slots=True)
class OpenState:
    """State directories that are held, and what is in them.

    Attributes:
        directories: one below each NVMe path, in the order of the paths.
        every: the small files of each.
        files: those of the one that has the commits, or is to have them.
        state: names the run's state.
        manifests: the commits, oldest first.
        places: where each data file is that they name: the index of its directory.
        highest_number: the highest that any rank has given a commit, as far as it is known.
        of_ranks: the state directories of all ranks, where there are several.
    """

    directories: list[StateDirectory]
    every: list[DirectoryFiles]
    files: DirectoryFiles
    state: str
    manifests: list[Manifest]
    places: dict[str, int]
    highest_number: int = 0
    of_ranks: list[Path] = field(default_factory=list)
    _is_durable: bool = False

    def active_file(self, index: int) -> str | None:
        """The data file of a directory that can be written on: the largest that nobody else has linked."""
        directory = self.directories[index]
        sizes = {}
        for name, place in self.places.items():
            if place == index:
                status = os.stat(name, dir_fd=directory.descriptor)
                if status.st_nlink == 1:
                    sizes[name] = status.st_size
        return max(sizes, key=lambda name: (sizes[name], name), default=None)

    def tidy(self) -> None:
        """The run starts here: remove what no commit has. Synchronous.

        Raises:
            StorageError: the system reported an error.
        """
        if not self.manifests:
            for directory in self.directories:  # a run ended before its first commit
                directory.is_kept = False
        else:
            self.mark()  # as the run before was about to
        _remove_orphans(self.every, self.files, self.manifests, self.places)

    def keep_only(self, numbers: Set[int]) -> None:
        """Remove all commits but some, which other ranks have too; before anybody uses any. Synchronous.

        Raises:
            StorageError: the system reported an error.
        """
        doomed = [each for each in self.manifests if each.number not in numbers]
        if len(doomed) == len(self.manifests):
            self._unmark()  # first: without a record they would be of a run whose commits are elsewhere
        for manifest in doomed:
            self.files.unlink(manifest_name(manifest.number))
        if doomed:
            self.files.sync()
        for manifest in doomed:
            self.files.unlink(tensors_name(manifest.number))
        self.manifests = [each for each in self.manifests if each.number in numbers]
        named = {file.name for manifest in self.manifests for file in manifest.files}
        self.places = {name: place for name, place in self.places.items() if name in named}

    @property
    def member_of(self) -> str | None:
        """The state of several ranks to which the directory belongs, whether it has had a commit or not."""
        return next((match[1] for name in self.files.names() if (match := MEMBER_NAME.fullmatch(name))), None)

    def enlist(self) -> None:
        """Have the directory belong to the state of several ranks before it has a commit, durably. Synchronous.

        A rank that is found without commits later has then never had one; else its directory is another.

        Raises:
            StorageError: the system reported an error.
        """
        name = f"member-{self.state}.json"
        names = [each for each in self.files.names() if MEMBER_NAME.fullmatch(each)]
        if names != [name]:
            self.files.write(name, b"{}\n")
            self.files.sync()
            for each in names:
                if each != name:
                    self.files.unlink(each)
        self.directories[self.every.index(self.files)].is_member = True

    def keep(self) -> None:
        """There is a commit: the directories stay when the run ends."""
        for directory in self.directories:
            directory.is_kept = True

    def has_new_files(self) -> None:
        """Data files were made, whose names are not durable yet."""
        self._is_durable = False

    def make_durable(self) -> None:
        """See to it that the data files are found after a crash; they are all made by now.

        Raises:
            StorageError: the system reported an error.
        """
        if not self._is_durable:
            for files in self.every:
                files.sync()
            self._is_durable = True

    def mark(self) -> None:
        """There is a commit: the directories that have no record of it are known as its own from now on.

        Raises:
            StorageError: the system reported an error.
        """
        name = _mark_name(self.state)
        for files in self.every:
            if files is not self.files and name not in files.names():
                files.write(name, b"{}\n")
                files.sync()

    def _unmark(self) -> None:
        for files in self.every:
            marks = [name for name in files.names() if MARK_NAME.fullmatch(name)]
            for name in marks:
                files.unlink(name)
            if marks:
                files.sync()

    def read_tensors(self, manifest: Manifest) -> bytes | None:
        """The content of a commit's file of tensors.

        Raises:
            StorageError: it cannot be read.
            ManifestError: it is not what was written.
        """
        return None if manifest.tensors is None else _tensors(self.files, manifest)

    def close(self) -> None:
        """Release the directories."""
        for directory in self.directories:
            directory.close()


def new_file_name() -> str:
    """For a data file: no two have the same."""
    return f"shards-{secrets.token_hex(8)}.bin"


def open_state(
    paths: Sequence[str | os.PathLike[str]],
    *,
    rank: int = 0,
    open_files: OpenFiles = DirectoryFiles,
) -> OpenState:
    """Take over the state directories below ``paths``, or make them. Synchronous; belongs on a worker thread.

    Args:
        paths: existing, writable directories.
        rank: of this process.
        open_files: how small files are written.

    Raises:
        DirectoryError: as for ``open_directories``.
        ManifestError: a commit is damaged; or the directories hold those of different states, or a part of one.
        StorageError: the system reported an error, or a data file that a commit names is missing or too short.
    """
    directories = open_state_directories(paths, rank=rank)
    with contextlib.ExitStack() as stack:
        for directory in directories:
            stack.callback(directory.close)
        every = [open_files(directory) for directory in directories]
        homes = [files for files in every if any(map(_is_record, files.names()))]
        if len(homes) > 1:
            raise ManifestError(
                f"{homes[0].path} has commits too, of another run: give the directories of one run", path=homes[1].path
            )
        home = homes[0] if homes else every[0]
        manifests, faults = _read_commits(home)
        if faults:
            raise ManifestError(
                f"a commit is damaged: {faults[-1]}. Restore a checkpoint; or go on from the commit before "
                f"({manifests[-1].number if manifests else 'there is none'}) once the damaged one is removed: "
                f"python -m infinity.checkpoint prune {home.path} --commit NUMBER",
                path=faults[-1].path,
            ) from faults[-1]
        if len({manifest.state for manifest in manifests}) > 1:
            raise ManifestError("expected commits of one state, got those of several", path=home.path)
        _check_marks(every, manifests)
        places = _find_data(every, manifests)
        state = manifests[-1].state if manifests else secrets.token_hex(16)
        stack.pop_all()
        return OpenState(directories, every, home, state, manifests, places)


def _mark_name(state: str) -> str:
    return f"state-{state}.json"


def _check_marks(every: Sequence[DirectoryFiles], manifests: Sequence[Manifest]) -> None:
    """Refuse directories that have data of other states than the commits are of."""
    members = (MEMBER_NAME.fullmatch(name) for files in every for name in files.names())
    expected = {_mark_name(manifest.state) for manifest in manifests}
    expected |= {_mark_name(match[1]) for match in members if match}  # its first commit has been undone
    for files in every:
        foreign = [name for name in files.names() if MARK_NAME.fullmatch(name) and name not in expected]
        if foreign:
            raise ManifestError(
                "this directory has data of a run whose commits are in another directory; give all NVMe directories "
                f"that the run had, or remove {files.path} if the run is not needed any more",
                path=files.path,
            )


def _is_mark(name: str) -> bool:
    return bool(MARK_NAME.fullmatch(name) or MEMBER_NAME.fullmatch(name))


def _is_record(name: str) -> bool:
    match = COMMIT_NAME.fullmatch(name)
    return match is not None and match[2] == "json" and not match[3]


def _read_commits(files: DirectoryFiles) -> tuple[list[Manifest], list[ManifestError]]:
    """The commits that are whole, oldest first, and why the others are not."""
    manifests, faults = [], []
    for name in files.names():
        if not _is_record(name):
            continue
        try:
            manifest = decode(files.read(name), files.path / name)
            if manifest_name(manifest.number) != name:
                raise ManifestError(f"expected another number, got {manifest.number}", path=files.path / name)
            if manifest.tensors is not None:
                _tensors(files, manifest)
            manifests.append(manifest)
        except ManifestError as error:
            faults.append(error)
    return sorted(manifests, key=lambda manifest: manifest.number), faults


def _tensors(files: DirectoryFiles, manifest: Manifest) -> bytes:
    name, expected = tensors_name(manifest.number), manifest.tensors
    assert expected is not None
    if name not in files.names():
        raise ManifestError("commit cannot be used: its file of tensors is missing", path=files.path / name)
    size_bytes = files.size_bytes(name)
    content = files.read(name) if size_bytes == expected.num_bytes else b""
    if size_bytes != expected.num_bytes or long_checksum(content) != expected.checksum:
        raise ManifestError(
            f"commit cannot be used: its file of tensors is damaged: expected {expected.num_bytes} bytes of checksum "
            f"{expected.checksum}, got {size_bytes} bytes"
            + (f" of checksum {long_checksum(content)}" if size_bytes == expected.num_bytes else ""),
            path=files.path / name,
        )
    return content


def _find_data(every: Sequence[DirectoryFiles], manifests: Sequence[Manifest]) -> dict[str, int]:
    """In which directory each data file is that a commit names.

    Raises:
        StorageError: one is missing, or shorter than a commit says.
    """
    found = {name: index for index, files in enumerate(every) for name in files.names() if DATA_NAME.fullmatch(name)}
    places = {}
    for manifest in manifests:
        for file in manifest.files:
            if file.name not in found:
                searched = ", ".join(str(files.path) for files in every)
                raise StorageError(
                    f"commit {manifest.number} needs data file {file.name}, which was in {file.directory} and is in "
                    f"none of: {searched}; give all NVMe directories that the run had",
                    path=every[0].path / file.name,
                )
            places[file.name] = found[file.name]
            size_bytes = every[found[file.name]].size_bytes(file.name)
            needed = max((e.offset + e.num_bytes for e in _extents(manifest, file.name)), default=0)
            if size_bytes < needed:
                raise StorageError(
                    f"commit {manifest.number}: the data file was cut short",
                    path=every[found[file.name]].path / file.name,
                    expected_bytes=needed,
                    got_bytes=size_bytes,
                )
    return places


def _extents(manifest: Manifest, name: str) -> list[StoredExtent]:
    return [extent for shard in manifest.shards for extent in shard.extents if manifest.files[extent.file].name == name]


def _remove_orphans(
    every: Sequence[DirectoryFiles], home: DirectoryFiles, manifests: Sequence[Manifest], places: dict[str, int]
) -> None:
    """Remove what no commit has.

    That is: data files that no commit names, records of commits that never were, probes of ``open_backend``.
    """
    kept = {manifest_name(manifest.number) for manifest in manifests}
    kept |= {tensors_name(manifest.number) for manifest in manifests if manifest.tensors is not None}
    for index, files in enumerate(every):
        doomed = [
            name
            for name in files.names()
            if (DATA_NAME.fullmatch(name) and places.get(name) != index)
            or (COMMIT_NAME.fullmatch(name) and (files is not home or name not in kept))
            or PROBE_NAME.fullmatch(name)
            or (name.endswith(".partial") and _is_mark(name.removesuffix(".partial")))
        ]
        for name in doomed:
            files.unlink(name)
        if doomed:
            files.sync()
