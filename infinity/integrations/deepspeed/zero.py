"""``deepspeed.zero``: models without memory, and parameters that hold their values for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn

from infinity.engine.deferred import deferred_init
from infinity.engine.engine import Engine
from infinity.errors import ModelError
from infinity.integrations.deepspeed.estimate import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from infinity.integrations.deepspeed.log import not_needed
from infinity.integrations.deepspeed.registry import engine_of
from infinity.integrations.deepspeed.unsupported import refuse_name

__all__ = [
    "GatheredParameters",
    "Init",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "register_external_parameter",
    "unregister_external_parameter",
]

_INIT_NEEDS = {
    "module": "values of a model that is there are moved into the tiers by initialize()",
    "data_parallel_group": "initialize() finds the ranks",
    "mem_efficient_linear": "no activation keeps a gathered weight alive, whatever the layer",
    "remote_device": "values are made when initialize() stores them, where the configuration says",
    "pin_memory": "host memory is pinned where an accelerator is used",
    "config_dict_or_path": "initialize() reads the configuration",
    "config": "initialize() reads the configuration",
    "dtype": "parameters are made as the model says, so that masters keep all bits; precision rounds what computes",
    "mpu": "there is no model parallelism",
    "zero_param_parallel_group": "shard_ranks says who shares the state",
    "zero_quantized_weights": "parameters travel as they are, bit for bit",
    "zero_quantized_nontrainable_weights": "parameters travel as they are, bit for bit",
    "sequence_data_parallel_group": "there is no sequence parallelism",
    "param_swapper": "the tiers move parameters",
}
_INIT_DEFAULTS = {"mem_efficient_linear": True, "pin_memory": False}


class Init(contextlib.ContextDecorator):
    """A context in which a model is made without memory for its large tensors: ``infinity.deferred_init``.

    Each is initialised when ``initialize`` stores it, with the values, to the bit, that it would have had. Initialise
    and convert the model inside as well.

    Args:
        module: DeepSpeed's further arguments are taken, and reported as not needed where one is given.
        enabled: whether it does anything.
        options: see ``module``.

    Raises:
        ModelError: an argument is none of DeepSpeed's.
    """

    def __init__(self, module: nn.Module | None = None, *, enabled: bool = True, **options: Any) -> None:
        self._enabled = enabled
        for name, value in {"module": module, **options}.items():
            if name not in _INIT_NEEDS:
                refuse_argument("zero.Init", name)
            if value is not None and value is not _INIT_DEFAULTS.get(name, False):
                not_needed(f"zero.Init({name}=...)", _INIT_NEEDS[name])
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Init:
        if self._enabled:
            self._stack.enter_context(deferred_init())
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._stack.__exit__(*exc_info)


class GatheredParameters:
    """A context in which parameters hold their values: ``engine.gathered``.

    Parameters of no engine (before ``initialize``) are left as they are.

    Args:
        params: one or several, or a module's.
        modifier_rank: a rank whose changes are kept, on all ranks; ``None``: changes are refused.
        fwd_module: not needed: a forward gathers what it uses.
        enabled: whether it does anything.

    Raises:
        EngineStateError: it is inside a forward, a backward or another such context.
        ModelError: ``params`` are none, or of several engines; a parameter was changed without ``modifier_rank``; or
            ranks are several and ``modifier_rank`` is not 0.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter] | nn.Module,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given: Any = params.parameters() if isinstance(params, nn.Module) else params
        self._params = [given] if isinstance(given, nn.Parameter) else list(given)
        self._modifier_rank = modifier_rank
        self._enabled = enabled
        self._stack = contextlib.ExitStack()
        if fwd_module is not None:
            not_needed("GatheredParameters(fwd_module=...)", "a forward gathers what it uses")

    def __enter__(self) -> None:
        engines = {id(engine): engine for engine in map(engine_of, self._params) if engine is not None}
        if not self._enabled or not engines:
            return
        if len(engines) > 1:
            raise ModelError("GatheredParameters: parameters of several engines; gather each engine's on their own")
        [engine] = engines.values()
        self._check_modifier(engine)
        self._stack.enter_context(engine.gathered(self._params, modify=self._modifier_rank is not None))

    def __exit__(self, *exc_info: Any) -> None:
        self._stack.__exit__(*exc_info)

    def _check_modifier(self, engine: Engine) -> None:
        if self._modifier_rank not in (None, 0) and engine.summary().num_ranks > 1:
            raise ModelError(
                f"GatheredParameters(modifier_rank={self._modifier_rank}): changes are rank 0's, or the same on all "
                "ranks; change there, with modifier_rank=0"
            )


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Not needed: where a forward reads a parameter of another module, the lookup is seen and its unit is gathered."""
    not_needed("zero.register_external_parameter()", "a forward that reads another module's parameter has it gathered")


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Not needed; see ``register_external_parameter``."""


def refuse_argument(where: str, name: str) -> NoReturn:
    """Refuse an argument that DeepSpeed has not either.

    Raises:
        ModelError: always.
    """
    raise ModelError(f"{where}(): got an unknown argument {name!r}; known: {', '.join([*_INIT_NEEDS, 'enabled'])}")


def __getattr__(name: str) -> NoReturn:
    reasons = dict.fromkeys(
        ("TiledLinear", "TiledLinearReturnBias"),
        "infinity.TiledLinear is its like; tile_large_layers=True in initialize(), or "
        "infinity.tile_large_layers(model, size), puts it in the place of what is too large",
    ) | {"MiCS_Init": "use Init; shard_ranks in initialize() says how many ranks share the state"}
    refuse_name("deepspeed.zero", name, __all__, reasons.get(name))
