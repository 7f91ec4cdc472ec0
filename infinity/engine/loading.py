"""``ModelLoader``: state dicts into a model whose values are away, as ``nn.Module.load_state_dict`` does it.

The work is PyTorch's and the model's own: ``_load_from_state_dict`` and loading hooks of every module run, module by
module, on parameters at full precision that are made for it (``filled.py``). What they have filled is then written
where the weights are, part by part, so memory holds the weights of one part beside those of one module.

All of it runs twice. The first time nothing is kept: buffers are copies, extra state is not set; so that a state that
does not fit is refused and has changed nothing. A mapping that reads values when they are asked for is therefore asked
twice, and hooks are called twice.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from infinity.engine.filled import filled
from infinity.engine.unit import Part
from infinity.engine.values import Values
from infinity.errors import ModelError


@dataclass(frozen=True, slots=True)
class _Unread:
    """An entry that has not been asked for."""

    source: Mapping[str, Any]
    name: str


class _Entries(MutableMapping[str, Any]):
    """A state dict that modules may change, over one that may read its values on demand."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = dict(entries)

    @classmethod
    def over(cls, state: Mapping[str, Any]) -> _Entries:
        return cls({name: _Unread(state, name) for name in state})

    def below(self, prefix: str) -> _Entries:
        return _Entries({name: value for name, value in self._entries.items() if name.startswith(prefix)})

    def __getitem__(self, name: str) -> Any:
        value = self._entries[name]
        return value.source[value.name] if isinstance(value, _Unread) else value

    def __setitem__(self, name: str, value: Any) -> None:
        self._entries[name] = value

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class _Pass(ABC):
    """What becomes of what modules load."""

    @abstractmethod
    def open(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """A context in which the module loads its buffers and extra state."""

    @abstractmethod
    def take(self, loaded: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Parameters that a module has loaded, at full precision, and must not change any more."""

    @abstractmethod
    def end(self) -> None:
        """All modules have loaded."""


class _Trial(_Pass):
    """Keeps nothing."""

    @contextlib.contextmanager
    def open(self, module: nn.Module) -> Iterator[None]:
        """Copies of buffers, and no extra state."""
        buffers, own = dict(module._buffers), vars(module).get("set_extra_state")
        module._buffers.update({name: None if each is None else each.clone() for name, each in buffers.items()})
        vars(module)["set_extra_state"] = lambda state: None
        try:
            yield
        finally:
            del vars(module)["set_extra_state"]
            if own is not None:
                vars(module)["set_extra_state"] = own
            module._buffers.clear()
            module._buffers.update(buffers)

    def take(self, loaded: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Forget them."""

    def end(self) -> None:
        """Nothing is left."""


class _Real(_Pass):
    """Writes weights, those of a part together."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._waiting: dict[nn.Parameter, torch.Tensor] = {}
        self._parts: set[Part] = set()

    def open(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """The module's own."""
        return contextlib.nullcontext()

    def take(self, loaded: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Write what waits, unless more may come of the same parts."""
        parts = {self._values.part_of(param) for param in loaded}
        if self._parts and parts and not parts & self._parts:
            self.end()
        self._waiting.update(loaded)
        self._parts |= parts

    def end(self) -> None:
        """Write what waits."""
        if self._waiting:
            self._values.load(self._waiting)
        self._waiting, self._parts = {}, set()


class ModelLoader:
    """Loads state dicts into the engine's model.

    Args:
        module: the model.
        values: reads and changes its parameters.
        permit: a context in which modules load, which is refused to users.
    """

    def __init__(
        self,
        module: nn.Module,
        values: Values,
        permit: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._module = module
        self._values = values
        self._permit = permit

    def load(self, state: Mapping[str, Any], *, strict: bool) -> Any:
        """Give the model the parameters at full precision, the buffers and the extra state of ``state``.

        Returns:
            Missing and unexpected names, as ``nn.Module.load_state_dict`` does.

        Raises:
            ModelError: names are missing or unexpected and ``strict``, or a value does not fit; nothing has changed.
            StorageError: a shard could not be read or written.
        """
        if not isinstance(state, Mapping):
            raise ModelError(f"load_state_dict(): expected a mapping of names to tensors, got {type(state).__name__}")
        with torch.inference_mode(False):
            self._run(state, _Trial(), strict=strict)
            return self._run(state, _Real(self._values), strict=strict)

    def _run(self, state: Mapping[str, Any], run: _Pass, *, strict: bool) -> Any:
        keys = _IncompatibleKeys([], [])
        complaints: list[str] = []
        metadata = getattr(state, "_metadata", None) or {}
        with self._permit():
            self._load(self._module, "", _Entries.over(state), metadata, run, keys, complaints)
        if strict:
            for what, names in (("unexpected", keys.unexpected_keys), ("missing", keys.missing_keys)):
                if names:
                    complaints.insert(0, f"{what}: {', '.join(names)}")
        if complaints:
            raise ModelError(f"load_state_dict() of a {type(self._module).__name__}: {'; '.join(complaints)}")
        run.end()
        return keys

    def _load(
        self,
        module: nn.Module,
        prefix: str,
        entries: _Entries,
        metadata: Mapping[str, Any],
        run: _Pass,
        keys: Any,
        complaints: list[str],
    ) -> None:
        """What ``nn.Module.load_state_dict`` does with a module and its children."""
        fill = self._values.weight if _reads_parameters(module) else self._values.empty
        with filled([module], fill) as made, run.open(module):
            before = {param: (like._version, like.data_ptr()) for param, like in made.items()}
            local = dict(metadata.get(prefix[:-1], {}))
            module._load_from_state_dict(
                entries, prefix, local, True, keys.missing_keys, keys.unexpected_keys, complaints
            )
            names = {id(like): name for name, like in module._parameters.items()}
            for param, like in made.items():
                if id(like) not in names:
                    complaints.append(f"{prefix}: its loading replaced parameter {self._values.name_of(param)}")
        changed = {
            param: like.detach() for param, like in made.items() if (like._version, like.data_ptr()) != before[param]
        }
        run.take(changed)
        for name, child in module._modules.items():
            if child is not None:
                below = f"{prefix}{name}."
                self._load(child, below, entries.below(below), metadata, run, keys, complaints)
        for hook in module._load_state_dict_post_hooks.values():
            hook(module, keys)


def _reads_parameters(module: nn.Module) -> bool:
    """Whether what loads the module may look at the values before."""
    own = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    return own or "_load_from_state_dict" in vars(module) or bool(module._load_state_dict_pre_hooks)
