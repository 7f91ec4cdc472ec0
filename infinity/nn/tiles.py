"""What tiled layers share: how rows are divided, and state dicts that look like the untiled layer's.

A tiled layer is cut along the rows of its weight, which are its output features or its vectors. Each *tile* is a module
with parameters of its own, and the engine makes it a unit of its own wherever the layer stands (``engine/wrap.py``): a
tile is what has to be in device memory at a time, and its state is what has to be in host memory for its step.

To the outside a tiled layer has ``weight`` and perhaps ``bias``, in every kind of state dict:

* ``state_dict()`` joins the tiles' rows into new tensors. They are copies, where those of other modules share memory
  with the parameters, since there is no memory in which all rows lie together.
* ``state_dict(keep_vars=True)``, which gives parameters themselves, gives what PyTorch computes from them when it joins
  their rows: gradients of it reach the tiles.
* ``load_state_dict()`` cuts what it is given into rows. What is missing or of another shape is told of the layer.

As an attribute ``weight`` does not exist: code that uses it would need all rows at once, so it gets an error that says
what to do.

Rejected: tiles as views of one parameter (it would have to be whole in memory to have views); tiles along the columns
(each would give a partial sum of all outputs); the names of the tiles in state dicts (checkpoints would depend on how
many tiles there were).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from infinity.errors import ModelError

ROW_ALIGNMENT = 64
"""Tiles begin at multiples of so many rows where there are enough: kernels work on whole blocks of outputs."""


class Tile(nn.Module):
    """Some rows of a tiled layer, as a module that is a unit of its own; a base beside a class of ``torch.nn``."""

    def reset_parameters(self) -> None:
        """Nothing: the layer draws its tiles' values, in the order in which the untiled layer does."""


