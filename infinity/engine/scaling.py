"""Loss scaling: ``NoScaling``, and ``LossScaling`` as ``torch.amp.GradScaler`` and DeepSpeed do it.

fp16 has no numbers below 6e-8, where many gradients lie. So backward starts from the loss times a scale, every gradient
is that much larger, and before it is stepped or its norm is taken it is multiplied by the inverse, in fp32. Where a
gradient overflows, the step is skipped and the scale halved; after a number of good steps in a row it is doubled.

Whether all gradients are finite is seen from their norms (``norms.py``), so it costs no pass of its own: no sum of
powers of what fp16 can hold overflows in fp32 for the norms that are taken for this (``SHOWS_OVERFLOW``).

As with ``GradScaler.unscale_``, the scale is taken off once in a step: at the first ``clip_grad_norm_`` or at ``step``.
After that another backward would add scaled gradients to unscaled ones; it is refused.

Belongs to the training thread (and autograd's).
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from infinity.config import Config
from infinity.errors import EngineStateError, NonFiniteError

SHOWS_OVERFLOW = (1.0, 2.0, math.inf)
"""Norms in fp32 of gradients from fp16 that are finite exactly if all elements are."""

_FACTOR = 2.0


class Scaling(ABC):
    """What is done to the loss before backward, and undone on gradients after.

    Attributes:
        num_skipped_steps: steps that were skipped because a gradient was not finite.
    """

    num_skipped_steps = 0

    @property
    @abstractmethod
    def scale(self) -> float:
        """What the loss is multiplied by now."""

    @property
    @abstractmethod
    def inverses(self) -> Sequence[torch.Tensor]:
        """What each gradient is multiplied by, one after the other, before it is stepped: no dimensions, on the CPU."""

    @property
    @abstractmethod
    def norm_type(self) -> float | None:
        """Which norm is to be taken of each gradient to see whether it is finite; ``None``: none."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Run backward from the scaled loss."""

    @abstractmethod
    def refuse_foreign(self, name: str) -> None:
        """Refuse a gradient of parameter ``name`` that does not come from ``backward``, or comes too late.

        Raises:
            EngineStateError: it does.
        """

    @abstractmethod
    def must_check(self) -> bool:
        """Whether it has yet to be told, in this step, if all gradients are finite."""

    @abstractmethod
    def note_check(self, all_finite: bool) -> None:
        """All gradients of this step are there, one at least, and are finite or not."""

    @property
    @abstractmethod
    def skips(self) -> bool:
        """Whether the step that comes is to be skipped."""

    @abstractmethod
    def end_step(self) -> None:
        """The step was taken or skipped: choose the next one's scale.

        Raises:
            NonFiniteError: gradients are not finite although the scale is as small as it may get.
        """

    @abstractmethod
    def forget(self) -> None:
        """All gradients were discarded: what was noted of them counts no more."""

    @abstractmethod
    def state(self) -> dict[str, float]:
        """What it knows between steps, for ``load_state``."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there; what is not in it stays."""


class NoScaling(Scaling):
    """The loss as it is."""

    scale = 1.0
    inverses = ()
    norm_type = None
    skips = False

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Run backward."""
        loss.backward(retain_graph=retain_graph)

    def refuse_foreign(self, name: str) -> None:
        """Nothing is foreign."""

    def must_check(self) -> bool:
        """Never."""
        return False

    def note_check(self, all_finite: bool) -> None:
        """Nothing follows from it."""

    def end_step(self) -> None:
        """Nothing follows from it."""

    def forget(self) -> None:
        """Nothing is noted."""

    def state(self) -> dict[str, float]:
        """Nothing is known."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing follows from it."""


