"""What happens in an ordinary training loop between two good steps: habits, accidents and changes of order.

Each is run in plain PyTorch too, which says what must come of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import parity_models as models
from parity import Trainer

Accident = Callable[[Trainer], Any]


class PlannedError(Exception):
    """Raised on purpose."""


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02}], lr=0.01)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def forward(trainer: Trainer, seed: int) -> torch.Tensor:
    loss: torch.Tensor = trainer.model(*models.tokens(seed))
    return loss


def good_step(trainer: Trainer, seed: int) -> torch.Tensor:
    loss = forward(trainer, seed)
    loss.backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return loss.detach()


def between_good_steps(accident: Callable[[Trainer], Any]) -> Callable[[Trainer], list[Any]]:
    def script(trainer: Trainer) -> list[Any]:
        before = [good_step(trainer, seed) for seed in range(2)]
        seen = accident(trainer)
        return [*before, seen, *(good_step(trainer, 10 + seed) for seed in range(2))]

    return script


def raising(error: type[BaseException]) -> Callable[..., None]:
    def hook(*_: object) -> None:
        raise error

    return hook


def nothing(trainer: Trainer) -> None:
    pass


def evaluation(trainer: Trainer) -> list[torch.Tensor]:
    trainer.model.eval()
    with torch.no_grad():
        seen = [forward(trainer, 20)]
    with torch.inference_mode():
        seen += [forward(trainer, seed).clone() for seed in (21, 22)]
    seen.append(forward(trainer, 23).detach())  # with a graph that is never used
    trainer.model.train()
    return [tensor.clone() for tensor in seen]


def exception_in_forward(trainer: Trainer) -> None:
    for where in ("blocks.1.mlp", "blocks.0", "norm"):
        handle = trainer.model.get_submodule(where).register_forward_hook(raising(PlannedError))
        with pytest.raises(PlannedError):
            forward(trainer, 30)
        handle.remove()


def exception_before_forward(trainer: Trainer) -> None:
    handle = trainer.model.get_submodule("blocks.1").register_forward_pre_hook(raising(PlannedError), prepend=True)
    with pytest.raises(PlannedError):
        forward(trainer, 30)
    handle.remove()


def interrupt_in_forward(trainer: Trainer) -> None:
    for where in ("blocks.1.mlp", "blocks.0", "tokens"):
        handle = trainer.model.get_submodule(where).register_forward_hook(raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            forward(trainer, 31)
        handle.remove()


def _fail_in_backward(trainer: Trainer, error: type[BaseException], *, where: str = "blocks.0") -> None:
    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(raising(error))

    handle = trainer.model.get_submodule(where).register_forward_hook(hook)
    loss = forward(trainer, 32)
    handle.remove()
    with pytest.raises(error):
        loss.backward()


def exception_in_backward(trainer: Trainer) -> None:
    _fail_in_backward(trainer, PlannedError)
    trainer.optimizer.zero_grad()


def exception_in_backward_without_zero_grad(trainer: Trainer) -> None:
    _fail_in_backward(trainer, PlannedError, where="blocks.1")


def interrupt_in_backward(trainer: Trainer) -> None:
    _fail_in_backward(trainer, KeyboardInterrupt)
    trainer.optimizer.zero_grad()


def exception_in_backward_of_one_of_two_graphs(trainer: Trainer) -> None:
    other = forward(trainer, 33)
    _fail_in_backward(trainer, PlannedError)
    other.backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def two_forwards_one_backward(trainer: Trainer) -> torch.Tensor:
    loss = forward(trainer, 40) + forward(trainer, 41) * 2
    loss.backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return loss.detach()


def two_forwards_two_backwards(trainer: Trainer) -> None:
    first, second = forward(trainer, 42), forward(trainer, 43)
    with torch.no_grad():
        forward(trainer, 44)
    second.backward()
    first.backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def graph_used_twice(trainer: Trainer) -> None:
    loss = forward(trainer, 45)
    loss.backward(retain_graph=True)
    loss.backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def gradients_discarded(trainer: Trainer) -> None:
    forward(trainer, 46).backward()
    trainer.optimizer.zero_grad()
    forward(trainer, 47).backward()
    trainer.model.zero_grad()


def step_without_gradients(trainer: Trainer) -> None:
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    trainer.optimizer.step()


def no_zero_grad_but_in_front(trainer: Trainer) -> None:
    for seed in (48, 49):
        trainer.optimizer.zero_grad()
        forward(trainer, seed).backward()
        trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def backward_to_some_parameters(trainer: Trainer) -> None:
    forward(trainer, 50).backward(inputs=list(trainer.model.get_submodule("blocks.0").parameters()))
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def gradients_asked_for(trainer: Trainer) -> list[torch.Tensor]:
    params = list(trainer.model.get_submodule("blocks.1").parameters())
    return [gradient.clone() for gradient in torch.autograd.grad(forward(trainer, 51), params)]


def gradient_penalty(trainer: Trainer) -> torch.Tensor:
    params = list(trainer.model.get_submodule("blocks.1").parameters())
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        loss = forward(trainer, 52)
    gradients = torch.autograd.grad(loss, params, create_graph=True)
    forward(trainer, 53).detach()  # other units use the memory meanwhile
    penalty = loss + sum(gradient.square().sum() for gradient in gradients)
    penalty.backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return penalty.detach()


def state_dicts_between(trainer: Trainer) -> Any:
    seen: dict[str, torch.Tensor] = {}
    for module in (trainer.model.get_submodule("blocks.0"), trainer.model):
        forward(trainer, 54).backward()
        seen |= {name: value.clone() for name, value in module.state_dict().items()}
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    return seen


def activations_on_cpu(trainer: Trainer) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        loss = forward(trainer, 55)
    loss.backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return loss.detach()


def users_saved_tensor_hooks(trainer: Trainer) -> torch.Tensor:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach() / 2 if tensor.is_floating_point() else tensor

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        return packed * 2 if packed.is_floating_point() else packed

    block = trainer.model.get_submodule("blocks.0")
    inner_forward = block.forward

    def hooked_forward(x: torch.Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return inner_forward(x)

    block.forward = hooked_forward
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = forward(trainer, 56)
    del block.forward
    loss.backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return loss.detach()


def autocast(trainer: Trainer) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = forward(trainer, 57)
    loss.backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return loss.detach()


def hooks_of_the_user(trainer: Trainer) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    block, weight = trainer.model.get_submodule("blocks.0"), trainer.model.get_parameter("blocks.1.out.weight")
    handles = [
        block.register_forward_hook(lambda module, args, output: output * 0.5),
        block.register_full_backward_hook(lambda module, inputs, outputs: seen.extend(outputs)),
        block.get_submodule("out").register_forward_hook(lambda m, args, output: seen.append(m.weight.detach() * 1)),
        weight.register_hook(lambda gradient: gradient * 3),
    ]
    good_step(trainer, 58)
    for handle in handles:
        handle.remove()
    return seen


def part_of_the_model_alone(trainer: Trainer) -> torch.Tensor:
    block = trainer.model.get_submodule("blocks.1")
    (x,) = models.sequences(59)
    loss: torch.Tensor = block(block(x.requires_grad_())).square().mean()
    loss.backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    assert x.grad is not None
    return x.grad


def frozen_meanwhile(trainer: Trainer) -> None:
    block = trainer.model.get_submodule("blocks.0").requires_grad_(False)
    good_step(trainer, 60)
    block.requires_grad_(True)


def hyperparameters_by_hand(trainer: Trainer) -> None:
    trainer.optimizer.param_groups[0]["lr"] *= 3
    moved = trainer.optimizer.param_groups[-1]["params"].pop()
    trainer.optimizer.param_groups[0]["params"].append(moved)


def many_forwards_in_odd_order(trainer: Trainer) -> list[torch.Tensor]:
    order = random.Random(0)
    with torch.no_grad():
        (x,) = models.sequences(61)
        for _ in range(6):
            x = trainer.model.get_submodule(f"blocks.{order.randrange(2)}")(x)
        return [x, *(forward(trainer, seed) for seed in (62, 63))]


ACCIDENTS = [
    nothing, evaluation, exception_in_forward, exception_before_forward, interrupt_in_forward, exception_in_backward,
    exception_in_backward_without_zero_grad, exception_in_backward_of_one_of_two_graphs, interrupt_in_backward,
    two_forwards_one_backward, two_forwards_two_backwards, graph_used_twice, gradients_discarded,
    step_without_gradients, no_zero_grad_but_in_front, backward_to_some_parameters, gradients_asked_for,
    gradient_penalty, state_dicts_between, activations_on_cpu, users_saved_tensor_hooks, autocast, hooks_of_the_user,
    part_of_the_model_alone, frozen_meanwhile, hyperparameters_by_hand, many_forwards_in_odd_order,
]  # fmt: skip
