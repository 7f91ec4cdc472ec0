"""Jobs of ranks for DeepSpeed's interface."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity.integrations.deepspeed as deepspeed
from infinity import ModelError
from parity_models import GPT, tokens
from ranks_harness import Rank

NUM_MICRO, NUM_STEPS = 2, 3
CONFIG = {
    "train_batch_size": 3 * NUM_MICRO * 2,
    "gradient_accumulation_steps": NUM_MICRO,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3},
}


class _Counting(logging.Handler):
    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


def _batch(rank: int, index: int) -> tuple[torch.Tensor, ...]:
    return tokens(1000 * rank + index)


def _make_model() -> GPT:
    torch.manual_seed(0)
    return GPT().eval()  # no random numbers


def _train(engine: deepspeed.DeepSpeedEngine, rank: int, steps: range) -> list[float]:
    losses = []
    for index in range(steps.start * NUM_MICRO, steps.stop * NUM_MICRO):
        loss = engine(*_batch(rank, index))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def _train_plainly() -> dict[str, torch.Tensor]:
    """The mean over ranks of each micro-batch's gradients, added up."""
    model = _make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=_weight_decay())
    params = list(model.parameters())
    for step in range(NUM_STEPS):
        sums: list[torch.Tensor] = []
        for index in range(step * NUM_MICRO, (step + 1) * NUM_MICRO):
            each = [torch.autograd.grad(model(*_batch(rank, index)) / NUM_MICRO, params) for rank in range(2)]
            means = [one * 0.5 + other * 0.5 for one, other in zip(*each, strict=True)]
            sums = means if not sums else [total + mean for total, mean in zip(sums, means, strict=True)]
        for param, gradient in zip(params, sums, strict=True):
            param.grad = gradient
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def _weight_decay() -> float:
    """What an AdamW of the configuration has where it does not say."""
    from infinity.deepspeed_json import read_deepspeed

    spec = read_deepspeed(CONFIG, num_ranks=2, fields={"device": "cpu"}).optimizer
    assert spec is not None
    return float(spec.make([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]["weight_decay"])


def _under(folder: Path) -> deepspeed.DeepSpeedEngine:
    engine, *_ = deepspeed.initialize(
        model=_make_model(), config=CONFIG, device="cpu", hbm="1MiB", ram="8MiB", nvme=str(folder)
    )
    return engine


def train_and_resume(rank: Rank, *, folder: str) -> dict[str, Any]:
    """Train, save, go on; load, go on; and compare with plain PyTorch."""
    handler = _Counting()
    logging.getLogger("infinity.deepspeed").addHandler(handler)
    where = Path(folder)
    nvme = rank.directory / "nvme"
    nvme.mkdir(exist_ok=True)
    engine = _under(nvme)
    losses = _train(engine, rank.index, range(2))
    engine.save_checkpoint(where / "ckpt", client_state={"by": rank.index})
    losses += _train(engine, rank.index, range(2, NUM_STEPS))
    weights = dict(engine.infinity.state_dict())
    param = engine.module.get_parameter("blocks.0.qkv.weight")
    local = deepspeed.utils.safe_get_local_fp32_param(param)
    assert local is not None
    with pytest.raises(ModelError, match="safe_set_full_fp32_param"):
        deepspeed.utils.safe_set_local_fp32_param(param, local)
    engine.save_16bit_model(where / "out")
    engine.destroy()

    engine = _under(nvme)
    path, client_state = engine.load_checkpoint(where / "ckpt")
    assert path == str(where / "ckpt" / "global_step2")
    assert client_state == {"by": rank.index}
    again = _train(engine, rank.index, range(2, NUM_STEPS))
    resumed = dict(engine.infinity.state_dict())
    engine.destroy()
    plain = _train_plainly()
    same = all(torch.equal(weights[name], resumed[name]) for name in plain)
    return {
        "losses": losses,
        "bitwise": all(torch.equal(weights[name], plain[name]) for name in plain),
        "resumed": same and again == losses[2 * NUM_MICRO :],
        "world": deepspeed.comm.get_world_size(),
        "said": handler.count,
        "local": local.numel(),
        "numel": param.numel(),
    }
