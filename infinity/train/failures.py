"""How a run may end badly, in words that say what to change."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator

import torch

from infinity.config import Config
from infinity.errors import BudgetError, InfinityError
from infinity.train.history import History
from infinity.train.settings import TrainSettings

_NO_HOST_MEMORY = re.compile(
    r"DefaultCPUAllocator|not enough memory|can't allocate memory|Storage size calculation overflowed|numel.*overflow"
)


class DivergedError(InfinityError):
    """A loss is NaN or infinite: the weights are worth nothing, and the run has ended."""

    exit_code = 1


def refuse_divergence(history: History, settings: TrainSettings) -> None:
    """Say that the latest loss is no number.

    Raises:
        DivergedError: it is so.
    """
    if history.diverged_at is None:
        return
    loss = next(value for value in (*history.losses[-1:], *history.eval_losses[-1:]) if not math.isfinite(value))
    kept = "" if settings.save is None else f"; {settings.save} was not written"
    raise DivergedError(
        f"training diverged: the loss is {loss} at step {history.diverged_at} of {settings.num_steps}{kept}; "
        f"lower --lr {settings.learning_rate:g} or raise --warmup {settings.num_warmup_steps}"
    )


@contextlib.contextmanager
def memory_errors(settings: TrainSettings, config: Config) -> Iterator[None]:
    """Say what to lower where memory outside the budgets, above all for activations, is not to be had.

    Raises:
        BudgetError: in the place of what Python and PyTorch raise then.
    """
    try:
        yield
    except InfinityError:
        raise
    except (MemoryError, RuntimeError) as error:  # PyTorch's allocator for host memory has no type of its own
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and not _NO_HOST_MEMORY.search(str(error)):
            raise
        what = re.sub(r"^\[enforce fail[^]]*\] err == 0\. ", "", str(error).partition("\n")[0]) or type(error).__name__
        given = {"--recompute": config.recompute, "--activation-bytes SIZE": config.activation_bytes or settings.plain}
        others = " or ".join(flag for flag, is_given in given.items() if not is_given)
        state = "--layers or --hidden" if settings.plain else "--hbm or --ram"
        raise BudgetError(
            f"out of memory ({what}): activations and the text's batches come on top of the training state; lower "
            f"--batch {settings.batch_size} (raise --accumulate instead), "
            f"--seq {settings.seq_length} or {state}"
            f"{others and f', or give {others}'}"
        ) from error
