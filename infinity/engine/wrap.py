"""Which modules are units.

Automatic units, in one walk over the module tree:

* a *block*: a module with children that stands in a ``ModuleList``, ``ModuleDict`` or ``Sequential`` beside another of
  its class (a transformer layer, a residual block). A block that would not leave room to prefetch another, or that
  itself consists mostly of smaller blocks (stages of layers, a mixture's experts), is opened: its children are asked;
* a module outside every block with much of its own (an embedding, a head) alone;
* the *rest*, small parameters outside every block (a final norm, a class token), together, in model order and in runs
  no larger than an automatic block may be;
* a parameter that modules of different units share (tied weights) in a unit of its own, which each of these modules
  gathers: its values exist once.

However units are chosen, each tile of a tiled layer (``infinity/nn/tiles.py``) is a unit of its own, inside a block
too: the block's unit is what is left, and how large a block is means its size without tiles.

Every module that owns a parameter of a unit gathers it, not only the block: a submodule called by itself, or recomputed
by a checkpoint inside a block, works.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from infinity.errors import ConfigError
from infinity.nn.tiles import Tile

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_LARGE_BYTES = 1 << 20
_REST = "(rest)"
_ROOT = "(root)"


@dataclass(slots=True)
class UnitPlan:
    """A unit before it has a layout.

    Attributes:
        name: the block's or module's qualified name, or "(rest)", "(root)" or "(tied) NAME".
        params: its parameters by qualified name, in the model's order.
        triggers: the modules whose forward needs it, by qualified name, outermost first.
    """

    name: str
    params: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    triggers: list[tuple[str, nn.Module]] = field(default_factory=list)


def plan_units(
    model: nn.Module, units: str | Sequence[str], *, max_unit_bytes: int, max_block_bytes: float | None = None
) -> list[UnitPlan]:
    """Divide a model's parameters into units.

    Args:
        model: the user's model.
        units: ``"auto"``, or the class names of the modules to take as blocks.
        max_unit_bytes: an automatic block larger than this is opened; positive.
        max_block_bytes: the same limit for blocks alone, if it is another.

    Returns:
        The units in the order of their first parameter; every parameter is in exactly one.

    Raises:
        ConfigError: ``units`` names a class of which the model has no module.
    """
    if units != "auto":
        _check_classes(model, units)
    modules = dict(model.named_modules())
    blocks = dict(_blocks(model, units, max_unit_bytes if max_block_bytes is None else max_block_bytes))
    block_of = {name: _enclosing(name, blocks) for name in modules}
    owners: dict[nn.Parameter, list[str]] = {}
    for name, module in modules.items():
        for param in module._parameters.values():
            if param is not None:
                owners.setdefault(param, []).append(name)

    plans: dict[str, UnitPlan] = {}
    rest_bytes, runs = 0, {0: 0}
    for name, param in model.named_parameters():
        unit = _unit_of(param, owners[param], block_of, modules)
        if unit == _REST:
            rest_bytes += _num_bytes(param)
            run = runs.setdefault(rest_bytes // max_unit_bytes, len(runs))
            unit = f"{_REST} {run + 1}" if run else _REST
        plan = plans.setdefault(unit, UnitPlan(unit))
        if not plan.params and unit in blocks:
            plan.triggers.append((unit, modules[unit]))
        plan.params.append((name, param))
        known = {id(module) for _, module in plan.triggers}
        plan.triggers += [(owner, modules[owner]) for owner in owners[param] if id(modules[owner]) not in known]
    return list(plans.values())


def plan_compiled_units(model: nn.Module, units: str | Sequence[str], *, max_unit_bytes: int) -> list[UnitPlan]:
    """As ``plan_units``, for blocks whose forwards are compiled: what is compiled must not depend on budgets.

    No block is opened, and every unit that a module of a block needs is gathered for the block itself.

    Raises:
        ConfigError: as for ``plan_units`` and ``find_blocks``.
    """
    plans = plan_units(model, units, max_unit_bytes=max_unit_bytes, max_block_bytes=math.inf)
    for name, block in find_blocks(model, units, setting="compile").items():
        inside = {id(module) for module in block.modules()}
        for plan in plans:
            triggers = {id(module) for _, module in plan.triggers}
            if triggers & inside and id(block) not in triggers:
                plan.triggers.insert(0, (name, block))
    return plans


def find_blocks(model: nn.Module, units: str | Sequence[str], *, setting: str) -> dict[str, nn.Module]:
    """The blocks of a model, whatever their size, each once, by name: repeated ones, or those that ``units`` names.

    Args:
        model: the user's model.
        units: ``"auto"``, or class names.
        setting: the field of ``Config`` that means them.

    Raises:
        ConfigError: there are none, or ``units`` names a class of which the model has no module.
    """
    if units != "auto":
        _check_classes(model, units)
    blocks: dict[int, tuple[str, nn.Module]] = {}
    for name, block in _blocks(model, units, math.inf):
        if not isinstance(block, Tile):  # its forward is a piece of another's
            blocks.setdefault(id(block), (name, block))
    if not blocks:
        raise ConfigError(
            f"{setting}: expected a model with repeated blocks (modules of one class side by side in a ModuleList, "
            f"ModuleDict or Sequential, with children of their own), but found none in {type(model).__name__}; name "
            f"the classes of its blocks in units=, or leave {setting} out"
        )
    return dict(blocks.values())


def _check_classes(model: nn.Module, units: Sequence[str]) -> None:
    known = {type(module).__name__ for module in model.modules()}
    for name in units:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1) or sorted(known)[:20]
            raise ConfigError(
                f"units: the model has no module of class {name!r}; expected classes of its modules, such as "
                f"{', '.join(close)}"
            )


def _unit_of(
    param: nn.Parameter, owners: list[str], block_of: dict[str, str | None], modules: dict[str, nn.Module]
) -> str:
    homes = {block_of[owner] for owner in owners}
    if len(homes) == 1 and (home := homes.pop()) is not None:
        return home
    if len(owners) > 1:
        return f"(tied) {owners[0]}"
    own = sum(_num_bytes(p) for p in modules[owners[0]]._parameters.values() if p is not None)
    return (owners[0] or _ROOT) if own >= _LARGE_BYTES else _REST


def _blocks(model: nn.Module, units: str | Sequence[str], max_block_bytes: float) -> Iterator[tuple[str, nn.Module]]:
    def walk(name: str, module: nn.Module, is_block: bool) -> Iterator[tuple[str, nn.Module]]:
        if is_block:
            yield name, module
            yield from ((path, each) for path, each in module.named_modules(prefix=name) if isinstance(each, Tile))
            return
        repeated = _repeated(module)
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            if isinstance(child, Tile):
                chosen = True
            elif units == "auto":
                chosen = type(child) in repeated and _module_bytes(child) <= max_block_bytes and not _is_stage(child)
            else:
                chosen = type(child).__name__ in units
            yield from walk(path, child, chosen)

    yield from walk("", model, False)


def _repeated(module: nn.Module) -> set[type[nn.Module]]:
    """Classes that occur at least twice among a container's children, with children and parameters of their own."""
    if not isinstance(module, _CONTAINERS):
        return set()
    kinds = [type(c) for c in module.children() if any(True for _ in c.children()) and _module_bytes(c)]
    return {kind for kind in kinds if kinds.count(kind) >= 2}


def _is_stage(module: nn.Module) -> bool:
    """Whether most of a block's bytes lie in blocks of its own."""
    inner = sum(
        _module_bytes(child)
        for container in module.modules()
        for child in container.children()
        if type(child) in _repeated(container)
    )
    return inner * 2 > _module_bytes(module)


def _enclosing(name: str, blocks: dict[str, nn.Module]) -> str | None:
    """The block that a module is or lies in."""
    path = name
    while path:
        if path in blocks:
            return path
        path = path.rpartition(".")[0]
    return None


def _num_bytes(param: nn.Parameter) -> int:
    return param.numel() * param.element_size()


def _module_bytes(module: nn.Module) -> int:
    """What a module and those in it have, tiles left out; a parameter that several share once."""
    owners = (each for each in module.modules() if not isinstance(each, Tile))
    params = {param for owner in owners for param in owner._parameters.values() if param is not None}
    return sum(map(_num_bytes, params))
