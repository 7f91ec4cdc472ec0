"""``tile_large_layers``: put tiled layers in the place of those that are too large, in a model that exists.

Everything is looked at before anything is replaced, so what is refused leaves the model as it was. Layers that share a
weight are replaced together and share its tiles; a layer that stands in several places is replaced in all of them by
one.

Only ``nn.Linear`` and ``nn.Embedding`` themselves, as PyTorch made them, are replaced: what a class made from them, a
hook, a parametrization or a method put onto the object does, a tiled layer would not do. Two things cannot be seen from
here. Code of the model that reads ``layer.weight`` itself finds no such attribute, and is told why. Code that holds the
layer in a place of its own (a list, a closure) would go on to compute with what no longer trains: the layer that was
replaced has no parameters any more, and refuses to be called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from pydantic import TypeAdapter, ValidationError
from torch import nn

from infinity.errors import ConfigError, ModelError
from infinity.fields import Bytes
from infinity.nn.embedding import TiledEmbedding
from infinity.nn.linear import LinearTile, TiledLinear
from infinity.nn.tiles import Tile, TiledLayer, own_rows, tile_bounds

SizeOf: TypeAlias = "Callable[[str, nn.Parameter], int]"
"""The bytes that an element of a parameter takes, by its name."""

_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a weight, or one that shares none.

    Attributes:
        weight: the weight.
        layers: the layers by the names under which the model has them.
        num_tiles: in how many tiles they are to be.
    """

    weight: nn.Parameter
    layers: dict[str, nn.Module]
    num_tiles: int

    @property
    def params(self) -> dict[nn.Parameter, str]:
        """The parameters that will be gone, each with one of its names."""
        return {
            param: f"{layer_name}.{name}"
            for layer_name, layer in reversed(self.layers.items())
            for name, param in layer._parameters.items()
            if param is not None
        }


