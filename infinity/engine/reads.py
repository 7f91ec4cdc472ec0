"""Reads of a parameter by code that is not its module's forward.

``F.linear(hidden, self.embedding.weight)``, ``nn.ParameterList`` and ``nn.MultiheadAttention`` (which reads the weights
of its output projection without calling it) use parameters of modules whose forward does not run. PyTorch looks every
attribute ``module.name`` that is a parameter up in ``module._parameters``, so a dictionary there that tells of lookups
sees each of them, at the price of one Python call; iterating over parameters stays silent. The same dictionary refuses
that a managed parameter is taken away: pruning and parametrizing would compute from placeholders.

Rejected: a ``TorchFunctionMode`` (sees every operator and costs microseconds on each); patching ``nn.Module``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from infinity.engine.tracing import refuse_compiling
from infinity.engine.unit import Unit
from infinity.errors import ModelError


class WatchedParameters(dict[str, "nn.Parameter | None"]):
    """A module's parameters by name, telling of each lookup of one whose unit nobody uses.

    Args:
        params: what the module has.
        units: the unit of each.
        on_read: called with the unit before the parameter is handed out.
    """

    def __init__(
        self, params: dict[str, nn.Parameter | None], units: dict[str, Unit], on_read: Callable[[Unit], None]
    ) -> None:
        super().__init__(params)
        self._units = units
        self._on_read = on_read
        self._name_of = {id(params[name]): name for name in units}

    def __getitem__(self, name: str) -> nn.Parameter | None:
        unit = self._units.get(name)
        if unit is not None:
            refuse_compiling()
            if not unit.forward_depth:
                self._on_read(unit)
        return super().__getitem__(name)

    def __setitem__(self, name: str, param: nn.Parameter | None) -> None:
        if self._name_of.get(id(param), name) != name:  # about to be replaced under its own name
            self._refuse_removal(self._name_of[id(param)])
        super().__setitem__(name, param)

    def __delitem__(self, name: str) -> None:
        self._refuse_removal(name)
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        """As of any dictionary; what is managed stays."""
        self._refuse_removal(name)
        return super().pop(name, *default)

    def _refuse_removal(self, name: str) -> None:
        """Parametrizations, pruning and weight norm take a parameter away and compute another from its values."""
        if name in self._units:
            raise ModelError(
                f"parameter {name!r} of {self._units[name].name} is under the engine and cannot be removed or "
                "parametrized (torch.nn.utils.parametrize, prune, weight_norm): do that before infinity.initialize()"
            )


def watch_reads(units: Iterable[Unit], on_read: Callable[[Unit], None]) -> list[nn.Module]:
    """Watch every module that owns a parameter of ``units``; returns them, for ``unwatch_reads``."""
    unit_of = {slot.param: unit for unit in units for part in unit.parts for slot in part.slots}
    modules = {id(module): module for unit in units for _, module in unit.triggers}
    for module in modules.values():
        params = module._parameters
        of_module = {name: unit_of[param] for name, param in params.items() if param is not None and param in unit_of}
        module.__dict__["_parameters"] = WatchedParameters(params, of_module, on_read)
    return list(modules.values())


def unwatch_reads(modules: Iterable[nn.Module]) -> None:
    """Give modules plain dictionaries again."""
    for module in modules:
        module.__dict__["_parameters"] = dict(module._parameters)
