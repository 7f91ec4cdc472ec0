"""``Manifest``: what one commit says of itself, and how that is read without trust.

A commit is one JSON document, ``commit-<number>.json``, in the state directory of the first NVMe path. Its ``body``
names every shard of the commit with the ranges of files that hold its bytes and a checksum for each range, and carries
what the engine knows beside shards (``engine``: step, layout, random states, …), which means nothing to the store.
Tensors that are no shards (buffers, step counters) are in ``commit-<number>.safetensors`` beside it.

    {"format": "infinity-commit", "version": 1, "checksum": "<xxh3_128 of the body>", "body": {...}}

The checksum is that of the body in canonical form (keys sorted, no blanks), so any JSON tool may read and print the
file. Whoever parses one gets a manifest of which everything in this file's types holds, or a ``ManifestError``: ranges
are aligned, inside their files and disjoint, names are plain file names of ours, numbers are in range.

Nothing here touches a data file. ``commits.py`` writes manifests and decides which ones stay.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from infinity.errors import ManifestError
from infinity.io.backend import DIRECT_ALIGNMENT
from infinity.store.shard import Extent, ShardKey

FORMAT = "infinity-commit"
VERSION = 1
MAX_MANIFEST_BYTES = 1 << 30
"""A larger file is no manifest; it is refused before it is read."""

DATA_NAME = re.compile(r"shards-[0-9a-f]{16}\.bin")
"""The files that hold shards of a durable state: each has a name of its own, by which a commit finds it wherever it is
mounted."""

COMMIT_NAME = re.compile(r"commit-(\d{10,15})\.(json|safetensors)(\.partial)?")

MARK_NAME = re.compile(r"state-[0-9a-f]{32}\.json")
"""What says of a directory without commits that it has data of a state that has some elsewhere."""

MEMBER_NAME = re.compile(r"member-([0-9a-f]{32})\.json")
"""What says of a rank's directory, before its first commit, to which state it will belong."""

_Count = Annotated[int, Field(ge=0, lt=1 << 62)]
_Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
_LongChecksum = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_Name = Annotated[str, Field(min_length=1, max_length=1 << 16)]


def manifest_name(number: int) -> str:
    """The file of a commit's manifest."""
    return f"commit-{number:010d}.json"


def tensors_name(number: int) -> str:
    """The file of its tensors."""
    return f"commit-{number:010d}.safetensors"


def checksum(data: bytes | bytearray | memoryview) -> str:
    """What is kept of the bytes of an extent: xxh3_64, 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def long_checksum(data: bytes | bytearray | memoryview) -> str:
    """What is kept of a whole file: xxh3_128, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


