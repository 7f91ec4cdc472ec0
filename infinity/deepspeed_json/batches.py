"""Samples of a step: micro-batch x accumulation x ranks."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.deepspeed_json.document import Given
from infinity.errors import ConfigError

_TOTAL, _MICRO, _ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True, slots=True)
class Batches:
    """How many samples.

    Attributes:
        total: of a step, of all ranks; ``None`` where the configuration has no size.
        micro: of a micro-batch of one rank; ``None`` likewise.
        accumulation_steps: micro-batches of a step.
    """

    total: int | None
    micro: int | None
    accumulation_steps: int


def batches_of(given: Given, num_ranks: int) -> Batches:
    """Complete what is given, as DeepSpeed does.

    Raises:
        ConfigError: the sizes do not go together; it shows the arithmetic.
    """
    total, micro, accumulation = (given.count(key, least=1) for key in (_TOTAL, _MICRO, _ACCUMULATION))
    if total is None:
        accumulation = 1 if accumulation is None else accumulation
        return Batches(None if micro is None else micro * accumulation * num_ranks, micro, accumulation)
    if micro is None:
        accumulation = 1 if accumulation is None else accumulation
        micro = total // (accumulation * num_ranks)
    elif accumulation is None:
        accumulation = total // (micro * num_ranks)
    if total != micro * accumulation * num_ranks:
        said = {key: value for key in (_TOTAL, _MICRO, _ACCUMULATION) if (value := given.raw(key)) is not None}
        raise ConfigError(
            f"DeepSpeed configuration: {', '.join(f'{key} = {value}' for key, value in said.items())} on {num_ranks} "
            f"rank{'s' * (num_ranks > 1)}: expected train_batch_size = micro-batch x accumulation x ranks, got "
            f"{total} and {micro} x {accumulation} x {num_ranks} = {micro * accumulation * num_ranks}; "
            "change one of them, or leave one out"
        )
    return Batches(total, micro, accumulation)
