"""What a commit says, there and back: any manifest as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.errors import ManifestError
from infinity.store.manifest import (
    Manifest,
    StoredExtent,
    StoredFile,
    StoredShard,
    StoredTensors,
    decode,
    encode,
    long_checksum,
)

_CHECKSUMS = st.integers(0, (1 << 64) - 1).map(lambda number: f"{number:016x}")
_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8,
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Any: shards of several extents, one after the other in several files."""
    num_files = draw(st.integers(1, 3))
    ends = [0] * num_files
    shards = []
    for number in range(draw(st.integers(0, 6))):
        extents = []
        for _ in range(draw(st.integers(1, 3))):
            file = draw(st.integers(0, num_files - 1))
            start = ends[file] + 4096 * draw(st.integers(0, 2))
            size = 4096 * draw(st.integers(1, 4))
            ends[file] = start + size
            extents.append(StoredExtent(file=file, offset=start, num_bytes=size, checksum=draw(_CHECKSUMS)))
        shards.append(
            StoredShard(unit=number // 2, part=0, kind=f"kind{number}", dtype="float32", generation=3, extents=extents)
        )
    files = [
        StoredFile(name=f"shards-{index:016x}.bin", num_bytes=end + draw(st.integers(0, 9)), directory="somewhere")
        for index, end in enumerate(ends)
    ]
    return Manifest(
        state="ab" * 16,
        number=draw(st.integers(0, 10**15 - 1)),
        rank=draw(st.integers(0, 100)),
        world_size=draw(st.integers(1, 100)),
        time=draw(st.text(min_size=1)),
        files=files,
        shards=shards,
        tensors=draw(st.none() | st.builds(StoredTensors, num_bytes=st.integers(0, 99), checksum=st.just("0" * 32))),
        engine=draw(st.dictionaries(st.text(), _JSON, max_size=4)),
    )


@settings(max_examples=80, deadline=None)
@given(manifest=manifests())
def test_any_manifest_comes_back(manifest: Manifest) -> None:
    content = encode(manifest)
    assert decode(content, Path("commit")) == manifest
    document = json.loads(content)
    pretty = json.dumps(document, indent=4).encode()
    assert decode(pretty, Path("commit")) == manifest, "how JSON is laid out is nothing"


def changed(**fields: Any) -> bytes:
    """A manifest of two shards in one file, sealed after these fields were changed."""
    shards = [
        {"unit": 0, "part": 0, "kind": kind, "dtype": "float32", "generation": 0,
         "extents": [{"file": 0, "offset": offset, "num_bytes": 4096, "checksum": "0" * 16}]}
        for kind, offset in (("a", 0), ("b", 8192))
    ]  # fmt: skip
    files = [{"name": f"shards-{0:016x}.bin", "num_bytes": 12288, "directory": "d"}]
    body: dict[str, Any] = {"state": "0" * 32, "number": 1, "rank": 0, "world_size": 1, "time": "t", "files": files,
                            "shards": shards, "tensors": None, "engine": {}}  # fmt: skip
    for path, value in fields.items():
        *parents, last = path.split("__")
        place: Any = body
        for name in parents:
            place = place[int(name)] if isinstance(place, list) else place[name]
        place[int(last) if isinstance(place, list) else last] = value
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return (
        f'{{"format":"infinity-commit","version":1,"checksum":"{long_checksum(text.encode())}","body":{text}}}'.encode()
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shards__1__kind": "a"}, "a shard is named twice"),
        ({"shards__1__extents__0__offset": 0}, "two extents of .* overlap at offset 0"),
        ({"shards__1__extents__0__offset": 12288}, "ends behind the end of"),
        ({"shards__1__extents__0__offset": 8193}, "not aligned to 4096"),
        ({"shards__1__extents__0__file": 1}, "names file 1 of 1"),
        ({"shards__1__extents__0__num_bytes": 0}, "greater than 0"),
        ({"shards__1__extents": []}, "at least 1 item"),
        ({"files__0__name": "../shards.bin"}, "files.0.name: String should match pattern"),
        ({"files__0__num_bytes": 1 << 62}, "less than"),
        ({"number": -1}, "number: .* greater than or equal to 0"),
        ({"number": True}, "valid integer"),
        ({"world_size": 0}, "world_size"),
        ({"extra": 1}, "extra: Extra inputs are not permitted"),
    ],
)
def test_a_manifest_is_not_trusted(fields: dict[str, Any], message: str) -> None:
    decode(changed(), Path("commit"))
    with pytest.raises(ManifestError, match=message):
        decode(changed(**fields), Path("commit"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a manifest"),
        (b"[]", "expected a JSON object of format 'infinity-commit'"),
        (b"[" * 100_000, "not a manifest"),
        (b'{"format": "infinity-commit", "version": 2}', "expected version 1, got 2; use a newer infinity"),
        (b'{"format": "infinity-commit", "version": 1, "version": 1}', "a key is there twice"),
        (b'{"format": "infinity-commit", "version": 1, "body": NaN}', "NaN is not JSON"),
        (b'{"format": "infinity-commit", "version": 1, "body": {}}', "damaged: expected checksum None"),
        (b"\xff\xfe", "not a manifest"),
    ],
)
def test_what_is_no_manifest(content: bytes, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        decode(content, Path("commit"))