def tile_large_layers(model: nn.Module, max_bytes: int | str) -> list[str]:
    """Replace every ``nn.Linear`` and ``nn.Embedding`` of more than ``max_bytes`` by a tiled one, in place.

    Call it before the optimizer is built, since the parameters are others afterwards; also on a model made under
    ``deferred_init()``, inside or after. State dicts of the model stay what they were.

    Args:
        model: the model; it is not such a layer itself.
        max_bytes: what the parameters of a layer, and of each of its tiles, may take at most, in the dtype that they
            have: a number, or a string such as ``"64MiB"``. A quarter of ``Config.hbm`` leaves room for a block around
            a tile and for another tile that is fetched ahead.

    Returns:
        The names of the modules that were replaced, in the model's order; a module in several places has several.

    Raises:
        ConfigError: ``max_bytes`` is no number of bytes.
        ModelError: ``model`` is no module; or a layer that is too large cannot be replaced, or a single row of it is
            too large: the message says which and why. Nothing has been replaced.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"tile_large_layers(): expected a torch.nn.Module, got {type(model).__name__}")
    try:
        limit = int(TypeAdapter(Bytes).validate_python(max_bytes))
    except ValidationError as error:
        raise ConfigError(f"max_bytes: {error.errors()[0]['msg']}, got {max_bytes!r}") from None
    return replace_layers(model, find_groups(model, limit, lambda name, param: param.element_size(), refuse))[0]


def refuse(name: str, reason: str) -> None:
    """Refuse to replace anything, because of one layer.

    Raises:
        ModelError: always.
    """
    raise ModelError(
        f"tile_large_layers(): {name} {reason}. Nothing has been replaced; raise max_bytes so that it is left alone, "
        "or change that first"
    )


def replace_layers(
    model: nn.Module, groups: Sequence[Group]
) -> tuple[list[str], dict[nn.Parameter, list[nn.Parameter]]]:
    """Put tiled layers in the place of groups; their names, and for each parameter that is gone those of the tiles."""
    replaced: dict[nn.Parameter, list[nn.Parameter]] = {}
    made = {layer: _tiled(layer, group, replaced) for group in groups for layer in group.layers.values()}
    names = []
    for name, parent in list(model.named_modules()):
        for child_name, child in list(parent._modules.items()):
            if child in made:
                parent._modules[child_name] = made[child]
                names.append(f"{name}.{child_name}" if name else child_name)
    for layer in made:
        layer._parameters.clear()
        vars(layer)["forward"] = functools.partial(_refuse_call, type(layer).__name__)
    return names, replaced


def _refuse_call(kind: str, *args: object, **kwargs: object) -> NoReturn:
    raise ModelError(
        f"this {kind} was replaced by tile_large_layers() and is no part of the model any more, but is still held in a "
        "place that is no module's (a list, a closure, an attribute of another object) and called from there; take it "
        "from the model instead, or tile layers before others hold them"
    )


def refuse_reason(layer: nn.Module) -> str | None:
    """Why a layer cannot be tiled; ``None`` if it can."""
    if type(layer) not in (nn.Linear, nn.Embedding):
        return (
            f"is a {type(layer).__name__}, and only nn.Linear and nn.Embedding themselves can be replaced by tiles "
            "that do the same"
        )
    if layer._compiled_call_impl is not None:
        return "is compiled"
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.sparse):
        return "has max_norm or sparse=True, which tiles do not support"
    for name in vars(layer):
        if callable(getattr(type(layer), name, None)):
            return f"has a {name}() of its own, put there by hand, by a library or by infinity.initialize()"
    for name in _HOOKS:
        if getattr(layer, name):
            return f"has hooks ({name.strip('_')}), which tiles would not call; add them afterwards"
    expected = {"weight", "bias"} if isinstance(layer, nn.Linear) else {"weight"}
    more = {*layer._parameters, *layer._buffers, *layer._modules} - expected
    if more or layer._parameters.get("weight") is None:
        return f"has other parameters, buffers or modules than a {type(layer).__name__}: {', '.join(sorted(more))}"
    for name, param in layer._parameters.items():
        if param is not None and (reason := _refuse_parameter(param)) is not None:
            return f"has a {name} that {reason}"
    return None


def _refuse_parameter(param: nn.Parameter) -> str | None:
    if type(param) is not nn.Parameter:
        return f"is a {type(param).__name__}"
    if param.grad is not None:
        return "has a gradient, which would be lost; discard it first (zero_grad())"
    if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
        return "has hooks, which would be lost; add them to the tiles' afterwards"
    return None


def find_groups(model: nn.Module, max_bytes: int, size_of: SizeOf, refuse: Callable[[str, str], None]) -> list[Group]:
    """What is to be replaced so that no layer and no tile takes more than ``max_bytes``.

    Args:
        model: the model.
        max_bytes: the most.
        size_of: the bytes of a parameter's element, by the parameter's name.
        refuse: told of a layer that is too large but cannot be replaced, and why; it raises, or the layer is left.
    """
    names = {module: name for name, module in model.named_modules()}
    owners: dict[nn.Parameter | None, list[nn.Module]] = {}
    for module in names:
        for param in module._parameters.values():
            if param is not None and module not in owners.setdefault(param, []):
                owners[param].append(module)

    def row_bytes(layer: nn.Module) -> int:
        params = [(f"{names[layer]}.{name}", param) for name, param in layer._parameters.items() if param is not None]
        return sum(param.numel() // max(len(param), 1) * size_of(name, param) for name, param in params if param.ndim)

    def problem(layers: list[nn.Module], module: nn.Module) -> str | None:
        for layer in layers:
            if (reason := refuse_reason(layer)) is not None:
                return reason if layer is module else f"shares its weight with {names[layer]}, which {reason}"
            if layer is model:
                return "is the model itself, which cannot be replaced in place"
            bias = layer._parameters.get("bias")
            for other in owners[bias] if bias is not None else ():
                if other not in layers:
                    return f"shares its bias, but not its weight, with {names[other]}"
        row = max(map(row_bytes, layers))
        return f"has rows of {row} bytes, more than max_bytes={max_bytes}" if row > max_bytes else None

    groups: dict[nn.Parameter | None, Group] = {}
    for module in names:
        weight = module._parameters.get("weight")
        if not isinstance(module, (nn.Linear, nn.Embedding)) or isinstance(module, Tile) or weight in groups:
            continue
        params = module.named_parameters(prefix=names[module])
        if sum(param.numel() * size_of(name, param) for name, param in params) <= max_bytes:
            continue
        layers = [module, *(owner for owner in owners.get(weight, ()) if owner is not module)]
        if (reason := problem(layers, module)) is not None:
            refuse(names[module] or type(module).__name__, reason)
            continue
        assert weight is not None
        num_tiles = _num_tiles(len(weight), max_bytes // max(map(row_bytes, layers)))
        groups[weight] = Group(weight, {names[layer]: layer for layer in layers}, num_tiles)
    return list(groups.values())


def _num_tiles(num_rows: int, max_rows: int) -> int:
    """The fewest tiles of which none has more than ``max_rows``."""
    num_tiles = -(-num_rows // max_rows)
    while max(stop - start for start, stop in tile_bounds(num_rows, num_tiles)) > max_rows:
        num_tiles += 1
    return num_tiles


def _tiled(layer: nn.Module, group: Group, replaced: dict[nn.Parameter, list[nn.Parameter]]) -> TiledLayer:
    """The tiled layer; parameters that another has been replaced by already are taken again."""
    bounds = tile_bounds(len(group.weight), group.num_tiles)
    for param in layer._parameters.values():
        if param is not None and param not in replaced:
            replaced[param] = own_rows(param, bounds)
    weights = replaced[group.weight]
    if isinstance(layer, nn.Embedding):
        return TiledEmbedding.of_weights(weights, layer)
    bias = layer._parameters["bias"]
    biases = [None] * group.num_tiles if bias is None else replaced[bias]
    return TiledLinear.of_tiles(list(map(LinearTile, weights, biases))).train(layer.training)
