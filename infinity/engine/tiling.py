"""Tiling at start: ``Config.tile_large_layers``, and the advice to tile where budgets are refused.

Layers of more than a quarter of ``hbm`` are replaced by tiled ones, so that a block around a tile, the tile and another
that is fetched ahead fit. The optimizer's groups then hold the tiles' parameters where they held those of the layers,
with the same hyper-parameters. That is done where nobody can tell the difference: an optimizer that already has state
of such a layer is refused. What holds parameters elsewhere (a dictionary of the user's, an attribute of an optimizer's)
cannot be seen; it finds parameters that no longer train. A refusal that comes later at start leaves both in tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from infinity.config import Config
from infinity.engine.precision import Precision
from infinity.engine.unit import Part, Slot, Unit
from infinity.errors import ConfigError, ModelError
from infinity.nn.replace import Group, find_groups, replace_layers

_SHARE = 4
"""A layer, or a tile, may take this part of ``hbm``."""


def tile_for_budget(model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, precision: Precision) -> None:
    """Replace what is too large for ``hbm``, in the model and in the groups of its optimizer.

    A large layer that cannot be replaced is left alone: whether the budgets do is for the plan to say.

    Raises:
        ModelError: the optimizer has state of a layer that would be replaced; nothing has been changed.
        ConfigError: a pattern of ``keep_fp32`` is for a layer and not for its tiles; nothing has been changed.
    """
    groups = _large_layers(model, config, precision)
    names = {param: name for group in groups for param, name in group.params.items()}
    for param, name in names.items():
        if optimizer.state.get(param):
            raise ModelError(
                f"tile_large_layers: the optimizer already has state of {name}, which tiles would not have; call "
                "infinity.tile_large_layers(model, max_bytes) before the optimizer is built, or start without state"
            )
    _check_patterns(groups, precision)
    _, parts = replace_layers(model, groups)
    for group in optimizer.param_groups:
        _point_to_tiles(group, parts)


def _check_patterns(groups: Sequence[Group], precision: Precision) -> None:
    for param, name in ((param, name) for group in groups for param, name in group.params.items()):
        layer, _, last = name.rpartition(".")
        tile = f"{layer}.tiles.0.{last}"
        if precision.compute_dtype(param.dtype, name) != precision.compute_dtype(param.dtype, tile):
            raise ConfigError(
                f"keep_fp32: a pattern names {name}, which tile_large_layers cuts into {tile} and so on; write it so "
                f"that it names both, such as {layer + '.*'!r}"
            )


def _point_to_tiles(group: dict[str, object], parts: Mapping[nn.Parameter, Sequence[nn.Parameter]]) -> None:
    """Put tiles in the place of what they are of, in lists that others may hold as well."""
    params, names = group["params"], group.get("param_names")
    assert isinstance(params, list)
    if isinstance(names, list):
        places = [(name.rpartition("."), parts.get(param)) for name, param in zip(names, params, strict=True)]
        names[:] = [
            each
            for (layer, dot, last), tiles in places
            for each in (
                [layer + dot + last] if tiles is None else [f"{layer}.tiles.{i}.{last}" for i in range(len(tiles))]
            )
        ]
    params[:] = [part for param in params for part in parts.get(param, [param])]


def advice(model: nn.Module, unit: Unit, config: Config, precision: Precision) -> str:
    """What to do about a unit that does not fit ``hbm``, if its largest parameter is one that could be in tiles."""
    part, slot = max(((part, slot) for part in unit.parts for slot in part.slots), key=lambda each: _num_bytes(*each))
    if not any(slot.param in group.params for group in _large_layers(model, config, precision)):
        return ""
    max_bytes = int(config.hbm) // _SHARE * slot.param.element_size() // part.compute_dtype.itemsize
    return (
        f". The largest parameter of {unit.name} is {slot.name}, which could be gathered in tiles: call "
        f"infinity.tile_large_layers(model, {max_bytes}) before the optimizer is built, or set tile_large_layers in "
        "Config"
    )


def _large_layers(model: nn.Module, config: Config, precision: Precision) -> list[Group]:
    """What may be in tiles and is too large."""
    return find_groups(
        model,
        int(config.hbm) // _SHARE,
        lambda name, param: precision.compute_dtype(param.dtype, name).itemsize,
        lambda name, reason: None,
    )


def _num_bytes(part: Part, slot: Slot) -> int:
    return slot.num_elements * part.compute_dtype.itemsize