class LossScaling(Scaling):
    """A scale that follows what gradients can bear.

    Args:
        scale: the first.
        window: so many good steps in a row double it.
        hysteresis: so many overflows without a doubling in between halve it; 1 is ``GradScaler``.
        minimum: it gets no smaller.
        is_dynamic: whether it changes at all.
    """

    def __init__(self, scale: float, *, window: int, hysteresis: int, minimum: float, is_dynamic: bool = True) -> None:
        self._scale = torch.tensor(scale, dtype=torch.float32)
        self._window = window
        self._hysteresis = self._num_left = hysteresis
        self._minimum = minimum
        self._is_dynamic = is_dynamic
        self._num_good = 0
        self._all_finite: bool | None = None
        self._num_backwards = 0  # under way: several may take turns

    @property
    def norm_type(self) -> float:
        """The one that costs least."""
        return math.inf

    @property
    def scale(self) -> float:
        """What the loss is multiplied by now."""
        return float(self._scale)

    @property
    def inverses(self) -> Sequence[torch.Tensor]:
        """The inverse, rounded as ``GradScaler`` rounds it."""
        return (self._scale.double().reciprocal().float(),)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Run backward from the loss times the scale: in fp32, so that the product does not overflow."""
        with self._running_backward():
            (loss * self._scale.to(loss.device)).backward(retain_graph=retain_graph)

    @contextlib.contextmanager
    def _running_backward(self) -> Iterator[None]:
        self._num_backwards += 1
        try:
            yield
        finally:
            self._num_backwards -= 1

    def refuse_foreign(self, name: str) -> None:
        """Refuse gradients of ``loss.backward()``, and those that come after the scale was taken off."""
        if not self._num_backwards:
            raise EngineStateError(
                f"parameter {name}: got a gradient from a backward that did not scale the loss; with precision='fp16' "
                "call engine.backward(loss) instead of loss.backward()"
            )
        if self._all_finite is not None:
            raise EngineStateError(
                f"parameter {name}: got another gradient after clip_grad_norm_() had taken the scale off those before; "
                "clip after the last backward of a step, or discard what was clipped with engine.zero_grad()"
            )

    def must_check(self) -> bool:
        """Until it has been told."""
        return self._all_finite is None

    def note_check(self, all_finite: bool) -> None:
        """Remember it until the step."""
        self._all_finite = all_finite

    @property
    def skips(self) -> bool:
        """Whether a gradient is not finite."""
        return self._all_finite is False

    def end_step(self) -> None:
        """Halve, double or keep the scale; keep it where there were no gradients."""
        all_finite, self._all_finite = self._all_finite, None
        if all_finite:
            self._grow()
        elif all_finite is False:
            self.num_skipped_steps += 1
            self._shrink()

    def forget(self) -> None:
        """Gradients to come are to be checked anew."""
        self._all_finite = None

    def state(self) -> dict[str, float]:
        """The scale, and the counters that it follows from."""
        return {
            "scale": self.scale,
            "num_good": self._num_good,
            "num_left": self._num_left,
            "num_skipped_steps": self.num_skipped_steps,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there; a scale that is not dynamic stays as it was configured."""
        if self._is_dynamic and "scale" in state:
            self._scale = torch.tensor(float(state["scale"]), dtype=torch.float32)
        self._num_good = int(state.get("num_good", self._num_good))
        self._num_left = int(state.get("num_left", self._num_left))
        self.num_skipped_steps = int(state.get("num_skipped_steps", self.num_skipped_steps))

    def _grow(self) -> None:
        self._num_good += 1
        if self._num_good == self._window:
            self._num_good, self._num_left = 0, self._hysteresis
            larger = self._scale * _FACTOR
            if self._is_dynamic and bool(larger.isfinite()):
                self._scale = larger

    def _shrink(self) -> None:
        self._num_good = 0
        if not self._is_dynamic:
            return
        if self._num_left > 1:
            self._num_left -= 1
            return
        smaller = max(self.scale / _FACTOR, self._minimum)
        if smaller == self.scale or torch.tensor(smaller, dtype=torch.float32).reciprocal().isinf():
            raise NonFiniteError(
                f"gradients are not finite with a loss scale of {self.scale:g}, and it may get no smaller "
                f"(min_loss_scale={self._minimum:g}): the loss itself, or the model's arithmetic in fp16, overflows; "
                "the step was skipped and the state is as it was before it"
            )
        self._scale = torch.tensor(smaller, dtype=torch.float32)


def scaling_for(config: Config) -> Scaling:
    """What a configuration asks for."""
    if config.precision != "fp16":
        return NoScaling()
    is_dynamic = config.loss_scale == "dynamic"
    return LossScaling(
        config.initial_loss_scale if config.loss_scale == "dynamic" else config.loss_scale,
        window=config.loss_scale_window,
        hysteresis=config.loss_scale_hysteresis,
        minimum=config.min_loss_scale,
        is_dynamic=is_dynamic,
    )
