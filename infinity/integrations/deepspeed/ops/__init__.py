"""``deepspeed.ops``: optimizers of PyTorch's under DeepSpeed's names."""

from __future__ import annotations

from typing import NoReturn

from infinity.integrations.deepspeed.ops import adagrad, adam
from infinity.integrations.deepspeed.unsupported import refuse_name

__all__ = ["adagrad", "adam"]

_REASONS = {
    "lamb": "torch has no LAMB, whose step needs the norms of whole layers; give a class of your own as optimizer",
    "lion": "torch has no Lion; give a class of your own as optimizer: what steps element by element works",
    "sparse_attention": "torch.nn.functional.scaled_dot_product_attention and flex_attention are PyTorch's",
    "transformer": "there are no replacement kernels; torch's run, or compile=True",
    "fp_quantizer": "optimizer_states='int8' keeps optimizer states in 8 bits",
    "aio": "infinity.io is the engine's own; python -m infinity.bench measures it",
}


def __getattr__(name: str) -> NoReturn:
    refuse_name("deepspeed.ops", name, __all__, _REASONS.get(name))
