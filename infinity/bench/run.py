"""One run of the benchmark: everything around the measurement.

Under ``torchrun`` rank 0 does all of it, and measures its own machine's tiers while the others wait; then all ranks
measure their NVMe at the same time, and the collectives, and rank 0 shows and writes the figures.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from rich.console import Console

from infinity.bench.baseline import Baseline, Comparison, compare, read_baseline
from infinity.bench.cautions import host_cautions, machine_cautions, path_cautions, result_cautions, run_cautions
from infinity.bench.fio import find_fio
from infinity.bench.host import observe
from infinity.bench.machine import machine_document, matmul_tflops
from infinity.bench.measure import Measurement
from infinity.bench.peer import Peer
from infinity.bench.plot import check_plot, write_plot
from infinity.bench.progress import Display
from infinity.bench.ranks import Ranks, open_ranks
from infinity.bench.recommend import closing_words, recommend
from infinity.bench.results import Report, Result
from infinity.bench.settings import BenchSettings
from infinity.bench.sizing import plan_sizes
from infinity.bench.table import as_table
from infinity.bench.tiers import Tiers, open_tiers
from infinity.bench.together import measure_together
from infinity.bench.volumes import Volume, job_directories
from infinity.config import Config
from infinity.console.directories import nvme_directories
from infinity.console.formats import format_bytes
from infinity.console.interrupt import StopRequest
from infinity.console.output import STANDARD_OUTPUT, check_output, is_plain, write_json
from infinity.io.completion import call_in_thread
from infinity.io.open import open_backend
from infinity.machine.host import host_facts
from infinity.machine.memory import available_memory_bytes
from infinity.machine.paths import PathFacts, path_facts
from infinity.rank_paths import nvme_for_rank
from infinity.store.volumes import OpenBackend

_RANKS_FRACTION = 0.1
"""Collectives take so much of the time budget, and come on top of it."""

_RANKS_SHARE = 4
"""Where all ranks measure together, each goes through a quarter of the data."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What a model is computed in, by ``Config.precision``."""


class RegressionError(Exception):
    """Some figures are below the baseline's by more than the tolerance.

    Attributes:
        report: the figures, which were shown and written.
        comparison: which ones.
    """

    def __init__(self, report: Report, comparison: Comparison) -> None:
        super().__init__(f"{len(comparison.regressions)} regressions")
        self.report = report
        self.comparison = comparison


def run(
    settings: BenchSettings,
    console: Console,
    stop: StopRequest,
    *,
    open_backend: OpenBackend = open_backend,
    began: float | None = None,
) -> Report | None:
    """Measure, show the figures on ``console``, and write what was asked for.

    Args:
        settings: what to measure.
        console: where a person looks.
        stop: entered by the caller; the first signal ends the run after the requests in flight.
        open_backend: opens the I/O backend of one directory.
        began: ``time.perf_counter()`` when the time budget began to run; ``None``: now.

    Returns:
        The figures; ``None`` on ranks other than 0.

    Raises:
        InfinityError: something asked for cannot be done, or the bytes read back are wrong (``MismatchError``).
        InterruptedRunError: ``stop`` was asked. Whatever happens, all that was made has been removed.
        RegressionError: the figures are below those of ``--baseline``; all has been shown and written.
    """
    stop.shield()  # the run ends soon after a first signal; a second must not cut the removal short
    began = time.perf_counter() if began is None else began
    device = Config(device=settings.device).torch_device()
    with open_ranks(device) as ranks:
        own = nvme_for_rank(Config(nvme=settings.nvme), *((0, 1, 0, "localhost") if ranks is None else ranks.place))
        settings = settings.model_copy(update={"nvme": own.nvme})
        if ranks is not None and ranks.rank != 0:
            _measure_ranks(settings, ranks, stop)
            return None
        baseline = _check_files(settings)
        peer = Peer(find_fio()) if settings.fio else None
        with ExitStack() as stack:
            display = stack.enter_context(Display(console, began=began, budget_seconds=settings.budget_seconds))
            stack.enter_context(nvme_directories(settings.nvme, display.say))
            report = asyncio.run(_measure(settings, device, display, stop, open_backend, peer, began))
            if ranks is not None:
                display.say(f"ranks: {ranks.num_ranks}: {ranks.transport}")
                display.stage("measuring all ranks together")
                results, disks = _measure_ranks(settings, ranks, stop, display.step)
                machine = {**report.machine, "ranks": {**ranks.as_document(), "each": disks}}
                report = dataclasses.replace(report, machine=machine, results=[*report.results, *results])
    report = dataclasses.replace(report, seconds=time.perf_counter() - began)
    report = dataclasses.replace(report, recommended=recommend(report))
    _publish(settings, console, report)
    if baseline is not None:
        _compare(settings, console, report, baseline)
    return report


