"""``CallerState``: what PyTorch keeps for each thread by itself, carried from one thread into others.

A thread begins with PyTorch's defaults, whatever its maker has set: the number of threads of operators (which is part
of a sum's bits), saved-tensor hooks, the default device, the accelerator's current device and stream, context
variables. What cannot be carried into several threads at once is an *obstacle*.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from infinity.engine import hookstack
from infinity.engine.hookstack import Hooks
from infinity.engine.worker import ThreadCounts


@dataclass(frozen=True, slots=True)
class CallerState:
    """What the thread that made it had set."""

    counts: ThreadCounts
    devices: Sequence[torch.device]
    hooks: Hooks | None
    stream: torch.Stream | None
    context: contextvars.Context

    @classmethod
    def of_caller(cls, device: torch.device) -> CallerState:
        """That of the calling thread, which computes on ``device``; there must be no obstacle."""
        modes = _get_current_function_mode_stack()
        return cls(
            ThreadCounts.of_caller(),
            [mode.device for mode in modes if isinstance(mode, DeviceContext)],
            None if hookstack.innermost_hooks is None else hookstack.innermost_hooks(False),
            None if device.type == "cpu" else torch.accelerator.current_stream(device),
            contextvars.copy_context(),
        )

    def run(self, function: Callable[[], None]) -> None:
        """Call ``function`` in the calling thread as in the one that made this; backward runs in this thread too."""
        self.context.copy().run(self._run, function)

    def _run(self, function: Callable[[], None]) -> None:
        with contextlib.ExitStack() as stack:
            if self.stream is not None:
                torch.accelerator.set_device_index(self.stream.device_index)
                torch.accelerator.set_stream(self.stream)
            self.counts.apply()
            for device in self.devices:
                stack.enter_context(device)
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if self.hooks is not None:
                hookstack.push(self.hooks)
                stack.callback(hookstack.pop)
            function()


def obstacle() -> str | None:
    """Why what the calling thread has set cannot be carried into others; ``None`` if it can."""
    if hookstack.innermost_hooks is None:
        return f"PyTorch {torch.__version__} does not say which saved-tensor hooks are in force, 2.8 does"
    if torch._C._is_any_autocast_enabled():
        return "autocast is in force around accumulate(), and its cache of casts belongs to one thread"
    modes = [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]
    modes += _get_current_dispatch_mode_stack()
    if modes:
        return f"{type(modes[-1]).__name__} is in force around accumulate(), and belongs to one thread"
    return None
