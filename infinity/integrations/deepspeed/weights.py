"""Weights in the precision that computes, as one file: safetensors tensor by tensor, or ``torch.save``."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from infinity.engine.engine import Engine
from infinity.engine.meeting import place
from infinity.engine.persistence.exporting import export_weights
from infinity.engine.persistence.tensor_files import Entry
from infinity.errors import system_errors

_PICKLED = {".bin", ".pt", ".pth"}


def write_weights(engine: Engine, path: Path, *, without_frozen: bool = False) -> None:
    """Write them; every rank reads, and rank 0 writes. What was at ``path`` is replaced once the new file is whole.

    Args:
        engine: whose.
        path: the file; its ending says which kind.
        without_frozen: leave out parameters that require no gradient.

    Raises:
        DiskFullError: there is no room.
        StorageError: something could not be read or written; what was there stays.
    """
    weights = _Weights(engine, without_frozen=without_frozen)
    is_first = place().rank == 0
    if path.suffix in _PICKLED:
        tensors: dict[str, torch.Tensor] = {}
        for entry in weights.entries:
            value = weights.read(entry.name)
            if is_first:
                tensors[entry.name] = value
        if is_first:
            tensors |= {alias: tensors[name] for alias, name in weights.tied.items()}
            _replace(path, lambda partial: torch.save(tensors, partial))
    elif is_first:
        directory = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        export_weights(directory, weights.entries, weights.read, tied=weights.tied, max_file_bytes=float("inf"))
        with system_errors("putting the weights in their place", path):
            [file] = directory.iterdir()
            file.replace(path)
            directory.rmdir()
    else:
        for entry in weights.entries:
            weights.read(entry.name)


class _Weights:
    """What is to be written.

    Attributes:
        entries: the tensors, tied ones once.
        tied: further names of some.
    """

    def __init__(self, engine: Engine, *, without_frozen: bool) -> None:
        self._values: Mapping[str, Any] = engine.state_dict()
        module = engine.module
        params = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        computing = next((param.dtype for param in params.values() if param.is_floating_point()), torch.float32)
        self.entries: list[Entry] = []
        self.tied: dict[str, str] = {}
        first: dict[int, str] = {}
        for name in self._values:
            param = params.get(name)
            if param is None:
                value = self._values[name]
                if isinstance(value, torch.Tensor):
                    is_weight = value.is_floating_point() and name not in buffers
                    self.entries.append(Entry(name, computing if is_weight else value.dtype, tuple(value.shape)))
            elif without_frozen and not param.requires_grad:
                continue
            elif id(param) in first:
                self.tied[name] = first[id(param)]
            else:
                first[id(param)] = name
                self.entries.append(Entry(name, param.dtype, tuple(param.shape)))
        self._dtypes = {entry.name: entry.dtype for entry in self.entries}

    def read(self, name: str) -> torch.Tensor:
        value: torch.Tensor = self._values[name]
        return value.detach().to("cpu", self._dtypes[name]).contiguous()


def _replace(path: Path, write: Any) -> None:
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with system_errors("writing the weights", path):
        try:
            write(partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
