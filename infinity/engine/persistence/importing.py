"""``open_weights``: the weights in a file or a directory of files, each read when it is asked for.

For ``engine.load_state_dict``, which asks for them one at a time. Files are mapped, so a tensor takes memory only when
it is looked at, and the system may take it back. Nothing that is read becomes code: safetensors, JSON,
``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from infinity.engine.persistence.tensor_files import INDEX_NAME
from infinity.errors import StorageError, storage_error
from infinity.io.paths import user_path

_INDEXES = (INDEX_NAME, "pytorch_model.bin.index.json")
_SINGLES = ("model.safetensors", "pytorch_model.bin")
_MAX_INDEX_BYTES = 256 << 20


def open_weights(path: str | os.PathLike[str]) -> Mapping[str, torch.Tensor]:
    """Weights by name, as ``engine.load_state_dict`` takes them, each read when it is asked for.

    Args:
        path: a safetensors file; a file of ``torch.save`` that holds a state dict; a directory that holds
            ``model.safetensors`` or ``pytorch_model.bin``, or several files and their index; or such an index.

    Raises:
        ConfigError: that is no path.
        StorageError: there is no such file, it is none of these, or is damaged.
    """
    given = user_path(path, "open_weights")
    if given.is_dir():
        found = next((given / name for name in (*_INDEXES, *_SINGLES) if (given / name).exists()), None)
        if found is None:
            raise StorageError(f"no weights are here: expected one of {', '.join((*_INDEXES, *_SINGLES))}", path=given)
        given = found
    if given.name.endswith(".index.json"):
        return _Indexed(given)
    return _open_file(given)


def _open_file(path: Path) -> Mapping[str, torch.Tensor]:
    if not path.is_file():
        raise StorageError("expected a file of weights", path=path)
    return _Safetensors(path) if _is_safetensors(path) else _load(path)


def _is_safetensors(path: Path) -> bool:
    """Whether it begins with the length of a JSON object, and one."""
    try:
        with path.open("rb") as file:
            head = file.read(9)
    except OSError as error:
        raise storage_error("reading weights", error, path=path) from error
    return path.suffix == ".safetensors" or head[8:] == b"{"


class _Safetensors(Mapping[str, torch.Tensor]):
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            file: Any = safe_open(path, framework="pt")
            keys: list[str] = file.keys()
            self._names = {name: name for name in keys}
            metadata: dict[str, str] = file.metadata() or {}
            self._names |= {  # tied, as safetensors.torch.save_model keeps them
                alias: name for alias, name in metadata.items() if name in self._names and alias not in self._names
            }
        except (SafetensorError, OSError, ValueError) as error:
            raise StorageError(f"not a whole safetensors file: {error}", path=path) from error
        self._file = file

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        try:
            tensor: torch.Tensor = self._file.get_tensor(self._names[name])
        except (SafetensorError, OSError, ValueError, RuntimeError, AttributeError, TypeError) as error:
            raise StorageError(f"tensor {name} cannot be read: {error}", path=self._path) from error
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Indexed(Mapping[str, torch.Tensor]):
    """Several files; the one that was asked last is open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_of = read_index(path)
        self._open: tuple[Path, Mapping[str, torch.Tensor]] | None = None
        for file in list(dict.fromkeys(self._file_of.values())):
            if not file.is_file():
                raise StorageError(f"a file that {path.name} names is missing", path=file)
            if _is_safetensors(file):  # whose header may tell further names
                self._file_of = dict.fromkeys(_Safetensors(file), file) | self._file_of

    def __getitem__(self, name: str) -> torch.Tensor:
        file = self._file_of[name]
        if self._open is None or self._open[0] != file:
            self._open = None
            self._open = file, _open_file(file)
        if name not in self._open[1]:
            raise StorageError(f"tensor {name} is not where {self._path.name} says", path=file)
        return self._open[1][name]

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def read_index(path: Path) -> dict[str, Path]:
    """The file of each tensor that an index names, beside the index.

    Raises:
        StorageError: it cannot be read, or is none.
    """
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise StorageError("the index is too large to be one", path=path)
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise (
            error if isinstance(error, StorageError) else storage_error("reading an index", error, path=path)
        ) from error
    except (ValueError, RecursionError) as error:
        raise StorageError(f"not an index of weights: {error}", path=path) from error
    entries = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(entries, dict) or not all(isinstance(name, str) for name in entries.values()):
        raise StorageError("not an index of weights: expected an object with 'weight_map'", path=path)
    for name in set(entries.values()):
        if Path(name).name != name or name in ("", ".", ".."):
            raise StorageError(f"not an index of weights: {name!r} is no name of a file beside it", path=path)
    return {tensor: path.with_name(name) for tensor, name in entries.items()}


def _load(path: Path) -> Mapping[str, torch.Tensor]:
    """What ``torch.save`` has written of a state dict; its tensors are mapped."""
    try:
        loaded = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:  # PyTorch has no type of its own for what is wrong with a file
        reason = str(error).partition("\n")[0]
        raise StorageError(
            f"neither a safetensors file nor one that torch.load(weights_only=True, mmap=True) reads: {reason}",
            path=path,
        ) from error
    is_flat = isinstance(loaded, Mapping) and all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in loaded.items()
    )
    if not is_flat:
        inside = sorted(map(str, loaded))[:8] if isinstance(loaded, Mapping) else []
        raise StorageError(
            f"expected a state dict of tensors by name, got a {type(loaded).__name__}"
            + (f" with {', '.join(inside)}; save the model's own state dict" if inside else ""),
            path=path,
        )
    return dict(loaded)
