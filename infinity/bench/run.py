"""One run of the benchmark: everything around the measurement."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import ExitStack

import torch
from rich.console import Console

from infinity.bench.cautions import machine_cautions, path_cautions
from infinity.bench.machine import PathFacts, available_memory_bytes, path_facts
from infinity.bench.measure import Measurement
from infinity.bench.progress import Display
from infinity.bench.report import Report
from infinity.bench.settings import BenchSettings
from infinity.bench.sizing import plan_sizes
from infinity.bench.tiers import Tiers, open_tiers
from infinity.bench.volumes import job_directories
from infinity.config import Config
from infinity.console.directories import nvme_directories
from infinity.console.formats import format_bytes
from infinity.console.interrupt import StopRequest
from infinity.console.output import STANDARD_OUTPUT, check_output, write_json
from infinity.io.completion import call_in_thread
from infinity.io.open import open_backend
from infinity.store.nvme import OpenBackend


def run(
    settings: BenchSettings, console: Console, stop: StopRequest, *, open_backend: OpenBackend = open_backend
) -> Report:
    """Measure, show the figures on ``console``, and write what was asked for.

    Args:
        settings: what to measure.
        console: where a person looks.
        stop: entered by the caller; the first signal ends the run after the requests in flight.
        open_backend: opens the I/O backend of one directory.

    Returns:
        The figures.

    Raises:
        InfinityError: something asked for cannot be done, or the bytes read back are wrong (``MismatchError``).
        InterruptedRunError: ``stop`` was asked. Whatever happens, all that was made has been removed.
    """
    stop.shield()  # the run ends soon after a first signal; a second must not cut the removal short
    if settings.json_file is not None and settings.json_file != STANDARD_OUTPUT:
        check_output(settings.json_file, "--json", replaced=False)
    device = Config(device=settings.device).torch_device()
    with ExitStack() as stack:
        display = stack.enter_context(Display(console))
        stack.enter_context(nvme_directories(settings.nvme, display.say))
        report = asyncio.run(_measure(settings, device, display, stop, open_backend))
    console.print(report.as_table(plain=not console.is_terminal))
    if settings.json_file is not None:
        write_json(report.as_document(), settings.json_file)
    return report


async def _measure(
    settings: BenchSettings, device: torch.device, display: Display, stop: StopRequest, open_backend: OpenBackend
) -> Report:
    began = time.perf_counter()
    load, num_cores = os.getloadavg()[0], os.cpu_count() or 1
    available_bytes = await call_in_thread(available_memory_bytes)
    async with job_directories(settings.nvme) as directories:
        facts = await call_in_thread(lambda: [path_facts(path) for path in settings.nvme])
        warnings = [*machine_cautions(load, num_cores, available_bytes), *path_cautions(facts)]
        for warning in warnings:
            display.warn(warning)
        sizes = await call_in_thread(lambda: plan_sizes(settings, directories, available_bytes))
        async with open_tiers(settings, directories, sizes, device, open_backend) as tiers:
            _say_tiers(display, facts, tiers)
            measurement = Measurement(settings, tiers, display, stop, began=began)
            results = await measurement.run()
            return Report(
                paths=facts,
                choices=[volume.choice for volume in tiers.volumes],
                device=tiers.device.name,
                results=results,
                warnings=[*warnings, *measurement.warnings],
                seconds=time.perf_counter() - began,
            )


def _say_tiers(display: Display, facts: list[PathFacts], tiers: Tiers) -> None:
    for fact, volume in zip(facts, tiers.volumes, strict=True):
        model = f" ({fact.model})" if fact.model else ""
        display.say(f"{fact.path}: {fact.filesystem} on {fact.device}{model}, mounted {fact.options}")
        for reason in volume.choice.reasons:
            display.say(f"  {reason}")
    display.say(f"device: {tiers.device.name}: {tiers.device.copies}")
    display.say(f"data: {format_bytes(tiers.size_bytes)}, in host memory and in the files")
