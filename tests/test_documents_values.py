"""Values as documents: what comes back from a commit is equal and of the same type, or was refused when it was made."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import nn

from infinity.engine.persistence.documents import Reader, Writer
from infinity.engine.persistence.snapshot import OptimizerState, Snapshot, snapshot_of
from infinity.errors import ModelError
from infinity.store.manifest import Manifest, decode, encode


def through_a_commit(value: Any) -> Any:
    """What a later run reads of a value that a commit has: as a tracked state, in a record and a file of tensors."""
    writer = Writer()
    snapshot = Snapshot(
        step=1,
        units=[],
        parts=[],
        tied={},
        buffers={},
        persistent_buffers=[],
        optimizer=OptimizerState(class_name="AdamW", groups=[], small={}),
        random={},
        scaling={},
        tracked={"value": writer.write(value, "value")},
        config={},
        versions={},
    )
    engine = snapshot.model_dump(mode="json")
    manifest = Manifest(
        state="ab" * 16, number=1, rank=0, world_size=1, time="t", files=[], shards=[], tensors=None, engine=engine
    )
    content, tensors = encode(manifest), save(writer.tensors)
    for each in writer.tensors.values():
        each.view(torch.uint8 if each.ndim else each.dtype).fill_(1)
    document = snapshot_of(decode(content, Path("commit")), Path("commit")).tracked["value"]
    stored = load(tensors)
    back = Reader(stored).read(document, "value")
    again = Reader(stored).read(document, "value")
    for each in stored.values():
        each.zero_()
    assert same(back, again), "what was read is no copy"
    return back


def same(first: Any, second: Any) -> bool:
    """Equal to the bit, and of the same type, all the way down; in the same order where there is one."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        alike = (first.dtype, first.shape) == (second.dtype, second.shape)
        parameters = not isinstance(first, nn.Parameter) or first.requires_grad == second.requires_grad
        return alike and parameters and bits(first) == bits(second)
    if isinstance(first, (np.ndarray, np.generic)):
        alike = (first.dtype, first.shape) == (second.dtype, second.shape)
        return alike and first.tobytes() == second.tobytes() and repr(first) == repr(second)
    if isinstance(first, (set, frozenset)):
        return first == second and sorted(map(described, first)) == sorted(map(described, second))
    if isinstance(first, dict):
        factories = getattr(first, "default_factory", None) is getattr(second, "default_factory", None)
        metadata = same(getattr(first, "_metadata", None), getattr(second, "_metadata", None))
        return factories and metadata and same(list(first.items()), list(second.items()))
    if isinstance(first, (list, tuple, deque)):
        alike = len(first) == len(second) and getattr(first, "maxlen", None) == getattr(second, "maxlen", None)
        return alike and all(same(a, b) for a, b in zip(first, second, strict=True))
    return bool(first == second or first != first) and described(first) == described(second)


def described(value: Any) -> str:
    """Its types and values; of sets the members in order."""
    if isinstance(value, (tuple, frozenset)):
        members = [described(each) for each in value]
        return f"{type(value)}({','.join(sorted(members) if isinstance(value, frozenset) else members)})"
    return f"{type(value)}{value!r}" if not isinstance(value, int) else f"{type(value)}{value:x}"


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist())


_DTYPES = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.complex128, torch.uint16,
     torch.float8_e4m3fn, torch.float8_e5m2]
)  # fmt: skip
_TENSORS = st.builds(
    lambda dtype, shape, seed: (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype),
    _DTYPES,
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 100),
)
_ARRAYS = st.builds(
    lambda dtype, shape: np.arange(float(np.prod(shape))).reshape(shape).astype(dtype),
    st.sampled_from(["<f4", ">f4", ">i8", "<u2", "?", "c16", "<U5", "S3", ">U2", "f2"]),
    st.lists(st.integers(0, 3), max_size=3),
)
_SCALARS = st.sampled_from(
    [np.float32(2.5), np.float64(0.1), np.int64(7), np.uint8(3), np.bool_(True), np.complex64(1j), np.str_("a"),
     np.str_("a\0"), np.str_(""), np.bytes_(b"a\0"), np.datetime64("2026-01-02"), np.timedelta64(3, "ms"),
     np.float64("nan")]
)  # fmt: skip
_ATOMS = st.one_of(
    st.text(st.characters(categories=None), max_size=4),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.booleans(),
    st.none(),
    st.binary(max_size=3),
    _SCALARS.filter(lambda scalar: scalar == scalar),
    st.sampled_from([torch.float32, torch.int8, torch.device("cpu"), torch.device("cuda:1"), torch.Size([2, 3])]),
)
_HASHABLE = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(st.frozensets(inner, max_size=3), st.lists(inner, max_size=3).map(tuple)),
    max_leaves=4,
)
_LEAVES = st.one_of(
    _HASHABLE,
    _SCALARS,
    st.sets(_HASHABLE, max_size=3),
    st.binary(max_size=3).map(bytearray),
    _TENSORS,
    st.builds(lambda flag: nn.Parameter(torch.arange(2.0), requires_grad=flag), st.booleans()),
    _ARRAYS,
)