def tile_bounds(num_rows: int, num_tiles: int) -> list[tuple[int, int]]:
    """Where each tile begins and ends, in rows: about equal, and aligned where that leaves as many tiles.

    Raises:
        ModelError: there are fewer rows than tiles, or no tiles.
    """
    if type(num_tiles) is not int or not 1 <= num_tiles <= num_rows:
        raise ModelError(f"num_tiles: expected 1 to {num_rows}, as many as there are rows, got {num_tiles!r}")
    rows = -(-num_rows // num_tiles)
    aligned = -(-rows // ROW_ALIGNMENT) * ROW_ALIGNMENT
    if -(-num_rows // aligned) == num_tiles:
        return [(start, min(start + aligned, num_rows)) for start in range(0, num_rows, aligned)]
    return [(i * num_rows // num_tiles, (i + 1) * num_rows // num_tiles) for i in range(num_tiles)]


def join_rows(shape: Sequence[int], rows: Iterator[torch.Tensor]) -> torch.Tensor:
    """Tensors, one after the other, in one of ``shape`` with the first one's dtype and device."""
    joined, start = None, 0
    for each in rows:
        joined = torch.empty(shape, dtype=each.dtype, device=each.device) if joined is None else joined
        joined[start : start + len(each)] = each
        start += len(each)
    assert joined is not None
    return joined


def own_rows(param: torch.Tensor, bounds: Sequence[tuple[int, int]]) -> list[nn.Parameter]:
    """The rows of a parameter as parameters of their own, with its attributes; in memory of their own if it has any.

    Rows of a meta tensor stay views of it: what ``deferred_init`` knows of it holds for them as well.
    """
    with torch._C.DisableTorchFunction():  # inside deferred_init() a meta tensor says that it is none
        is_meta = param.is_meta
    values = [param.detach()[start:stop] for start, stop in bounds]
    parts = [nn.Parameter(rows if is_meta else rows.clone(), requires_grad=param.requires_grad) for rows in values]
    for part in parts:
        vars(part).update(vars(param))
    return parts


class TiledLayer(nn.Module):
    """A layer in tiles along the rows of its weight.

    Attributes:
        tiles: the tiles, in the order of their rows.
        bounds: where each begins and ends, in rows.
    """

    tiles: nn.ModuleList
    _kind: ClassVar[str]
    _names: ClassVar[tuple[str, ...]]

    def __init__(self, tiles: Sequence[nn.Linear | nn.Embedding]) -> None:
        super().__init__()
        self.tiles = nn.ModuleList(tiles)
        ends = itertools.accumulate((len(tile.weight) for tile in tiles), initial=0)
        self.bounds = tuple(itertools.pairwise(ends))
        self._incomplete: dict[str, str | None] = {}  # while a state dict is loaded
        self.register_state_dict_post_hook(_join)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_cut)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_tell_missing)  # type: ignore[no-untyped-call]

    @property
    def num_tiles(self) -> int:
        """How many tiles there are."""
        return len(self.tiles)

    @property
    def num_rows(self) -> int:
        """How many rows its weight has."""
        return self.bounds[-1][1]

    def parameters_of(self, name: str) -> list[nn.Parameter]:
        """The tiles' parameters called ``name`` (``"weight"``, ``"bias"``), in order; none if the layer has no such."""
        params = [tile._parameters.get(name) for tile in self.tiles]
        return [param for param in params if param is not None]

    def tie_weight(self, other: TiledLayer) -> None:
        """Share the weight of another tiled layer, tile by tile.

        Raises:
            ModelError: it has another shape or other tiles.
        """
        mine, others = self.parameters_of("weight"), other.parameters_of("weight")
        if [param.shape for param in mine] != [param.shape for param in others]:
            shapes = [[tuple(param.shape) for param in params] for params in (mine, others)]
            raise ModelError(
                f"tie_weight(): expected a layer whose tiles have shapes {shapes[0]}, got one with {shapes[1]}; build "
                "both with the same sizes and num_tiles"
            )
        for tile, param in zip(self.tiles, others, strict=True):
            tile.weight = param

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            if name == "bias" and not self.parameters_of("bias"):
                return None
            raise AttributeError(
                f"a {type(self).__name__} has no attribute {name!r}: its rows lie in {self.num_tiles} tiles, so that "
                f"they need not be in memory together. Call the layer; or use .tiles[i].{name}, rows "
                f".bounds[i] of it, or state_dict()[{name!r}]; or leave this {self._kind} untiled"
            )
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._names:
            raise AttributeError(
                f"the {name!r} of a {type(self).__name__} cannot be set: its rows lie in {self.num_tiles} tiles. To "
                "share a weight, tie layers before infinity.tile_large_layers(), or call tie_weight() with a layer in "
                "the same tiles; to change values, use load_state_dict()"
            )
        super().__setattr__(name, value)


def _join(layer: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put the untiled layer's entries in the place of the tiles'."""
    assert isinstance(layer, TiledLayer)
    for name in layer._names:
        names = [f"{prefix}tiles.{i}.{name}" for i in range(layer.num_tiles)]
        if names[0] not in state:
            continue
        if isinstance(state[names[0]], nn.Parameter):  # keep_vars=True
            state[prefix + name] = torch.cat([state.pop(each) for each in names])
        else:
            shape = (layer.num_rows, *state[names[0]].shape[1:])
            state[prefix + name] = join_rows(shape, (state.pop(each) for each in names))


def _cut(
    layer: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Put the tiles' entries in the place of the untiled layer's."""
    assert isinstance(layer, TiledLayer)
    layer._incomplete = {}
    for name in layer._names:
        params = layer.parameters_of(name)
        names = [f"{prefix}tiles.{i}.{name}" for i in range(len(params))]
        value = state.get(prefix + name)
        if not params or value is None:
            layer._incomplete |= dict.fromkeys(names, prefix + name)
            continue
        del state[prefix + name]
        expected = (layer.num_rows, *params[0].shape[1:])
        if tuple(value.shape) != expected:
            errors.append(
                f"size mismatch for {prefix + name}: copying a param with shape {tuple(value.shape)} from checkpoint, "
                f"the shape in current model is {expected}."
            )
            layer._incomplete |= dict.fromkeys(names)
            continue
        state.update(zip(names, value.split([len(param) for param in params]), strict=True))


def _tell_missing(layer: nn.Module, incompatible: Any) -> None:
    """Tell what is missing by the names of the untiled layer."""
    assert isinstance(layer, TiledLayer)
    names = (layer._incomplete.get(name, name) for name in incompatible.missing_keys)
    incompatible.missing_keys[:] = dict.fromkeys(name for name in names if name is not None)
    layer._incomplete = {}
