"""``OptimizerSpec``: DeepSpeed's ``optimizer`` section, as an optimizer of ``torch.optim``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from infinity.deepspeed_json.document import wrong
from infinity.deepspeed_json.notes import closest, is_on
from infinity.errors import ConfigError

_Kind = type[torch.optim.Optimizer]

WRONG_ARGUMENTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What constructors of PyTorch fail with where an argument is not what it must be."""

_COMPRESSED = "it compresses what ranks exchange, which changes the numbers; take AdamW"
_REFUSED = {
    "onebitadam": _COMPRESSED,
    "zerooneadam": _COMPRESSED,
    "onebitlamb": _COMPRESSED,
    "lion": "torch.optim has no Lion; give initialize() an optimizer of your own, or take AdamW",
    "lamb": "torch.optim has no LAMB; give initialize() an optimizer of your own, or take AdamW",
    "muadam": "give initialize() the optimizer of the package mup",
    "muadamw": "give initialize() the optimizer of the package mup",
    "musgd": "give initialize() the optimizer of the package mup",
    "muon": "which parameters it steps is marked on them in DeepSpeed; give initialize() torch.optim.Muon and an AdamW",
}
_SAME_ANYWAY: Mapping[str, Callable[[Any], bool]] = {
    "torch_adam": lambda value: True,
    "adam_w_mode": lambda value: True,
    "bias_correction": is_on,
    "set_grad_none": lambda value: True,
    "max_grad_norm": lambda value: not is_on(value),
    "fp32_optimizer_states": is_on,
}
"""Arguments of DeepSpeed's own optimizers, and the values of theirs that say what is so anyway."""

_FLAGS = {"foreach", "fused"}
"""Arguments of torch.optim that are true or false, beside those whose default is; each may be left to PyTorch."""


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """Which optimizer, and with what.

    Attributes:
        type: as the configuration has it.
        params: the arguments that it has there.
    """

    type: str
    params: Mapping[str, Any] = field(default_factory=dict)

    def make(self, params: Any) -> torch.optim.Optimizer:
        """The optimizer of parameters, or of groups of them."""
        kind, arguments = self._resolve()
        make: Callable[..., torch.optim.Optimizer] = kind
        return make(params, **arguments)

    def check(self) -> None:
        """Refuse what cannot be made.

        Raises:
            ConfigError: it names the type or the argument.
        """
        kind, arguments = self._resolve()
        make: Callable[..., torch.optim.Optimizer] = kind
        try:
            make([torch.nn.Parameter(torch.zeros(1, 1))], **arguments)
        except WRONG_ARGUMENTS as error:
            raise ConfigError(f"DeepSpeed configuration: optimizer.params of {self.type}: {error}") from error

    def _resolve(self) -> tuple[_Kind, dict[str, Any]]:
        kind = self._kind()
        signature = inspect.signature(kind).parameters
        known = set(signature) - {"self", "params"}
        arguments: dict[str, Any] = {}
        for name, value in self.params.items():
            if name in known:
                is_flag = name in _FLAGS or isinstance(signature[name].default, bool)
                if is_flag != isinstance(value, bool):
                    raise wrong(f"optimizer.params.{name}", "true or false" if is_flag else "a number", value)
                arguments[name] = numeric(value)
            elif name not in _SAME_ANYWAY:
                raise ConfigError(
                    f"DeepSpeed configuration: optimizer.params.{name}: torch.optim.{kind.__name__} has no such "
                    f"argument{closest(name, known) or '; it takes ' + ', '.join(sorted(known))}"
                )
            elif not _SAME_ANYWAY[name](value):
                instead = "use gradient_clipping" if name == "max_grad_norm" else "leave it out"
                raise ConfigError(f"DeepSpeed configuration: optimizer.params.{name} = {value!r}: {instead}")
        if self._is_adam() and not is_on(self.params.get("torch_adam")):
            arguments.setdefault("weight_decay", 0.0)  # DeepSpeed's own default, where PyTorch's AdamW has 0.01
        return kind, arguments

    def _is_adam(self) -> bool:
        return self.type.lower() in {"adam", "adamw"}

    def _kind(self) -> _Kind:
        lower = self.type.lower()
        if lower in _REFUSED:
            raise ConfigError(f"DeepSpeed configuration: optimizer.type = {self.type!r}: {_REFUSED[lower]}")
        if self._is_adam():
            decoupled = lower == "adamw" or is_on(self.params.get("adam_w_mode", True))
            return torch.optim.AdamW if decoupled else torch.optim.Adam
        kinds = {
            name.lower(): kind
            for name, kind in vars(torch.optim).items()
            if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
        }
        if lower not in kinds:
            names = sorted(kind.__name__ for kind in kinds.values())
            raise ConfigError(
                f"DeepSpeed configuration: optimizer.type = {self.type!r}: torch.optim has none of that name; give "
                f"initialize() your own{closest(self.type, names) or '; it has ' + ', '.join(names)}"
            )
        return kinds[lower]


def numeric(value: Any) -> Any:
    """A string that is a number, as the number: ``"1e-5"``, which YAML makes of it too; lists as tuples."""
    if isinstance(value, (list, tuple)):
        return tuple(numeric(each) for each in value)
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value