def _mappings(inner: Any) -> Any:
    names = st.one_of(st.text(max_size=4), st.sampled_from(["$tensor", "$x", "$dict"]))
    plain = st.one_of(st.dictionaries(names, inner, max_size=3), st.dictionaries(_HASHABLE, inner, max_size=3))
    factories = st.sampled_from([None, int, float, list, dict, set, str, bool, tuple, bytes])
    return st.one_of(
        plain,
        plain.map(OrderedDict),
        plain.map(Counter),
        st.builds(defaultdict, factories, plain),
    )


_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(deque, st.lists(inner, max_size=3), st.sampled_from([None, 1, 4])),
        _mappings(inner),
    ),
    max_leaves=10,
)


@settings(max_examples=100, deadline=None)
@given(value=_VALUES)
def test_any_value_comes_back(value: Any) -> None:
    writer = Writer()
    document = json.loads(json.dumps(writer.write(value, "value"), allow_nan=False, sort_keys=True))
    assert same(value, Reader(writer.tensors).read(document, "value"))


class Noted(OrderedDict[str, Any]):
    pass


def state_dict_of_a_module() -> Any:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict()


@pytest.mark.parametrize(
    "value",
    [
        {frozenset([1, 2])},
        {frozenset([1]): 2, (frozenset([frozenset()]),): 3},
        {"b": 1, "a": 2},
        Counter({3: 2, 1: 0}),
        Counter(),
        OrderedDict(b=1, a=OrderedDict()),
        defaultdict(list, {1: [2]}),
        deque([1, 2, 3], 2),
        bytearray(b"\0\1"),
        torch.Size([2, 3]),
        [torch.int8, torch.device("cuda:1"), torch.device("meta")],
        nn.Parameter(torch.ones(2), requires_grad=False),
        torch.arange(4.0).to(torch.complex128) * 1j,
        torch.ones((), dtype=torch.complex128),
        torch.zeros(0, dtype=torch.complex128),
        (torch.arange(4) * (1 + 2j)).conj(),
        (torch.arange(4) * (1 + 2j)).conj().imag,
        torch.arange(3).to(torch.uint32),
        torch.ones(2).to(torch.float8_e8m0fnu),
        torch.arange(6).view(2, 3).t(),
        torch.ones(1).expand(3),
        np.arange(3, dtype=">i4"),
        np.array(["a", "bc"]),
        np.array([b"a", b"bc"]),
        np.array(["2026-01-02"], "datetime64[D]"),
        np.array(7),
        np.float64(0.1),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(6)[::-2],
        10**5000,
        -(1 << 63),
        {float("inf"): 1, float("nan"): 2, -0.0: 3},
        ["\ud800", "\ud83d\ude00", {"\udfff": 1}, {"\udc80": 1, "a": "\U0001f600"}],
        {"$tuple": 1},
        np.random.RandomState(3).get_state(),
        state_dict_of_a_module(),
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_types_and_values_survive_a_commit(value: Any) -> None:
    writer = Writer()
    assert same(value, Reader(writer.tensors).read(writer.write(value, "value"), "value"))
    kept = through_a_commit(value)
    assert same(value, kept)


def nested(wrap: Any, depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: [inner],
        lambda inner: (inner,),
        lambda inner: frozenset([inner]),
        lambda inner: deque([inner], 3),
        lambda inner: {1: inner},
        lambda inner: OrderedDict(a=inner),
        lambda inner: defaultdict(int, a=inner),
    ],
)
def test_what_is_nested_as_deep_as_it_may_be_comes_back_and_no_deeper_is_kept(wrap: Any) -> None:
    value = nested(wrap, 48)
    assert same(value, through_a_commit(value))
    with pytest.raises(ModelError, match=r"value\[.*is nested more than 48 deep.*cannot be kept in a checkpoint"):
        Writer().write(nested(wrap, 49), "value")


def test_what_is_nested_deeper_than_python_goes_is_refused() -> None:
    with pytest.raises(ModelError, match=r"is nested more than 48 deep"):
        Writer().write(nested(lambda inner: [inner], 100_000), "value")


def test_what_holds_itself_is_refused() -> None:
    ring: list[Any] = []
    ring.append({"a": ring, "b": ring})
    with pytest.raises(ModelError, match=r"value\[0\]\['a'\]\[0\].* or holds itself"):
        Writer().write(ring, "value")


def test_integers_are_kept_whatever_python_says_of_decimals() -> None:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        assert through_a_commit([10**4000])[0] == 10**4000
    finally:
        sys.set_int_max_str_digits(limit)


Pair = collections.namedtuple("Pair", "a b")


class Strange:
    pass


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    __slots__ = ()


@dataclasses.dataclass
class Data:
    a: int = 1


class Wrapped(torch.Tensor):
    pass


def noted() -> Counter[str]:
    counter: Counter[str] = Counter(a=1)
    counter.note = 1  # type: ignore[attr-defined]
    return counter


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Strange, r"is a .*Strange"),
        (lambda: {Strange(): 1}, r"\[a key or member\] is a .*Strange"),
        (lambda: Path("a"), r"is a pathlib"),
        (lambda: Level.LOW, r"is a .*Level"),
        (lambda: Pair(1, 2), r"is a .*Pair"),
        (Data, r"is a .*Data"),
        (lambda: Text("a"), r"is a .*Text"),
        (lambda: len, r"is a builtins.builtin_function_or_method"),
        (lambda: Noted(a=1), r"is a .*Noted"),
        (noted, r"is a Counter with an attribute note"),
        (lambda: defaultdict(lambda: 1), r"is a defaultdict that calls <function"),
        (lambda: torch.max(torch.ones(2, 2), 0), r"is a torch.return_types.max"),
        (lambda: torch.ones(2).as_subclass(Wrapped), r"is a .*Wrapped"),
        (lambda: torch.ones(2, device="meta"), r"is a tensor on the meta device"),
        (lambda: torch.eye(2).to_sparse(), r"is a tensor of layout torch.sparse_coo"),
        (lambda: torch.eye(2).to_mkldnn(), r"is a tensor of layout torch._mkldnn"),
        (lambda: {torch.ones(2): 1}, r"\[a key or member\] is a tensor, which equals only itself"),
        (lambda: {(1, torch.ones(2))}, r"\[a key or member\]\[1\] is a tensor, which equals only itself"),
        (lambda: np.array([Strange()]), r"is of numpy's dtype object"),
        (lambda: np.zeros(2, [("a", "f4")]), r"is of numpy's dtype \[\('a'"),
        (lambda: np.zeros(2, "V3"), r"is of numpy's dtype \|V3"),
        (lambda: np.zeros(2, np.longdouble), r"is of numpy's dtype (float|longdouble)"),
        (lambda: np.clongdouble(1), r"is of numpy's dtype (complex|clongdouble)"),
        (lambda: np.void(b"abc"), r"is of numpy's dtype \|V3"),
        (lambda: np.ma.array([1, 2]), r"is a numpy.ma.*MaskedArray"),
        (lambda: range(3), r"is a builtins.range"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused_and_named(make: Any, what: str) -> None:
    with pytest.raises(ModelError, match=rf"^state\['a'\]\[0\].*{what}.*, which cannot be kept in a checkpoint"):
        Writer().write({"a": [make()]}, "state")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_is_refused() -> None:
    with pytest.raises(ModelError, match=r"state\[0\] is a quantized tensor"):
        Writer().write([torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)], "state")


