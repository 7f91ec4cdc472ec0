"""Whether a forward runs to be recorded or compiled, which has no place under the engine.

``torch.compile``, ``torch.export`` and ``torch.jit.trace`` bake in, guard on or keep the memory of parameters as it is
at that moment; under the engine it is another unit's a moment later. Some back ends would compute the right numbers,
others fail far from the cause, so all are refused at the first such forward. Models compiled before are refused at
start (``start.py``).

A compiled frame is known by the callback that dynamo has put in force on the thread. Dynamo cannot trace the question
itself: it breaks its graph there and runs the hook as it is, which then raises. PyTorch 2.6 has no such question.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C._dynamo import eval_frame

from infinity.errors import ModelError

_compiling_callback: Callable[[], object] = getattr(eval_frame, "get_eval_frame_callback", lambda: None)


def refuse_tracing() -> None:
    """Refuse a forward that is being recorded or compiled.

    Raises:
        ModelError: it is.
    """
    if torch.compiler.is_compiling() or _compiling_callback() is not None:
        raise ModelError(
            "torch.compile and torch.export of a model under the engine are not supported: they keep the memory of "
            "parameters, which come and go; call the model itself"
        )
    if torch._C._get_tracing_state() is not None:
        raise ModelError(
            "torch.jit.trace of a model under the engine is not supported: it records parameters that come and go; "
            "trace a model of your own with the values of engine.state_dict()"
        )
