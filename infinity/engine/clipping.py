"""``Clipper``: ``torch.nn.utils.clip_grad_norm_`` for gradients that are away, to the last bit.

What PyTorch does in place is done in two halves. The norm comes from the norms of single gradients, most of which were
taken when the gradient arrived (``norms.py``). The factor is handed to the gradients that wait, and each is multiplied
by it when it is stepped and in memory anyway, or before another one is added to it. So clipping moves no byte that the
step would not move, except where nobody could know in time that a norm would be asked for: at the first call of
``engine.clip_grad_norm_``, and at the second call in one step.

How norms are joined, and with whom, is for ``Norms`` to say. With several ranks each of its answers is the same on all,
so all do the same with it; and all are asked wherever one is, even one that has no gradients.

Under ``bf16`` what is clipped is what is stepped: the fp32 images of the gradients, or their fp32 sums.

The norm needs all gradients, so where ``max_grad_norm`` is set they wait for ``step()``, in host memory as far as they
fit, on NVMe where not, and the step runs under the next forward; unless it begins under backward on trial, as if
nothing was to be clipped (``speculation.py``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from torch import nn

from infinity.engine.gradients import GradientSink
from infinity.engine.norms import Check, Norms, T
from infinity.engine.scaling import Scaling
from infinity.engine.unit import PartGradients
from infinity.engine.weights import PartShelf
from infinity.errors import ConfigError, NonFiniteError
from infinity.store.loop import LoopThread
from infinity.store.store import TieredStore


@dataclass(frozen=True, slots=True)
class _Gradient(Generic[T]):
    """One gradient that is to be clipped."""

    param: nn.Parameter
    norm: T
    dtype: torch.dtype
    scale: Callable[[torch.Tensor], object]


class Clipper(Generic[T]):
    """Clips the gradients that wait for a step. Belongs to the training thread.

    Args:
        model: whose parameters are meant where none are given.
        loop: the loop thread.
        store: the shards.
        sink: the gradients that wait.
        norms: those that were taken as gradients came; joins them.
        scaling: told whether they are finite.
    """

    def __init__(
        self,
        model: nn.Module,
        loop: LoopThread,
        store: TieredStore,
        sink: GradientSink,
        norms: Norms[T],
        scaling: Scaling,
    ) -> None:
        self._model = model
        self._loop = loop
        self._store = store
        self._sink = sink
        self._norms = norms
        self._scaling = scaling

    def clip(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        parameters: Iterable[torch.Tensor] | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Clip, and return the norm before: no dimensions. The arguments are those of PyTorch's function.

        Raises:
            ConfigError: ``max_norm`` is negative or no number.
            ModelError: a gradient was changed in place while it was away.
            NonFiniteError: the norm is infinite or NaN and must not be; no gradient has been changed.
            StorageError: gradients could not be read back.
        """
        max_norm, norm_type = _number("max_norm", max_norm), _number("norm_type", norm_type)
        if not max_norm >= 0:
            raise ConfigError(f"max_norm: expected a number from 0 on, got {max_norm}")
        if math.isnan(norm_type):
            raise ConfigError(f"norm_type: expected a number, got {norm_type}")
        params = list(self._model.parameters()) if parameters is None else _parameters(parameters)
        self.check_finite()
        self._norms.ask(norm_type)
        gradients = self._gradients_of(params, norm_type)
        total = self._norms.total([each.norm for each in gradients], [each.dtype for each in gradients])
        if error_if_nonfinite and not bool(total.isfinite()):
            raise self._nonfinite(total, gradients, norm_type)
        with torch.no_grad():
            factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
            if factor != 1.0:  # to multiply by 1 changes no bit
                self._sink.undo()  # before any is scaled: an interrupt of this wait changes nothing
                for each in gradients:
                    each.scale(factor)
        return total

    def check_finite(self) -> None:
        """Tell loss scaling, once in a step, whether all gradients are finite; nothing where it need not know.

        Raises:
            ModelError: a gradient was changed in place while it was away.
            StorageError: gradients could not be read back.
        """
        if not self._scaling.must_check():
            return
        waiting = self._sink.waiting()
        check = self._norms.join(self._check(waiting) if waiting else Check(any_came=False))
        if check.any_came:
            self._scaling.note_check(check.culprit is None)

    def find_nonfinite(self) -> str | None:
        """The name of a parameter of which the gradient that waits for a step is infinite or NaN.

        Raises:
            ModelError: a gradient was changed in place while it was away.
            StorageError: gradients could not be read back.
        """
        culprit = self._norms.join(self._check(self._sink.waiting())).culprit
        return None if culprit is None else culprit[2]

    def _check(self, waiting: Sequence[PartGradients]) -> Check:
        """Whether this rank's are finite."""
        if not self._norms.shows_nonfinite:
            self._norms.ask(math.inf)
        suspects = self._not_finite(waiting)
        if not all(self._norms.proves_nonfinite(each.part) for each, _ in suspects):
            self._norms.ask(math.inf)  # a sum of powers alone may have overflowed
            suspects = self._not_finite(list({each.part.index: each for each, _ in suspects}.values()))
        found = [(each.part.index, i, each.part.slots[i].name) for each, i in suspects]
        return Check(bool(waiting), min(found, default=None))

    def _not_finite(self, waiting: Sequence[PartGradients]) -> list[tuple[PartGradients, int]]:
        """The gradients of which the norm is not finite, and their positions."""
        places, norms = [], []
        for each in waiting:
            positions = [i for i in sorted(each.present) if each.part.slots[i].num_elements]
            self._measure(each, positions)
            for i in positions:
                norm = self._norms.get(each.part, i)
                assert norm is not None
                places.append((each, i))
                norms.append(norm)
        return [place for place, is_finite in zip(places, self._norms.finite(norms), strict=True) if not is_finite]

    def _gradients_of(self, params: Sequence[nn.Parameter], norm_type: float) -> list[_Gradient[T]]:
        """The gradients there are, in the order of ``params``. Under loss scaling only those that are stepped."""
        waiting = self._sink.waiting()
        wanted = set(params)
        for each in waiting:
            self._measure(each, [i for i in sorted(each.present) if each.part.slots[i].param in wanted])
        places = {each.part.slots[i].param: (each, i) for each in waiting for i in each.present}
        found = []
        for param in params:
            if param in places:
                found.append(self._away(*places[param]))
            elif param.grad is not None and not self._scaling.inverses:  # nobody steps it: PyTorch's own
                norm = self._norms.measure_unstepped(param.grad, norm_type)
                if norm is not None:
                    found.append(_Gradient(param, norm, param.grad.dtype, functools.partial(_multiply, param.grad)))
        return found

    def _measure(self, gradients: PartGradients, positions: Sequence[int]) -> None:
        """Take the norms that nobody has asked for in time."""
        part = gradients.part
        missing = [position for position in positions if self._norms.get(part, position) is None]

        def take(shard: torch.Tensor) -> None:
            flat = gradients.flat(shard)
            for position in missing:
                gradient = part.slots[position].view(flat)
                self._norms.take(part, position, gradient, gradients.scales.get(position, ()))

        if any(part.slots[position].num_elements for position in missing):
            PartShelf(self._loop, self._store, part).look(gradients.kind, take)
        elif missing:  # nothing to read: with slices, many have no elements here
            take(torch.empty(gradients.num_bytes, dtype=torch.uint8))

    def _away(self, gradients: PartGradients, position: int) -> _Gradient[T]:
        part = gradients.part
        norm = self._norms.get(part, position)
        assert norm is not None

        def scale(factor: torch.Tensor) -> None:
            self._sink.scale(part, position, factor.cpu())
            self._norms.forget(part, position)

        return _Gradient(part.slots[position].param, norm, part.step_dtype, scale)

    def _nonfinite(self, total: torch.Tensor, gradients: Sequence[_Gradient[T]], norm_type: float) -> NonFiniteError:
        names = {param: name for name, param in self._model.named_parameters()}
        flags = self._norms.finite([each.norm for each in gradients])
        found = [(i, 0, names.get(gradients[i].param, "?")) for i, is_finite in enumerate(flags) if not is_finite]
        culprit = self._norms.join(Check(bool(gradients), min(found, default=None))).culprit
        where = f"; the first gradient that is not finite is that of {culprit[2]}" if culprit else ""
        return NonFiniteError(
            f"the norm of order {norm_type} of the gradients is {float(total)}, so they cannot be clipped{where}; "
            "discard them with zero_grad() and go on, or give error_if_nonfinite=False to step with them as they are"
        )


def _number(name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: expected a number, got {value!r}") from error


def _parameters(given: object) -> list[nn.Parameter]:
    if isinstance(given, torch.Tensor):
        given = [given]
    if not isinstance(given, Iterable):
        raise ConfigError(f"parameters: expected parameters of the model, got {type(given).__name__}")
    params = list(given)
    for each in params:
        if not isinstance(each, torch.Tensor):
            hint = "; give model.parameters(), not named_parameters()" if isinstance(each, tuple) else ""
            raise ConfigError(f"parameters: expected parameters of the model, got a {type(each).__name__}{hint}")
    return params


def _multiply(gradient: torch.Tensor, factor: torch.Tensor) -> None:
    gradient.mul_(factor.to(gradient.device))
