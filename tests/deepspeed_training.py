"""A DeepSpeed script's loop on a small model, and the same in plain PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import infinity.integrations.deepspeed as deepspeed
from infinity.deepspeed_json import read_deepspeed
from parity import Plain
from parity_models import GPT, tokens

ROOM: dict[str, Any] = {"device": "cpu", "hbm": "1MiB", "ram": "8MiB"}


@contextlib.contextmanager
def under(
    config: dict[str, Any], make_model: Callable[[], nn.Module] = GPT, **options: Any
) -> Iterator[deepspeed.DeepSpeedEngine]:
    """A model under the engine, closed at the end."""
    torch.manual_seed(0)
    model = make_model()
    torch.manual_seed(1)
    engine, *_ = deepspeed.initialize(model=model, config=config, **{**ROOM, **options})
    try:
        yield engine
    finally:
        engine.destroy()


def train(
    engine: deepspeed.DeepSpeedEngine, num_steps: int, first: int = 0, *, times: float = 1.0
) -> list[torch.Tensor]:
    """The loop of any DeepSpeed script; the losses, of which ``times`` as much goes backward."""
    losses = []
    per_step = engine.gradient_accumulation_steps()
    for index in range(first * per_step, (first + num_steps) * per_step):
        loss = engine(*tokens(index))
        engine.backward(loss * times)
        engine.step()
        losses.append(loss.detach())
    return losses


def train_plainly(config: dict[str, Any], num_steps: int, *, times: float = 1.0) -> tuple[list[torch.Tensor], Plain]:
    """The same in plain PyTorch, with the optimizer and the scheduler of the configuration.

    An fp16 run must not overflow, nor be as long as the window of a loss scale that does not stay.
    """
    torch.manual_seed(0)
    model = GPT()
    settings = read_deepspeed(config, fields={"device": "cpu"})
    assert settings.optimizer is not None
    optimizer = settings.optimizer.make(model.parameters())
    asked = settings.config
    first_scale = asked.initial_loss_scale if asked.loss_scale == "dynamic" else asked.loss_scale
    scaler = {"init_scale": first_scale, "growth_interval": asked.loss_scale_window}
    plain = Plain(model, optimizer, asked.precision, scaler, max_grad_norm=asked.max_grad_norm)
    scheduler = None if settings.scheduler is None else settings.scheduler.make(optimizer)
    torch.manual_seed(1)
    losses, per_step = [], settings.accumulation_steps
    for step in range(num_steps):
        for micro in range(per_step):
            loss = model(*tokens(step * per_step + micro))
            plain.backward(loss * times / per_step)
            losses.append(loss.detach())
        plain.step()
        if scheduler is not None:
            scheduler.step()
    return losses, plain


def weights_of(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    return dict(engine.infinity.state_dict())
