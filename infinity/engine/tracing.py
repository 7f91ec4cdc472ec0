"""Whether a forward runs to be recorded, compiled or transformed, which has no place under the engine.

``torch.compile``, ``torch.export`` and ``torch.jit.trace`` bake in, guard on or keep the memory of parameters as it is
at that moment; under the engine it is another unit's a moment later. Some back ends would compute the right numbers,
others fail far from the cause, so all are refused at the first such forward. Models compiled before are refused at
start (``start.py``). The engine itself compiles blocks, inside its hooks (``compiled.py``).

A compiled frame is known by the callback that dynamo has put in force on the thread. Dynamo cannot trace the question
itself: it breaks its graph there and runs the hook as it is, which then raises. PyTorch 2.6 has no such question.

Forward-mode differentiation and the transforms of ``torch.func`` that differentiate wrap every tensor that is made
while they run, and so would what a parameter gets for its memory: it would be there after them, and crash the process.
(``torch.vmap`` wraps what depends on its inputs only, and works.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C import _functorch
from torch._C._dynamo import eval_frame
from torch.autograd import forward_ad

from infinity.errors import ModelError

_compiling_callback: Callable[[], object] = getattr(eval_frame, "get_eval_frame_callback", lambda: None)


def refuse_tracing() -> None:
    """Refuse a forward that is being recorded, compiled or transformed.

    Raises:
        ModelError: it is.
    """
    refuse_compiling()
    if torch._C._get_tracing_state() is not None:
        raise ModelError(
            "torch.jit.trace of a model under the engine is not supported: it records parameters that come and go; "
            "trace a model of your own with the values of engine.state_dict()"
        )
    if forward_ad._current_level >= 0 or _differentiates():
        raise ModelError(
            "forward-mode differentiation and torch.func.grad, vjp, jvp, jacrev, jacfwd and hessian of a model under "
            "the engine are not supported: they wrap parameters, which come and go; use loss.backward(), "
            "torch.autograd.grad() or torch.autograd.functional"
        )


def refuse_compiling() -> None:
    """Refuse to bring parameters in the middle of what is being compiled, or runs compiled.

    Raises:
        ModelError: it is.
    """
    if torch.compiler.is_compiling() or _compiling_callback() is not None:
        raise ModelError(
            "torch.compile and torch.export of a model under the engine are not supported: they keep the memory of "
            "parameters, which come and go; call the model itself, and have its blocks compiled by "
            "Config(compile=True). These may compute with parameters of their own modules only: register others in "
            "them, or pass their parameters as arguments"
        )


def _differentiates() -> bool:
    transforms = _functorch.get_interpreter_stack() or ()
    return any(transform.key() != _functorch.TransformType.Vmap for transform in transforms)
