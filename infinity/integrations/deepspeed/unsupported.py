"""What of DeepSpeed there is not: refused by its name, with what to do instead; misspelt names get the nearest one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NoReturn

from infinity.errors import ModelError

_PIPELINE = (
    "there is no pipeline parallelism: all ranks run the whole model, each on its own batches, and share its state"
)
_EXPERTS = (
    "there is no expert parallelism: an expert is a unit like any other, whose state is on NVMe while it is not used; "
    "give an nn.Module with its experts in an nn.ModuleList to initialize()"
)
_INFERENCE = (
    "there are no inference kernels; for a forward with weights from NVMe call initialize() without an optimizer, "
    "then engine.eval() and engine(batch) under torch.no_grad()"
)
_SEQUENCE = "there is no sequence parallelism: each rank takes whole sequences"
_TENSOR = "there is no tensor parallelism; a layer larger than device memory is tiled: tile_large_layers=True"
_KERNELS = "there are no replacement kernels; torch's run, or compile=True"

NAMES = {
    "pipe": _PIPELINE,
    "PipelineModule": _PIPELINE,
    "PipelineEngine": _PIPELINE,
    "LayerSpec": _PIPELINE,
    "TiedLayerSpec": _PIPELINE,
    "moe": _EXPERTS,
    "inference": _INFERENCE,
    "init_inference": _INFERENCE,
    "InferenceEngine": _INFERENCE,
    "DeepSpeedInferenceConfig": _INFERENCE,
    "default_inference_config": _INFERENCE,
    "DeepSpeedHybridEngine": _INFERENCE,
    "sequence": _SEQUENCE,
    "domino": _TENSOR,
    "tp_model_init": _TENSOR,
    "set_autotp_mode": _TENSOR,
    "module_inject": _KERNELS,
    "replace_transformer_layer": _KERNELS,
    "revert_transformer_layer": _KERNELS,
    "DeepSpeedTransformerLayer": _KERNELS,
    "DeepSpeedTransformerConfig": _KERNELS,
    "compression": "there is no compression; optimizer_states='int8' keeps optimizer states in 8 bits",
    "autotuning": "there is nothing to tune in a configuration; python -m infinity.bench measures the machine",
    "elasticity": "not needed: a checkpoint is loaded by any number of ranks",
    "launcher": "start with torchrun",
    "monitor": "engine.infinity.last_step has the figures of a step; write them where you like",
    "profiling": "engine.infinity.last_step has the figures of a step, infinity.trace.write_trace a picture of it",
    "OnDevice": "make the model under zero.Init(), or infinity.deferred_init()",
}
"""Names of the package, and why they are not there."""

METHODS = {
    "train_batch": "it is a pipeline engine's; call engine(batch), engine.backward(loss) and engine.step()",
    "eval_batch": "it is a pipeline engine's; call engine.eval() and engine(batch) under torch.no_grad()",
    "scale": "call engine.backward(loss), which scales the loss itself",
    "allreduce_gradients": "gradients are reduced under backward; skip it with engine.no_sync()",
    "coalesce_grad_reduction": "each backward reduces what it brings; use engine.no_sync() for all but the last",
    "offload_states": "all state is in the tiers already; budgets say how much of it stays in memory",
    "reload_states": "all state is in the tiers already; budgets say how much of it stays in memory",
    "get_fp32_state_dict": "call engine.infinity.state_dict(), which streams full-precision weights",
    "compile": "give compile=True to initialize(): blocks are compiled, and the hooks around them are not",
}
"""Methods of the engine, and what to call instead."""


class NoSuchMethod(ModelError, AttributeError):  # noqa: N818  # hasattr() asks for AttributeError
    """A method of DeepSpeed's engine that this one has not."""


def refuse_name(where: str, name: str, known: Iterable[str], reason: str | None = None) -> NoReturn:
    """Refuse a name of a module.

    Args:
        where: the module, as DeepSpeed calls it.
        name: what was asked for.
        known: what there is.
        reason: why there is no such thing, if it is one of DeepSpeed's.

    Raises:
        AttributeError: it is no name that DeepSpeed has, as far as is known here.
        ModelError: it is.
    """
    if reason is not None:
        raise ModelError(f"{where}.{name} is not part of infinity's integration: {reason}")
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise AttributeError(f"module {where!r}, as infinity has it, has no attribute {name!r}{hint}")


def refuse_method(name: str) -> NoReturn:
    """Refuse a method of the engine.

    Raises:
        NoSuchMethod: always.
    """
    raise NoSuchMethod(f"engine.{name}() is not part of infinity's integration: {METHODS[name]}")
