"""Weights in the precision that computes, as one file: safetensors tensor by tensor, or ``torch.save``."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from infinity.engine.engine import Engine
from infinity.engine.meeting import place
from infinity.engine.persistence.exporting import export_tensors
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
    values, is_first = weights.values(), place().rank == 0
    try:
        if is_first and path.suffix in _PICKLED:
            tensors = dict(values)
            tensors |= {alias: tensors[name] for alias, name in weights.tied.items()}
            _replace(path, lambda partial: torch.save(tensors, partial))
        elif is_first:
            directory = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
            export_tensors(directory, weights.like, values, tied=weights.tied, max_file_bytes=float("inf"))
            with system_errors("putting the weights in their place", path):
                [file] = directory.iterdir()
                file.replace(path)
                directory.rmdir()
    finally:
        if place().num_ranks > 1:  # reading is something that all do, each one as often as the others
            deque(values, maxlen=0)


class _Weights:
    """What is to be written.

    Attributes:
        like: a meta tensor of the shape and dtype of each tensor, by name; tied ones once.
        tied: further names of some.
    """

    def __init__(self, engine: Engine, *, without_frozen: bool) -> None:
        self._values: Mapping[str, Any] = engine.state_dict()
        module = engine.module
        params = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        computing = next((param.dtype for param in params.values() if param.is_floating_point()), torch.float32)
        self.like: dict[str, torch.Tensor] = {}
        self.tied: dict[str, str] = {}
        first: dict[int, str] = {}
        for name in self._values:
            param = params.get(name)
            if param is None:
                value = self._values[name]
                if isinstance(value, torch.Tensor):
                    is_weight = value.is_floating_point() and name not in buffers
                    self._add(name, value.shape, computing if is_weight else value.dtype)
            elif without_frozen and not param.requires_grad:
                continue
            elif id(param) in first:
                self.tied[name] = first[id(param)]
            else:
                first[id(param)] = name
                self._add(name, param.shape, param.dtype)

    def _add(self, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        self.like[name] = torch.empty(shape, dtype=dtype, device="meta")

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, read one after the other."""
        for name, like in self.like.items():
            value: torch.Tensor = self._values[name]
            yield name, value.detach().to("cpu", like.dtype).contiguous()


def _replace(path: Path, write: Any) -> None:
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with system_errors("writing the weights", path):
        try:
            write(partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
