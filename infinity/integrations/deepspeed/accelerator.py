"""``get_accelerator()``: what scripts ask of the device, answered by torch."""

from __future__ import annotations

from typing import Any

import torch

from infinity.config import Config


class Accelerator:
    """The current accelerator, or the CPU."""

    @property
    def _device(self) -> torch.device:
        return Config().torch_device()

    def is_available(self) -> bool:
        """Whether there is anything to compute with."""
        return True

    def device_name(self, device_index: int | None = None) -> str:
        """``"cuda"``, ``"cuda:1"``, ``"cpu"``."""
        kind = self._device.type
        return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        """The device of that name."""
        return torch.device(self.device_name(device_index))

    def current_device(self) -> int:
        """Its index."""
        return 0 if self._device.type == "cpu" else torch.accelerator.current_device_index()

    def current_device_name(self) -> str:
        """``"cuda:0"``, ``"cpu"``."""
        return self.device_name(self.current_device())

    def set_device(self, device_index: int) -> None:
        """Make another one current; nothing on the CPU."""
        if self._device.type != "cpu":
            torch.accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        """How many there are; 1 on the CPU."""
        return 1 if self._device.type == "cpu" else torch.accelerator.device_count()

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until what is queued has run."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(device_index)

    def empty_cache(self) -> None:
        """Give back memory that torch's allocator holds and does not use."""
        self._ask("empty_cache", None)

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes that tensors take on the accelerator; 0 on the CPU."""
        return int(self._ask("memory_allocated", 0, device_index))

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most that they ever took; 0 on the CPU."""
        return int(self._ask("max_memory_allocated", 0, device_index))

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Begin to measure that anew."""
        self._ask("reset_peak_memory_stats", None, device_index)

    def manual_seed(self, seed: int) -> None:
        """Seed torch's generators, of all devices."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def communication_backend_name(self) -> str:
        """The library for collectives between such devices."""
        return {"cuda": "nccl", "xpu": "xccl"}.get(self._device.type, "gloo")

    def is_bf16_supported(self) -> bool:
        """Whether it computes in bf16."""
        return bool(self._ask("is_bf16_supported", True))

    def is_fp16_supported(self) -> bool:
        """Whether it computes in fp16."""
        return True

    def _ask(self, name: str, otherwise: Any, *arguments: Any) -> Any:
        """What torch's module for the device says, if it has that function."""
        module = getattr(torch, self._device.type, None)
        function = getattr(module, name, None)
        return otherwise if function is None else function(*arguments)


_ACCELERATOR = Accelerator()


def get_accelerator() -> Accelerator:
    """The current accelerator, or the CPU."""
    return _ACCELERATOR
