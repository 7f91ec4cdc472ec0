"""Python values as JSON documents: what optimizers, schedulers, scalers and loaders keep in their state dicts.

Plain values stand for themselves. What JSON has no word for is an object with one key that begins with ``$``:

    {"$tensor": name}                    a tensor, kept beside the document under that name
    {"$bits": [dtype, shape, name]}      one of a dtype for which the file of tensors has no word: its bytes
    {"$parameter": [tensor, requires_grad]}
    {"$array": [dtype, shape, name]}     {"$scalar": [dtype, base64]}    numpy's
    {"$numpy_str": text}                 {"$numpy_bytes": base64}
    {"$tuple": [...]}                    {"$set": [...]}                 {"$frozenset": [...]}
    {"$size": [...]}                     {"$deque": [maxlen, [...]]}
    {"$dict": [[key, value], ...]}       keys that are not strings, or not in alphabetical order
    {"$ordered": [pairs, metadata]}      {"$counter": pairs}             {"$defaultdict": [factory, pairs]}
    {"$bytes": base64}                   {"$bytearray": base64}          {"$str": base64}    no valid Unicode
    {"$int": "0x..."}                    {"$float": "nan"}               {"$complex": [real, imaginary]}
    {"$dtype": "float32"}                {"$device": "cuda:0"}

What comes back is equal and of the same type, whatever JSON does with the order of keys; tensors are contiguous, on the
CPU, and need no gradient. Nothing is evaluated, imported or unpickled when a document is read, so everything else is
refused when it is written: other classes, and classes derived from these, which may keep more than is seen.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from infinity.errors import ModelError

_MAX_DEPTH = 48
"""Documents take up to four levels of JSON for one of a value, and readers of JSON have 255."""

_LARGE_INT = 1 << 63
"""Decimals take Python long, which refuses those with thousands of digits."""

_TENSOR_DTYPES = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    }
)  # fmt: skip
"""Those for which every version of safetensors has a word."""

_NUMPY_KINDS = "biufcmMSU"
_PLATFORM_CHARS = "gG"
"""Long doubles have one name and several formats."""

_FACTORIES = {each.__name__: each for each in (bool, bytes, dict, float, int, list, set, str, tuple)}


class _Hashed:
    """A step of a path into a set, or to a key."""

    def __repr__(self) -> str:
        return "a key or member"


class Writer:
    """Turns values into documents.

    Args:
        prefix: of the names of its tensors, by which they differ from those of other writers.

    Attributes:
        tensors: those that the documents name.
    """

    def __init__(self, prefix: str = "t") -> None:
        self._prefix = prefix
        self._where = ""
        self._path: list[object] = []
        self.tensors: dict[str, torch.Tensor] = {}

    def write(self, value: Any, where: str) -> Any:
        """A document for a value; its tensors are copied.

        Args:
            value: what.
            where: what it is, for errors.

        Raises:
            ModelError: it holds something that cannot be kept; the message says where.
        """
        self._where, self._path = where, []
        return self._write(value)

    def _write(self, value: Any) -> Any:
        if len(self._path) > _MAX_DEPTH:
            raise self._refused(f"is nested more than {_MAX_DEPTH} deep, or holds itself")
        kind = type(value)
        if kind in _WRITERS:
            return _WRITERS[kind](self, value)
        if isinstance(value, np.generic):
            return self._scalar(value)
        raise self._refused(f"is a {kind.__module__}.{kind.__qualname__}")

    def _refused(self, what: str) -> ModelError:
        place = "".join(f"[{_short(step)}]" for step in self._path[: _MAX_DEPTH // 4])
        return ModelError(
            f"{self._where}{place} {what}, which cannot be kept in a checkpoint: expected numbers, strings, dense "
            "tensors, arrays of numbers or strings, and plain lists, tuples, sets, deques and dictionaries of them"
        )

    def _at(self, step: object, value: Any) -> Any:
        self._path.append(step)
        document = self._write(value)
        self._path.pop()
        return document

    def _itself(self, value: Any) -> Any:
        return value

    def _str(self, value: str) -> Any:
        return value if _is_unicode(value) else {"$str": _text_of(value.encode("utf-8", "surrogatepass"))}

    def _int(self, value: int) -> Any:
        return value if abs(value) < _LARGE_INT else {"$int": hex(value)}

    def _float(self, value: float) -> Any:
        return value if math.isfinite(value) else {"$float": repr(value)}

    def _complex(self, value: complex) -> Any:
        return {"$complex": [self._float(value.real), self._float(value.imag)]}

    def _items(self, values: Iterable[Any]) -> list[Any]:
        return [self._at(index, each) for index, each in enumerate(values)]

    def _members(self, values: Iterable[Any]) -> list[Any]:
        return [self._at(_Hashed(), each) for each in values]

    def _pairs(self, values: Mapping[Any, Any]) -> list[Any]:
        return [[self._at(_Hashed(), key), self._at(key, each)] for key, each in values.items()]

    def _dict(self, value: dict[Any, Any]) -> Any:
        keys = list(value)
        is_plain = all(type(key) is str and _is_unicode(key) for key in keys) and keys == sorted(keys)
        if is_plain and not (len(keys) == 1 and keys[0].startswith("$")):
            return {key: self._at(key, each) for key, each in value.items()}
        return {"$dict": self._pairs(value)}

    def _ordered(self, value: OrderedDict[Any, Any]) -> Any:
        self._check_attributes(value, "_metadata")  # of the state dict of a module
        metadata = vars(value).get("_metadata")
        return {"$ordered": [self._pairs(value), None if metadata is None else self._at("_metadata", metadata)]}

    def _counter(self, value: Counter[Any]) -> Any:
        self._check_attributes(value)
        return {"$counter": self._pairs(value)}

    def _defaultdict(self, value: defaultdict[Any, Any]) -> Any:
        factory = value.default_factory
        name = next((name for name, each in _FACTORIES.items() if each is factory), None)
        if name is None and factory is not None:
            raise self._refused(f"is a defaultdict that calls {_short(factory)}")
        return {"$defaultdict": [name, self._pairs(value)]}

    def _check_attributes(self, value: Any, *known: str) -> None:
        for name in vars(value):
            if name not in known:
                raise self._refused(f"is a {type(value).__name__} with an attribute {name}")

    def _tensor(self, value: torch.Tensor) -> Any:
        if any(isinstance(step, _Hashed) for step in self._path):
            raise self._refused("is a tensor, which equals only itself")
        if value.layout is not torch.strided or value.is_nested:
            raise self._refused(f"is a tensor of layout {value.layout}")
        if value.is_meta:
            raise self._refused("is a tensor on the meta device")
        if value.is_quantized:
            raise self._refused("is a quantized tensor")
        with torch.no_grad():
            copy = value.detach().resolve_conj().resolve_neg().to("cpu", copy=True).contiguous()
            if value.dtype in _TENSOR_DTYPES:
                return {"$tensor": self._keep(copy)}
            bits = copy.reshape(-1).view(torch.uint8)
        return {"$bits": [_dtype_name(value.dtype), list(value.shape), self._keep(bits)]}

    def _parameter(self, value: nn.Parameter) -> Any:
        return {"$parameter": [self._tensor(value), value.requires_grad]}

    def _array(self, value: np.ndarray[Any, Any]) -> Any:
        dtype = self._numpy_dtype(value.dtype)
        bits = np.ascontiguousarray(value).reshape(-1).view(np.uint8).copy()
        return {"$array": [dtype.str, list(value.shape), self._keep(torch.from_numpy(bits))]}

    def _scalar(self, value: np.generic) -> Any:
        if type(value) is np.str_:
            return {"$numpy_str": self._str(str.__str__(value))}  # numpy's own leaves out zeros at the end
        if type(value) is np.bytes_:
            return {"$numpy_bytes": _text_of(bytes(value))}
        dtype = self._numpy_dtype(value.dtype)
        if dtype.type is not type(value):
            raise self._refused(f"is a {type(value).__module__}.{type(value).__qualname__}")
        return {"$scalar": [dtype.str, _text_of(np.asarray(value).tobytes())]}

    def _numpy_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The one that is read for a dtype, which is equal."""
        try:
            return _numpy_dtype(dtype.str, dtype)
        except (TypeError, ValueError) as error:
            raise self._refused(f"is of numpy's dtype {dtype}") from error

    def _keep(self, tensor: torch.Tensor) -> str:
        name = f"{self._prefix}{len(self.tensors)}"
        self.tensors[name] = tensor
        return name