class _Record(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class StoredExtent(_Record):
    """A range of a data file that holds bytes of a shard."""

    file: _Count
    """Index in ``Manifest.files``."""

    offset: _Count
    """In bytes, a multiple of 4096."""

    num_bytes: Annotated[int, Field(gt=0, lt=1 << 62)]
    """A multiple of 4096."""

    checksum: _Checksum
    """xxh3_64 of these bytes."""

    @property
    def extent(self) -> Extent:
        """The range alone."""
        return Extent(self.offset, self.num_bytes)


class StoredShard(_Record):
    """A shard: its bytes are those of its extents, one after the other."""

    unit: _Count
    part: _Count
    kind: _Name
    dtype: _Name
    """Of its elements: a dtype of torch without the prefix (``bfloat16``), ``uint8`` for packed ones."""

    generation: _Count
    """The number of the first commit that this version of the shard belongs to."""

    extents: Annotated[list[StoredExtent], Field(min_length=1)]

    @property
    def key(self) -> ShardKey:
        """Which."""
        return ShardKey(self.unit, self.part, self.kind)

    @property
    def num_bytes(self) -> int:
        """Its length."""
        return sum(extent.num_bytes for extent in self.extents)


class StoredFile(_Record):
    """A data file."""

    name: Annotated[str, Field(pattern=f"^{DATA_NAME.pattern}$")]
    num_bytes: _Count
    """Its size when the commit was made, in bytes."""

    directory: _Name
    """Where it was, for people: it is found by its name."""


class StoredTensors(_Record):
    """The file of tensors that are no shards."""

    num_bytes: _Count
    checksum: _LongChecksum


class Manifest(_Record):
    """What one commit says of itself."""

    state: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Names the training run's state, whose commits follow each other."""

    number: Annotated[int, Field(ge=0, lt=10**15)]
    """Commits of a state are numbered upwards."""

    rank: _Count
    world_size: Annotated[int, Field(ge=1, lt=1 << 31)]
    time: _Name
    """When it was made, ISO 8601, UTC."""

    files: list[StoredFile]
    shards: list[StoredShard]
    tensors: StoredTensors | None
    engine: dict[str, Any]
    """What the engine keeps beside shards (``engine/persistence/snapshot.py``)."""

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        if len({file.name for file in self.files}) != len(self.files):
            raise ValueError("a file is named twice")
        if len({shard.key for shard in self.shards}) != len(self.shards):
            raise ValueError("a shard is named twice")
        ranges: list[tuple[int, int, int]] = []
        for shard in self.shards:
            for extent in shard.extents:
                _check_extent(shard, extent, self.files)
                ranges.append((extent.file, extent.offset, extent.offset + extent.num_bytes))
        ranges.sort()
        for (file, _, end), (other, start, _) in itertools.pairwise(ranges):
            if file == other and start < end:
                raise ValueError(f"two extents of {self.files[file].name} overlap at offset {start}")
        return self

    @property
    def num_bytes(self) -> int:
        """What its shards take."""
        return sum(shard.num_bytes for shard in self.shards)


def _check_extent(shard: StoredShard, extent: StoredExtent, files: Sequence[StoredFile]) -> None:
    if extent.file >= len(files):
        raise ValueError(f"shard {shard.key} names file {extent.file} of {len(files)}")
    if extent.offset % DIRECT_ALIGNMENT or extent.num_bytes % DIRECT_ALIGNMENT:
        raise ValueError(f"an extent of shard {shard.key} is not aligned to {DIRECT_ALIGNMENT} bytes")
    if extent.offset + extent.num_bytes > files[extent.file].num_bytes:
        raise ValueError(f"an extent of shard {shard.key} ends behind the end of {files[extent.file].name}")


def encode(manifest: Manifest) -> bytes:
    """The file's content."""
    body = _canonical(manifest.model_dump(mode="json"))
    head = json.dumps({"format": FORMAT, "version": VERSION, "checksum": long_checksum(body)})
    return b'%b, "body": %b}\n' % (head[:-1].encode(), body)


def decode(content: bytes, path: Path) -> Manifest:
    """What a file says.

    Args:
        content: all of it.
        path: the file, for errors.

    Raises:
        ManifestError: it is no manifest, was written by a newer version, or is not what was written.
    """
    try:
        document = json.loads(content.decode("utf-8"), object_pairs_hook=_once, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"not a manifest: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise _refused(path, f"not a manifest: expected a JSON object of format {FORMAT!r}")
    if document.get("version") != VERSION:
        raise _refused(path, f"expected version {VERSION}, got {_short(document.get('version'))}; use a newer infinity")
    try:
        expected, got = document.get("checksum"), long_checksum(_canonical(document.get("body")))
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"not a manifest: {error}") from error
    if expected != got:
        raise _refused(path, f"damaged: expected checksum {_short(expected)}, got {got}")
    try:
        return Manifest.model_validate(document["body"])
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise _refused(path, f"not a manifest: {place + ': ' if place else ''}{first['msg']}") from error
    except UnicodeEncodeError as error:
        raise _refused(path, f"not a manifest: {error}") from error
    except RecursionError as error:
        raise _refused(path, "not a manifest: nested too deeply") from error


def _canonical(body: object) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _once(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _refused(path: Path, message: str) -> ManifestError:
    return ManifestError(f"commit cannot be used: {message}", path=path)
