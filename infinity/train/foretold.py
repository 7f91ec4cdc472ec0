"""What a plan says of a run that has ended, at the speeds that the run itself has seen, beside what was measured.

The plan knows how fast arithmetic, the optimizer and the disk were, and nothing of their order: how long a step takes
with all of them, and what it moves, it has to find by itself. So this tells how far plans can be trusted here.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

import torch

from infinity.config import Config
from infinity.console.formats import format_bytes, format_figure
from infinity.plan.estimate import make_plan
from infinity.plan.machine import GB, Machine
from infinity.plan.settings import PlanSettings
from infinity.plan.sources import Source
from infinity.trace import StepStats
from infinity.train.history import History
from infinity.train.model import GPT
from infinity.train.settings import TrainSettings

NUM_SETTLING = 4
"""The first steps, which fill the tiers and are not counted."""

FEWEST_STEPS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Foretold:
    """One step, predicted and measured (medians).

    Attributes:
        predicted_seconds: how long the plan says it takes.
        measured_seconds: how long it took.
        predicted_read_bytes: what the plan says is read from NVMe.
        measured_read_bytes: what was.
        predicted_written_bytes: what the plan says is written to NVMe.
        measured_written_bytes: what was.
    """

    predicted_seconds: float
    measured_seconds: float
    predicted_read_bytes: int
    measured_read_bytes: int
    predicted_written_bytes: int
    measured_written_bytes: int

    def __str__(self) -> str:
        """``0.123 s predicted, 0.125 s measured (-2%); read …; written …``."""
        seconds = (
            f"{format_figure(self.predicted_seconds)} s predicted, {format_figure(self.measured_seconds)} s measured"
        )
        parts = [f"{seconds} ({self.predicted_seconds / self.measured_seconds - 1:+.0%})"]
        for name, predicted, measured in (
            ("read", self.predicted_read_bytes, self.measured_read_bytes),
            ("written", self.predicted_written_bytes, self.measured_written_bytes),
        ):
            if predicted or measured:
                parts.append(f"{name} {format_bytes(predicted)}, {format_bytes(measured)}")
        return "; ".join(parts)


def foretell(
    settings: TrainSettings, config: Config, history: History, state_bytes: int, device: torch.device, num_ranks: int
) -> Foretold | None:
    """Plan the steps of a run that has ended.

    Args:
        settings: what was trained.
        config: within which budgets.
        history: what was measured.
        state_bytes: what the optimizer goes through in a step.
        device: where it was trained.
        num_ranks: how many trained it.

    Returns:
        ``None`` where there is nothing to compare: several ranks, whose plans are bounds; an accelerator, whose
        arithmetic the host's clock does not see; fewer than ``FEWEST_STEPS`` settled steps without a commit, whose
        writes no plan knows.

    Raises:
        InfinityError: the model cannot be planned.
    """
    if num_ranks > 1 or device.type != "cpu" or len(history.step_stats) < NUM_SETTLING + FEWEST_STEPS:
        return None
    settled = [step for step in history.step_stats[NUM_SETTLING:] if not step.commit_seconds]
    if len(settled) < FEWEST_STEPS:
        return None
    computing, optimizing = _seconds_of_work(history, settled)
    if not computing or not optimizing:
        return None
    with torch.device("meta"):
        source = Source(GPT(settings.shape()), "GPT")
    plan = make_plan(
        source,
        config.model_copy(update={"accumulation_steps": settings.num_micro_batches}),
        PlanSettings(
            batch=settings.batch_size,
            seq=settings.seq_length,
            accumulate=settings.num_micro_batches,
            compute_seconds=computing,
        ),
        _machine(settled, state_bytes / optimizing),
    )
    return Foretold(
        predicted_seconds=plan.seconds,
        measured_seconds=statistics.median(step.seconds for step in settled),
        predicted_read_bytes=plan.moved["nvme read"],
        measured_read_bytes=round(statistics.median(step.nvme_read_bytes for step in settled)),
        predicted_written_bytes=plan.moved["nvme write"],
        measured_written_bytes=round(statistics.median(step.nvme_written_bytes for step in settled)),
    )


def _seconds_of_work(history: History, settled: Sequence[StepStats]) -> tuple[float, float]:
    """Of a settled step: forward and backward, and the optimizer.

    What each unit took is known of all steps together; of single ones, how long anything computed.
    """
    units = history.unit_stats.values()
    all_seconds = sum(step.compute_seconds for step in history.step_stats)
    share = statistics.median(step.compute_seconds for step in settled) / all_seconds if all_seconds else 0.0
    computing = sum(unit.forward_seconds + unit.backward_seconds for unit in units)
    return share * computing, share * sum(unit.optimizer_seconds for unit in units)


def _machine(steps: Sequence[StepStats], optimizer: float) -> Machine:
    """The speeds of a run; what it has not seen is as in any plan."""
    machine = Machine(optimizer=optimizer, planes=optimizer, part_seconds=0.0, source="this run")
    read, written = (_speed(steps, route) for route in ("nvme_read", "nvme_write"))
    if not (read and written):
        return machine
    return dataclasses.replace(machine, read=read, write=written, mixed=max(read, written))


def _speed(steps: Sequence[StepStats], route: str) -> float:
    """Bytes per second of a route while it moved something; 0 where it did not."""
    found = [step.routes[route] for step in steps if route in step.routes]
    seconds = sum(each.busy_seconds for each in found)
    best = max((each.best_gb_s for each in found), default=0.0) * GB
    return best or (sum(each.moved_bytes for each in found) / seconds if seconds else 0.0)
