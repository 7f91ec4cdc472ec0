"""Python values as JSON documents: what optimizers, schedulers, scalers and loaders keep in their state dicts.

Plain values stand for themselves. What JSON has no word for is an object with one key that begins with ``$``:

    {"$tensor": name}       a tensor, kept beside the document under that name
    {"$tuple": [...]}       {"$set": [...]}         {"$dict": [[key, value], ...]}   keys that are not strings
    {"$bytes": base64}      {"$float": "nan"}       {"$complex": [real, imaginary]}
    {"$dtype": "float32"}   {"$array": name}        a numpy array, kept as a tensor

Nothing is evaluated or unpickled when a document is read, so a value of another type is refused when it is written.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import load

from infinity.errors import ManifestError, ModelError

_PLAIN = (str, bool, type(None))


class Writer:
    """Turns values into documents.

    Args:
        prefix: of the names of its tensors, by which they differ from those of other writers.

    Attributes:
        tensors: those that the documents name.
    """

    def __init__(self, prefix: str = "t") -> None:
        self._prefix = prefix
        self.tensors: dict[str, torch.Tensor] = {}

    def write(self, value: Any, where: str) -> Any:
        """A document for a value; its tensors are copied.

        Args:
            value: what.
            where: what it is, for errors.

        Raises:
            ModelError: it holds something that cannot be kept; the message says where.
        """
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, (np.generic, np.ndarray)):
            return {"$array": self._keep(_from_numpy(value, where))}
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._keep(value)}
        if isinstance(value, Mapping):
            return self._mapping(value, where)
        return self._other(value, where)

    def _mapping(self, value: Mapping[Any, Any], where: str) -> Any:
        items = [(key, self.write(item, f"{where}[{key!r}]")) for key, item in value.items()]
        if all(isinstance(key, str) for key, _ in items) and not (len(items) == 1 and items[0][0].startswith("$")):
            return dict(items)
        return {"$dict": [[self.write(key, f"a key of {where}"), item] for key, item in items]}

    def _other(self, value: Any, where: str) -> Any:
        if isinstance(value, (list, tuple, set, frozenset)):
            items = [self.write(item, f"{where}[{index}]") for index, item in enumerate(value)]
            if isinstance(value, list):
                return items
            return {"$tuple" if isinstance(value, tuple) else "$set": items}
        if isinstance(value, (bytes, bytearray)):
            return {"$bytes": base64.b64encode(value).decode("ascii")}
        if isinstance(value, complex):
            return {"$complex": [self.write(value.real, where), self.write(value.imag, where)]}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        raise ModelError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be kept in a checkpoint: "
            "expected numbers, strings, tensors, arrays, and lists, tuples, sets and dictionaries of them"
        )

    def _keep(self, tensor: torch.Tensor) -> str:
        name = f"{self._prefix}{len(self.tensors)}"
        with torch.no_grad():
            self.tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        return name


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
                return self._tagged(tag, content, where)
            except (TypeError, ValueError, KeyError, AttributeError, OverflowError, binascii.Error) as error:
                raise ModelError(f"{where}: {tag!r} in a checkpoint cannot be read: {error!r}") from error
        return {key: self._read(item, where) for key, item in document.items()}

    def _tagged(self, tag: str, content: Any, where: str) -> Any:
        if tag in ("$tensor", "$array"):
            tensor = self._tensors[content].clone()
            return tensor if tag == "$tensor" else tensor.numpy()[()]
        if tag in ("$tuple", "$set"):
            items: Sequence[Any] = self._read(list(content), where)
            return tuple(items) if tag == "$tuple" else set(items)
        if tag == "$dict":
            return {self._read(key, where): self._read(item, where) for key, item in content}
        if tag == "$bytes":
            return base64.b64decode(content, validate=True)
        if tag == "$float":
            return float(content)
        if tag == "$complex":
            real, imaginary = (self._read(each, where) for each in content)
            return complex(real, imaginary)
        if tag == "$dtype" and isinstance(dtype := getattr(torch, content), torch.dtype):
            return dtype
        raise ValueError("expected one of the tags that infinity writes")


def _from_numpy(value: np.generic | np.ndarray[Any, Any], where: str) -> torch.Tensor:
    array = np.asarray(value)
    try:
        return torch.from_numpy(array.copy())
    except TypeError as error:
        raise ModelError(f"{where}: a numpy array of {array.dtype} cannot be kept in a checkpoint") from error


def load_tensors(content: bytes, path: Any) -> dict[str, torch.Tensor]:
    """The tensors of a commit's file.

    Raises:
        ManifestError: it is no such file.
    """
    try:
        return load(content)
    except Exception as error:  # safetensors' own errors have no common class
        raise ManifestError(f"commit cannot be used: its file of tensors cannot be read: {error}", path=path) from error
