"""What a model cannot do while its values are elsewhere: one clear error for each, instead of NaN or PyTorch's words.

*Under an engine* a model cannot be copied, pickled, moved, converted, scripted, replicated or loaded into, nor can
adapters be put in, taken out or merged: its parameters hold placeholders. *After it*, also if it was closed by an error
or forgotten, or failed half-way at start, the placeholders are all that is left. So forwards and ``state_dict()`` are
refused too, module by module, until the values are back: through ``load_state_dict()``, which gets memory to copy into
where it assigns nothing, or through ``param.data``. Then every trace of the refusal goes.

How: what ``copy``, ``pickle``, ``torch.jit`` and ``nn.Module`` itself look up on the *object* (``__deepcopy__``,
``__reduce_ex__``, ``_apply``, …) is shadowed in the module's ``__dict__``; the rest are module hooks. Rejected: a class
made for each module (``type(module)`` and its name are the user's); patching torch (other models are not ours).
``copy.copy`` asks the same question as ``pickle`` and is therefore refused as well.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from infinity.engine.standin import AwayGradient
from infinity.engine.unit import Slot, Unit
from infinity.errors import EngineStateError, ModelError

_Change = Callable[[torch.Tensor], torch.Tensor]

_EXCHANGES = (
    "add_adapter",
    "add_weighted_adapter",
    "delete_adapter",
    "load_adapter",
    "merge_adapter",
    "merge_and_unload",
    "unload",
    "unmerge_adapter",
)
"""Methods of adapter libraries that write to weights, or put parameters in or out; some would fail in silence."""


class Refusals:
    """Refuses on one model what its placeholders would make wrong, from construction until its values are back.

    Args:
        model: the user's model.
        units: its units.
    """

    def __init__(self, model: nn.Module, units: Iterable[Unit]) -> None:
        self._slots = {slot.param: slot for unit in units for slot in unit.slots}
        self._closed = False
        self._handles: dict[nn.Module, list[Any]] = {}
        self._shadows: dict[nn.Module, dict[str, Any]] = {}
        for module in [each for each in model.modules() if any(param in self._slots for param in each.parameters())]:
            self._handles[module] = [module.register_load_state_dict_pre_hook(self._before_load)]
            self._shadows[module] = self._shadows_for(module)
            vars(module).update(self._shadows[module])

    def close(self) -> None:
        """The engine has ended: from now on what is refused is whatever finds no value."""
        self._closed = True
        for module, handles in list(self._handles.items()):
            if self._missing(module) is None:
                self._lift(module)
                continue
            handles += [
                module.register_forward_pre_hook(self._before_forward, prepend=True),
                module.register_state_dict_pre_hook(self._before_state_dict),
            ]

    @contextlib.contextmanager
    def permit_loading(self) -> Iterator[None]:
        """A context in which modules load, as the engine has them do."""
        refusing = {
            module: module._load_state_dict_pre_hooks.pop(self._handles[module][0].id) for module in self._handles
        }
        try:
            yield
        finally:
            for module, hook in refusing.items():
                key = self._handles[module][0].id
                module._load_state_dict_pre_hooks[key] = hook

    def _shadows_for(self, module: nn.Module) -> dict[str, Callable[..., Any]]:
        """What is looked up on ``module`` itself before its class."""
        has_adapters = any(hasattr(type(module), name) for name in ("load_adapter", "merge_and_unload"))
        exchanges = [name for name in _EXCHANGES if has_adapters and hasattr(type(module), name)]
        return {
            **{name: functools.partial(self._exchange, module, name) for name in exchanges},
            "__deepcopy__": functools.partial(self._deepcopy, module),
            "__reduce_ex__": functools.partial(self._reduce, module),
            "__prepare_scriptable__": functools.partial(self._script, module),
            "_replicate_for_data_parallel": functools.partial(self._replicate, module),
            "_apply": functools.partial(self._convert, module),
        }

    def _lift(self, module: nn.Module) -> None:
        for each in module.modules():
            for handle in self._handles.pop(each, ()):
                handle.remove()
            for name, shadow in self._shadows.pop(each, {}).items():
                if vars(each).get(name) is shadow:  # and not that of the next engine
                    del vars(each)[name]

    def _missing(self, module: nn.Module) -> Slot | None:
        """A parameter below ``module`` that holds nothing but a placeholder."""
        slots = (self._slots.get(param) for param in module.parameters())
        return next((slot for slot in slots if slot is not None and slot.is_away), None)

    def _require_values(self, module: nn.Module, use: str) -> None:
        """Refuse ``use`` while the engine is there, and after it as long as values are missing."""
        if not self._closed:
            raise ModelError(
                f"{use} of a {type(module).__name__} under the engine: its parameters, such as "
                f"{self._any_name(module)}, hold placeholders while their values are in the tiers; do it before "
                "infinity.initialize(), or take the values from engine.state_dict()"
            )
        missing = self._missing(module)
        if missing is not None:
            self._refuse_empty(missing, f"{use} of a {type(module).__name__}")
        self._lift(module)

    def _any_name(self, module: nn.Module) -> str:
        return next(self._slots[param].name for param in module.parameters() if param in self._slots)

    @staticmethod
    def _refuse_empty(slot: Slot, use: str) -> NoReturn:
        raise EngineStateError(
            f"{use}: parameter {slot.name} has no value, because the engine that had it is closed and its tiers are "
            "gone; take engine.state_dict() before close(), and give the values back with "
            "model.load_state_dict(state) (with assign=True at the precision of the state)"
        )

    def _deepcopy(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        self._require_values(module, "copy.deepcopy()")
        return copy.deepcopy(module, memo)

    def _reduce(self, module: nn.Module, protocol: int) -> Any:
        self._require_values(module, "copying or pickling (pickle, torch.save())")
        return module.__reduce_ex__(protocol)

    def _exchange(self, module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        self._require_values(module, f"{name}()")
        return getattr(module, name)(*args, **kwargs)

    def _script(self, module: nn.Module) -> Any:
        self._require_values(module, "torch.jit.script()")
        return module

    def _replicate(self, module: nn.Module) -> Any:
        self._require_values(module, "nn.DataParallel")
        return module._replicate_for_data_parallel()

    def _convert(self, module: nn.Module, change: _Change, *args: Any, **kwargs: Any) -> nn.Module:
        """In the place of ``_apply``, which ``to()``, ``half()``, ``cuda()``, ``share_memory()``, … come down to."""
        slots = [self._slots[param] for param in module.parameters() if param in self._slots]
        if self._closed:
            slots = [slot for slot in slots if slot.is_away]
        for slot in slots:
            if _changes(slot, change):
                use = f"moving or converting a {type(module).__name__} (to(), half(), cuda(), share_memory(), …)"
                if self._closed:
                    self._refuse_empty(slot, use)
                raise ModelError(
                    f"{use} under the engine: parameter {slot.name} holds a placeholder while its value is in the "
                    "tiers; do it before infinity.initialize(), and choose Config(device=…, precision=…)"
                )
        away = {slot.param for slot in slots}

        def change_the_rest(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if tensor in away or isinstance(tensor, AwayGradient) else change(tensor)

        return type(module)._apply(module, change_the_rest, *args, **kwargs)  # type: ignore[no-any-return]

    def _before_load(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
        if not self._closed:
            raise ModelError(
                f"load_state_dict() of a {type(module).__name__} under the engine: the value of parameter "
                f"{self._any_name(module)} is in the tiers; call engine.load_state_dict(), or load before "
                "infinity.initialize()"
            )
        if metadata.get("assign_to_params_buffers"):
            return
        for name, param in module._parameters.items():
            slot, value = self._slots.get(param) if param is not None else None, state.get(prefix + name)
            if slot is not None and slot.is_away and isinstance(value, torch.Tensor) and value.shape == slot.shape:
                memory = torch.empty_strided(slot.shape, slot.stride, dtype=slot.param.dtype, device=slot.param.device)
                slot.param.data = memory.copy_(slot.param.data)  # NaN: a value that cannot be copied leaves no garbage

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self._require_values(module, "forward")

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not keep_vars:
            self._require_values(module, "state_dict()")


def find_missing(model: nn.Module) -> str | None:
    """The name of a parameter of which an engine, running or closed, has left nothing but a placeholder."""
    for module in model.modules():
        owner = getattr(getattr(vars(module).get("_apply"), "func", None), "__self__", None)
        missing = owner._missing(module) if isinstance(owner, Refusals) else None
        if missing is not None:
            return missing.name
    return None


def _changes(slot: Slot, change: _Change) -> bool:
    """Whether ``change`` would give the parameter other memory, asked of a small tensor like it."""
    slowest_first = sorted(range(len(slot.shape)), key=lambda dim: -slot.stride[dim])
    small = torch.empty((2,) * len(slot.shape), dtype=slot.param.dtype, device=slot.param.device)
    probe = small.permute([slowest_first.index(dim) for dim in range(len(slot.shape))])
    was_shared = probe.is_shared()
    return change(probe) is not probe or probe.is_shared() != was_shared
