"""``Generators``: PyTorch's default random generators, as far as a model on one device draws from them."""

from __future__ import annotations

import torch

States = tuple[torch.Tensor, ...]


class Generators:
    """The CPU's, and the accelerator's where one is used.

    Args:
        device: where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._accelerator = None if device.type == "cpu" else device

    def states(self) -> States:
        """The states of all."""
        states = [torch.get_rng_state()]
        if self._accelerator is not None:
            states.append(torch.get_device_module(self._accelerator).get_rng_state(self._accelerator))
        return tuple(states)

    def restore(self, states: States) -> None:
        """Set the states of all."""
        torch.set_rng_state(states[0])
        if self._accelerator is not None:
            torch.get_device_module(self._accelerator).set_rng_state(states[1], self._accelerator)

    def draw(self, count: int) -> list[States]:
        """So many states, each as after ``torch.manual_seed``, with seeds drawn from the CPU's generator."""
        seeds = torch.randint(2**63 - 1, (count,), device="cpu").tolist()
        devices = [torch.device("cpu"), *([] if self._accelerator is None else [self._accelerator])]
        return [tuple(torch.Generator(device).manual_seed(seed).get_state() for device in devices) for seed in seeds]
