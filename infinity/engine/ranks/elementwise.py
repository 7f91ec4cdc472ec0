"""Whether an optimizer does to each element the same whatever it lies beside, so that ranks may step slices."""

from __future__ import annotations

import torch
from torch import nn

from infinity.engine.shadow import Shadow
from infinity.errors import ConfigError

_SHAPE = (48, 32)
_CUT = 640
_NUM_STEPS = 3


def check_elementwise(optimizer: torch.optim.Optimizer, stage: int) -> None:
    """Step a small matrix whole, and again as two pieces of its elements: the bits must be the same.

    Neither the optimizer nor the random state changes.

    Raises:
        ConfigError: they are not (Adafactor, Muon and others that look at rows, columns or norms).
    """
    for index, group in enumerate(optimizer.param_groups):
        dtypes = {param.dtype for param in group["params"] if param.dtype.is_floating_point}
        for dtype in sorted(dtypes, key=str):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(index)
                weights = torch.randn(_SHAPE, dtype=torch.float32).to(dtype)
                gradients = [torch.randn(_SHAPE, dtype=torch.float32).to(dtype) for _ in range(_NUM_STEPS)]
                why = _differs(optimizer, index, weights, gradients)
            if why is not None:
                raise ConfigError(
                    f"stage={stage} with optimizer {type(optimizer).__name__}, group {index}: each rank would step "
                    f"slices of parameters, and {why}; use stage=0, where every rank steps whole parameters, or an "
                    "optimizer that treats each element alone (SGD, Adam, AdamW, Lion, ...)"
                )


def _differs(
    optimizer: torch.optim.Optimizer, group: int, weights: torch.Tensor, gradients: list[torch.Tensor]
) -> str | None:
    def step(pieces: list[slice] | None) -> torch.Tensor:
        flats = [weights.clone()] if pieces is None else [weights.flatten()[piece].clone() for piece in pieces]
        params = [nn.Parameter(flat) for flat in flats]
        states: list[dict[str, object]] = [{} for _ in params]
        for gradient in gradients:
            shadow = Shadow(optimizer)
            for number, param in enumerate(params):
                param.grad = gradient.clone() if pieces is None else gradient.flatten()[pieces[number]].clone()
                states[number] = shadow.step([(group, param, states[number])])[param]
        return torch.cat([param.detach().flatten() for param in params])

    try:
        whole = step(None)
    except Exception:  # it cannot step this shape at all: what it does is seen at the first real step
        return None
    try:
        cut = step([slice(0, _CUT), slice(_CUT, None)])
    except Exception as error:
        return f"it cannot step one: {type(error).__name__}: {error}"
    same = torch.equal(whole.view(torch.uint8), cut.view(torch.uint8))
    return None if same else "it steps a slice otherwise than the same elements within the whole"
