"""What a commit says, there and back: any value as a document, any manifest as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.engine.documents import Reader, Writer
from infinity.errors import ManifestError, ModelError
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
from states_on_disk import flat_bits

_DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
_TENSORS = st.builds(
    lambda dtype, shape, seed: (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype),
    _DTYPES,
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 100),
)
_ARRAYS = st.sampled_from(
    [np.arange(3.0), np.float32(2.5), np.array(7), np.zeros((0, 2), np.int16), np.array([True, False])]
)
_HASHABLE = st.one_of(
    st.text(max_size=4),
    st.integers(),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    st.binary(max_size=3),
    st.tuples(st.integers(), st.text(max_size=2)),
)
_LEAVES = st.one_of(
    _HASHABLE,
    st.floats(),
    st.complex_numbers(),
    st.frozensets(_HASHABLE, max_size=3),
    st.sampled_from([torch.float32, torch.int8]),
    _TENSORS,
    _ARRAYS,
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=4), st.sampled_from(["$tensor", "$x", "$dict"])), inner, max_size=3),
        st.dictionaries(_HASHABLE, inner, max_size=3),
    ),
    max_leaves=12,
)


def same(first: Any, second: Any) -> bool:
    """Equal, of the same kind, to the bit."""
    if isinstance(first, torch.Tensor):
        alike = isinstance(second, torch.Tensor) and (first.dtype, first.shape) == (second.dtype, second.shape)
        return alike and flat_bits(first) == flat_bits(second)
    if isinstance(first, (np.ndarray, np.generic)):
        return np.asarray(first).dtype == np.asarray(second).dtype and np.array_equal(first, second)
    if isinstance(first, (set, frozenset)):
        return isinstance(second, set) and set(first) == second
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return list(map(repr, first)) == list(map(repr, second)) and all(
            same(a, b) for a, b in zip(first.values(), second.values(), strict=True)
        )
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))
    return repr(first) == repr(second)


@settings(max_examples=150, deadline=None)
@given(value=_VALUES)
def test_any_value_comes_back(value: Any) -> None:
    writer = Writer()
    document = json.loads(json.dumps(writer.write(value, "value"), allow_nan=False))
    back = Reader(writer.tensors).read(document, "value")
    assert same(value, back)
    for tensor in writer.tensors.values():
        tensor.zero_()
    assert same(value, back), "what was read is no copy"


class Strange:
    pass


@pytest.mark.parametrize("value", [Strange(), {"a": [Strange()]}, {Strange(): 1}, np.array(["a"]), Path("a")])
def test_what_cannot_be_kept_is_refused_and_named(value: Any) -> None:
    with pytest.raises(ModelError, match=r"state.*cannot be kept in a checkpoint"):
        Writer().write(value, "state")


@pytest.mark.parametrize(
    "document",
    [
        {"$tensor": "none"}, {"$tensor": []}, {"$set": [[1]]}, {"$dict": [1]}, {"$bytes": "?"}, {"$float": "x"},
        {"$float": 10**400}, {"$complex": [1]}, {"$dtype": "load"}, {"$dtype": 3}, {"$other": 1},
    ],
)  # fmt: skip
def test_what_is_no_document_is_refused(document: Any) -> None:
    with pytest.raises(ModelError, match=r"state: '.*' in a checkpoint cannot be read"):
        Reader({}).read({"a": [document]}, "state")


def test_a_document_that_is_too_deep_is_refused() -> None:
    deep: Any = 1
    for _ in range(2000):
        deep = {"$tuple": [deep]}
    with pytest.raises(ModelError, match="nested too deeply"):
        Reader({}).read(deep, "state")


# Manifests

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