@pytest.mark.parametrize(
    "document",
    [
        {"$tensor": "none"}, {"$tensor": []}, {"$set": [[1]]}, {"$dict": [1]}, {"$bytes": "?"}, {"$float": "x"},
        {"$float": 10**400}, {"$complex": [1]}, {"$dtype": "load"}, {"$dtype": 3}, {"$other": 1}, {"$int": 1},
        {"$int": "1x"}, {"$str": "/w=="}, {"$deque": [-1, []]}, {"$deque": []}, {"$size": ["a"]}, {"$size": [1.5]},
        {"$device": "nowhere"}, {"$defaultdict": ["print", []]}, {"$defaultdict": [[], []]}, {"$counter": 3},
        {"$ordered": []}, {"$array": ["O", [0], "t"]}, {"$array": ["<f4", [7], "t"]}, {"$array": ["nothing", [], "t"]},
        {"$array": ["<f4", ["a"], "t"]}, {"$scalar": ["<f4", ""]}, {"$scalar": ["<f4", "AAAAAAAAAAA="]},
        {"$scalar": ["U0", ""]}, {"$bits": ["float32", [5], "t"]}, {"$bits": ["save", [2], "t"]},
        {"$parameter": [1, True]}, {"$parameter": [{"$array": ["|u1", [8], "t"]}, True]}, {"$numpy_bytes": "?"},
    ],
)  # fmt: skip
def test_what_is_no_document_is_refused(document: Any) -> None:
    with pytest.raises(ModelError, match=r"state: '.*' in a checkpoint cannot be read"):
        Reader({"t": torch.zeros(8, dtype=torch.uint8)}).read({"a": [document]}, "state")


def test_a_document_that_is_too_deep_is_refused() -> None:
    deep: Any = 1
    for _ in range(2000):
        deep = {"$tuple": [deep]}
    with pytest.raises(ModelError, match="nested too deeply"):
        Reader({}).read(deep, "state")
