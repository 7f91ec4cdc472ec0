"""``Config.compile``: the forward of each block is compiled, and the engine stays outside of what is compiled.

Dynamo takes what a module computes with as inputs of its graph and guards on shapes, strides and dtypes, not on
addresses. So a compiled forward may run with parameters wherever they lie by then, as long as

* they are gathered before it is entered and stay so until it is left: all units that any module inside the block needs
  are gathered for the block itself (``wrap.plan_compiled_units``);
* it sees nothing of the engine: hooks inside the block would break the graph at every module, be guarded on, one
  compilation for each block, and ask for units in the middle of a graph. So while it runs, the modules of the block
  have no hooks of the engine and a plain dictionary of parameters. Equal blocks then share one compilation;
* nothing keeps memory: what the compiled forward saves for backward is packed as handles like everything else
  (``saved.py``); what records addresses (CUDA graphs) or values (freezing) is refused.

The numbers are bitwise those of plain PyTorch whose blocks are compiled with the same ``compile_forward``.

Where dynamo breaks its graph, frames below run under it too, among them our saved-tensor hooks, which it is told to
leave alone. A read of a parameter outside the block is such a break as well, and is refused: each call would gather
another unit in the middle, and the block would silently run uncompiled.

Rejected: compiling ``module.__call__`` (``module.compile()``), since that traces the hooks; hooks that do nothing under
the compiler (they are still guarded on, and still run where the graph breaks); a copy of the block without hooks (state
that forward changes would be the copy's).
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.config import Config
from infinity.engine.hooks import ModuleHooks
from infinity.engine.reads import WatchedParameters
from infinity.engine.unit import Unit
from infinity.errors import ConfigError, ModelError

_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_parameters")


def check_compiling(config: Config, device: torch.device) -> None:
    """Refuse a ``compile_backend`` that cannot compile here, or not under the engine. Does nothing without ``compile``.

    Raises:
        ConfigError: it says what is missing and what to do.
    """
    if not config.compile:
        return
    name = config.compile_backend
    if name not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends(exclude_tags=("debug", "experimental")))
        raise ConfigError(f"compile_backend: torch knows no backend {name!r}; expected one such as {known}, aot_eager")
    if name == "cudagraphs":
        raise ConfigError(
            "compile_backend: 'cudagraphs' records the addresses of parameters, which come and go; use 'inductor'"
        )
    try:
        torch.compile(_nothing, backend=name)
    except RuntimeError as error:
        raise ConfigError(f"compile: torch.compile does not work here: {error}; leave it out") from error
    if name == "inductor":
        _check_inductor(device)


def _nothing() -> None:
    """What is compiled to see whether anything can be."""


def _check_inductor(device: torch.device) -> None:
    from torch._inductor import config as settings

    for setting, is_on in (("triton.cudagraphs", settings.triton.cudagraphs), ("freezing", settings.freezing)):
        if is_on:
            raise ConfigError(
                f"compile: torch._inductor.config.{setting} is on, which keeps addresses or values of parameters, "
                "which come and go; switch it off"
            )
    missing = missing_for_compiling(device)
    if missing is not None:
        raise ConfigError(
            f"compile: compile_backend='inductor' needs {missing}; or use compile_backend='aot_eager', which compiles "
            "no kernels, or compile=False"
        )


def missing_for_compiling(device: torch.device) -> str | None:
    """What Inductor lacks here to make kernels for a device, and how to get it, in words; ``None``: nothing."""
    return _missing_for_cpu() if device.type == "cpu" else _missing_for_accelerators()


def _missing_for_cpu() -> str | None:
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "a C++ compiler, and there is none on PATH or in CXX: install one (Debian: apt install g++)"
    headers = sysconfig.get_path("include")
    if not Path(headers, "Python.h").exists():
        return (
            f"Python's headers, and there is no Python.h in {headers}: install them (Debian: apt install python3-dev)"
        )
    return None


def _missing_for_accelerators() -> str | None:
    from torch.utils._triton import has_triton

    if not has_triton():
        return "Triton, which does not work here: install it with the torch build for your accelerator (pip)"
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        return "a C compiler for Triton, and there is none on PATH or in CC: install one (Debian: apt install gcc)"
    return None


def compile_forward(module: nn.Module, backend: str) -> Callable[..., Any]:
    """The compiled forward of one block, hooks left out: what the engine runs, and what its numbers are compared with.

    Args:
        module: the block.
        backend: the name of one of ``torch.compile``'s backends.
    """
    return torch.compile(module.forward, backend=backend)


class CompiledBlocks:
    """Compiled forwards in the place of those of blocks, from construction to ``remove``.

    Args:
        blocks: which modules, by name.
        units: all units of the model; the engine's hooks are on their modules.
        backend: the name of one of ``torch.compile``'s backends.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], units: Sequence[Unit], backend: str) -> None:
        _leave_engine_alone()
        compiled = []
        for name, module in blocks.items():
            needed = [unit for unit in units if any(trigger is module for _, trigger in unit.triggers)]
            compiled.append((module, _compiled(name, module, needed, backend)))
        self._originals = [(module, vars(module).get("forward")) for module, _ in compiled]
        for module, forward in compiled:
            vars(module)["forward"] = forward

    def remove(self) -> None:
        """Give every block its own forward again."""
        for module, forward in self._originals:
            if forward is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = forward
        self._originals = []


def _compiled(name: str, module: nn.Module, needed: Sequence[Unit], backend: str) -> Callable[..., Any]:
    """What calls the compiled forward of a block, with what it needs gathered and nothing of the engine in sight."""
    compiled = compile_forward(module, backend)
    inside = [_Inside(each) for each in module.modules() if isinstance(each._parameters, WatchedParameters)]

    @functools.wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not all(unit.forward_depth for unit in needed):
            raise ModelError(
                f"block {name}: its forward() was called past the hooks that bring its parameters; call the module "
                "itself, block(x) and not block.forward(x)"
            )
        with _without_engine(inside):
            return compiled(*args, **kwargs)

    return forward


class _Inside:
    """A module inside a compiled block.

    Attributes:
        attributes: its ``__dict__``.
        hooks: the numbers of the engine's hooks among its own.
    """

    def __init__(self, module: nn.Module) -> None:
        self.attributes = vars(module)
        tables = (module._forward_pre_hooks, module._forward_hooks)
        self.hooks = {number for table in tables for number, hook in table.items() if _is_engines(hook)}

    def table_without_engine(self, name: str) -> dict[Any, Any]:
        """One of ``_TABLES``, copied, with the user's own only."""
        table = self.attributes[name]
        if name == "_parameters":
            return dict(table)
        return OrderedDict((number, hook) for number, hook in table.items() if number not in self.hooks)


def _is_engines(hook: Callable[..., Any]) -> bool:
    function = hook.func if isinstance(hook, functools.partial) else hook
    return isinstance(getattr(function, "__self__", None), ModuleHooks)


@contextlib.contextmanager
def _without_engine(modules: Iterable[_Inside]) -> Iterator[None]:
    """A context in which modules are as they would be in plain PyTorch, with gathered parameters."""
    kept = [(each.attributes, {name: each.attributes[name] for name in _TABLES}) for each in modules]
    for each in modules:
        each.attributes.update({name: each.table_without_engine(name) for name in _TABLES})
    try:
        yield
    finally:
        for attributes, tables in kept:
            attributes.update(tables)


@functools.cache
def _leave_engine_alone() -> None:
    """Have dynamo run the engine's own functions as they are, wherever it meets them."""
    from torch._dynamo import trace_rules

    trace_rules.add("infinity.engine")