_WRITERS: dict[type, Callable[[Writer, Any], Any]] = {
    type(None): Writer._itself,
    bool: Writer._itself,
    str: Writer._str,
    int: Writer._int,
    float: Writer._float,
    complex: Writer._complex,
    list: Writer._items,
    tuple: lambda writer, value: {"$tuple": writer._items(value)},
    torch.Size: lambda writer, value: {"$size": writer._items(value)},
    deque: lambda writer, value: {"$deque": [value.maxlen, writer._items(value)]},
    set: lambda writer, value: {"$set": writer._members(value)},
    frozenset: lambda writer, value: {"$frozenset": writer._members(value)},
    dict: Writer._dict,
    OrderedDict: Writer._ordered,
    Counter: Writer._counter,
    defaultdict: Writer._defaultdict,
    bytes: lambda writer, value: {"$bytes": _text_of(value)},
    bytearray: lambda writer, value: {"$bytearray": _text_of(value)},
    torch.Tensor: Writer._tensor,
    nn.Parameter: Writer._parameter,
    np.ndarray: Writer._array,
    torch.dtype: lambda writer, value: {"$dtype": _dtype_name(value)},
    torch.device: lambda writer, value: {"$device": str(value)},
}


class Reader:
    """Turns documents back into values.

    Args:
        tensors: those that they name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def read(self, document: Any, where: str) -> Any:
        """The value of a document; tensors are copies, on the CPU.

        Raises:
            ModelError: it is no document of ``Writer``'s, or a tensor is missing.
        """
        try:
            return self._read(document, where)
        except RecursionError as error:
            raise ModelError(f"{where}: a document in a checkpoint is nested too deeply") from error

    def _read(self, document: Any, where: str) -> Any:
        if isinstance(document, list):
            return [self._read(item, where) for item in document]
        if not isinstance(document, Mapping):
            return document
        if len(document) == 1 and next(iter(document)).startswith("$"):
            [(tag, content)] = document.items()
            try:
                if tag not in _READERS:
                    raise ValueError("expected one of the tags that infinity writes")
                return _READERS[tag](self, content, where)
            except RecursionError:
                raise
            except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
                raise ModelError(f"{where}: {tag!r} in a checkpoint cannot be read: {error!r}") from error
        return {key: self._read(item, where) for key, item in document.items()}

    def _items(self, content: Any, where: str) -> list[Any]:
        return [self._read(item, where) for item in content]

    def _pairs(self, content: Any, where: str) -> dict[Any, Any]:
        return {self._read(key, where): self._read(item, where) for key, item in content}

    def _bits(self, content: Any, where: str) -> torch.Tensor:
        dtype, shape, name = content
        return self._tensors[name].clone().view(_dtype(dtype)).reshape(shape)

    def _parameter(self, content: Any, where: str) -> nn.Parameter:
        tensor, requires_grad = content
        with torch.inference_mode(False):
            return nn.Parameter(self._read(tensor, where), requires_grad=requires_grad)

    def _array(self, content: Any, where: str) -> Any:
        dtype, shape, name = content
        bits = self._tensors[name].clone().numpy()
        return bits.view(_numpy_dtype(dtype)).reshape(shape)

    def _scalar(self, content: Any, where: str) -> Any:
        dtype, bits = content
        [value] = np.frombuffer(_bytes(bits), _numpy_dtype(dtype))
        return value

    def _ordered(self, content: Any, where: str) -> OrderedDict[Any, Any]:
        pairs, metadata = content
        ordered = OrderedDict(self._pairs(pairs, where))
        if metadata is not None:
            vars(ordered)["_metadata"] = self._read(metadata, where)
        return ordered

    def _defaultdict(self, content: Any, where: str) -> defaultdict[Any, Any]:
        factory, pairs = content
        return defaultdict(None if factory is None else _FACTORIES[factory], self._pairs(pairs, where))

    def _deque(self, content: Any, where: str) -> deque[Any]:
        maxlen, items = content
        return deque(self._items(items, where), maxlen)

    def _complex(self, content: Any, where: str) -> complex:
        real, imaginary = self._items(content, where)
        return complex(real, imaginary)


_READERS: dict[str, Callable[[Reader, Any, str], Any]] = {
    "$tensor": lambda reader, content, where: reader._tensors[content].clone(),
    "$bits": Reader._bits,
    "$parameter": Reader._parameter,
    "$array": Reader._array,
    "$scalar": Reader._scalar,
    "$numpy_str": lambda reader, content, where: np.str_(reader._read(content, where)),
    "$numpy_bytes": lambda reader, content, where: np.bytes_(_bytes(content)),
    "$tuple": lambda reader, content, where: tuple(reader._items(content, where)),
    "$size": lambda reader, content, where: torch.Size(reader._items(content, where)),
    "$deque": Reader._deque,
    "$set": lambda reader, content, where: set(reader._items(content, where)),
    "$frozenset": lambda reader, content, where: frozenset(reader._items(content, where)),
    "$dict": Reader._pairs,
    "$ordered": Reader._ordered,
    "$counter": lambda reader, content, where: Counter(reader._pairs(content, where)),
    "$defaultdict": Reader._defaultdict,
    "$bytes": lambda reader, content, where: _bytes(content),
    "$bytearray": lambda reader, content, where: bytearray(_bytes(content)),
    "$str": lambda reader, content, where: _bytes(content).decode("utf-8", "surrogatepass"),
    "$int": lambda reader, content, where: int(content, 16),
    "$float": lambda reader, content, where: float(content),
    "$complex": Reader._complex,
    "$dtype": lambda reader, content, where: _dtype(content),
    "$device": lambda reader, content, where: torch.device(content),
}


def _is_unicode(text: str) -> bool:
    """Whether it is what JSON holds: no half of a pair of surrogates."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _text_of(content: bytes | bytearray) -> str:
    return base64.b64encode(content).decode("ascii")


def _bytes(content: Any) -> bytes:
    return base64.b64decode(content, validate=True)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError("expected a dtype of torch")
    return dtype


def _numpy_dtype(name: str, like: np.dtype[Any] | None = None) -> np.dtype[Any]:
    """A dtype of numbers, times or strings, by the name that numpy gives it.

    Raises:
        TypeError, ValueError: it is of other things, or of another dtype than ``like``.
    """
    dtype = np.dtype(name)
    known = dtype.kind in _NUMPY_KINDS and dtype.char not in _PLATFORM_CHARS and dtype.itemsize > 0
    if not known or (like is not None and dtype != like):
        raise ValueError("expected a dtype of numbers, times or strings")
    return dtype


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