def _check_files(settings: BenchSettings) -> Baseline | None:
    """Refuse files that cannot be read or written, before any work is done."""
    if settings.json_file is not None and settings.json_file != STANDARD_OUTPUT:
        check_output(settings.json_file, "--json", replaced=False)
    if settings.config_file is not None:
        check_output(settings.config_file, "--config", replaced=False)
    if settings.plot_file is not None:
        check_plot(settings.plot_file)
    return None if settings.baseline_file is None else read_baseline(settings.baseline_file)


async def _measure(
    settings: BenchSettings,
    device: torch.device,
    display: Display,
    stop: StopRequest,
    open_backend: OpenBackend,
    peer: Peer | None,
    began: float,
) -> Report:
    async with job_directories(settings.nvme) as directories:
        facts = await call_in_thread(lambda: [path_facts(path) for path in settings.nvme])
        devices = [fact.device for fact in facts if fact.device]
        available_bytes, warnings = await call_in_thread(lambda: _look_around(facts))
        for warning in warnings:
            display.warn(warning)
        before = await call_in_thread(lambda: observe(devices))
        sizes = await call_in_thread(lambda: plan_sizes(settings, directories, available_bytes))
        volumes = [
            Volume(index, path, directory.path)
            for index, (path, directory) in enumerate(zip(settings.nvme, directories, strict=True))
        ]
        async with open_tiers(volumes, sizes, device) as tiers:
            _say_tiers(display, facts, tiers)
            measurement = Measurement(settings, tiers, display, stop, open_backend=open_backend, peer=peer, began=began)
            results = await measurement.run()
            choices, name = measurement.choices(), tiers.device.name
    after = await call_in_thread(lambda: observe(devices))
    late_warnings = [*run_cautions(before, after), *result_cautions(results, facts)]
    for warning in late_warnings:
        display.warn(warning)
    machine = await call_in_thread(lambda: machine_document(facts, choices, name))
    tflops = await call_in_thread(
        lambda: {precision: matmul_tflops(device, dtype) for precision, dtype in _DTYPES.items()}
    )
    return Report(
        machine={**machine, "tflops": tflops},
        nvme=[str(path) for path in settings.nvme],
        results=results,
        warnings=[*warnings, *measurement.warnings, *late_warnings],
        seconds=0.0,
    )


def _look_around(facts: Sequence[PathFacts]) -> tuple[int, list[str]]:
    """How much host memory can be had, and what may make the figures misleading, before anything runs."""
    available_bytes = available_memory_bytes()
    cautions = machine_cautions(os.getloadavg()[0], os.cpu_count() or 1, available_bytes)
    return available_bytes, [*cautions, *host_cautions(host_facts()), *path_cautions(facts)]


def _measure_ranks(
    settings: BenchSettings, ranks: Ranks, stop: StopRequest, on_step: Callable[[str], object] = lambda step: None
) -> tuple[list[Result], list[dict[str, Any]]]:
    """All ranks call it, and those that have nothing else to do wait in it; what they do, and each one's NVMe."""
    seconds = settings.budget_seconds * _RANKS_FRACTION
    collectives = ranks.measure(seconds=seconds, repeats=settings.num_repeats, stop=lambda: bool(stop), on_step=on_step)
    disks, each = measure_together(
        ranks.collectives,
        settings.nvme,
        size_bytes=min(settings.size or settings.largest_auto_bytes, settings.largest_auto_bytes) // _RANKS_SHARE,
        repeats=settings.num_repeats,
        backend=settings.io_backend,
        stop=lambda: bool(stop),
        on_step=on_step,
    )
    return [*disks, *collectives], each


def _publish(settings: BenchSettings, console: Console, report: Report) -> None:
    # What is narrower than the table's least width shows its lines broken, and no figure cut.
    console.print(as_table(report, plain=is_plain(console), width=console.width), crop=False)
    console.print(closing_words(report), markup=False, highlight=False)
    if settings.json_file is not None:
        write_json(report.as_document(), settings.json_file)
    if settings.plot_file is not None:
        write_plot(report, settings.plot_file)
    if settings.config_file is not None:
        write_json(dict(report.recommended), settings.config_file, flag="--config")


def _compare(settings: BenchSettings, console: Console, report: Report, baseline: Baseline) -> None:
    comparison = compare(report, baseline, settings.tolerance)
    console.print(comparison.as_table(plain=is_plain(console), width=console.width), crop=False)
    if comparison.regressions:
        raise RegressionError(report, comparison)


def _say_tiers(display: Display, facts: list[PathFacts], tiers: Tiers) -> None:
    for fact in facts:
        model = f" ({fact.model})" if fact.model else ""
        display.say(f"{fact.path}: {fact.filesystem} on {fact.device}{model}, mounted {fact.options}")
    display.say(f"device: {tiers.device.name}: {tiers.device.copies}")
    display.say(f"data: {format_bytes(tiers.size_bytes)}, in host memory and in the files")
