"""Is a state of 4 GiB exported within 512 MiB of memory, one parameter of it larger than that? And to the bit?

A checkpoint of that size is written, bf16 planes and fp32 masters as training leaves them, and exported by the command,
whose memory is measured in a process of its own: the peak over what it had when everything was imported. Then every
value of the files is compared with what was written. All of it is deleted at the end.

    python bench/export.py --directory DIR [--size 4GiB] [--ram 512MiB] [--log FILE]

The exit code is 1 where the peak is above the budget, or a value differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lib_checks import Check, print_checks, require_room
from lib_training import machine
from lib_work import end_on_sigterm
from lib_worker import peak_rss_bytes, reset_peak_rss
from pydantic import ByteSize, TypeAdapter

import infinity
from infinity.console.formats import format_bytes
from infinity.engine.persistence.snapshot import OptimizerState, PartLayout, SlotLayout, Snapshot, WeightsAs
from infinity.engine.planes import Residuals, split
from infinity.engine.unit import MASTER, PARAM, PART_ALIGNMENT, RESIDUAL
from infinity.io.memory import allocate, as_bytes
from infinity.store.manifest import Manifest
from infinity.store.saving import NewCheckpoint
from infinity.store.shard import ShardKey

ITEM_BYTES = 4
NUM_PARTS = 16
ON_DISK = 2.3
"""What the checkpoint and the exported files take, for each byte of weights."""


def layouts_of(num_elements: int) -> list[PartLayout]:
    """A parameter with a fifth of all elements, and the rest in parts of four; every fourth of them has masters."""
    large = num_elements // 5 // PART_ALIGNMENT * PART_ALIGNMENT
    rest = (num_elements - large) // NUM_PARTS // (4 * PART_ALIGNMENT) * PART_ALIGNMENT
    shapes = [[(large // 1024, 1024)], *([[(rest // 1024, 1024)] * 4] * NUM_PARTS)]
    layouts = []
    for unit, part in enumerate(shapes):
        sizes = [rows * columns for rows, columns in part]
        weights: WeightsAs = "master" if unit % 4 == 3 else "planes"
        layouts.append(
            PartLayout(
                unit=unit,
                position=0,
                dtype="float32",
                compute_dtype="bfloat16",
                step_dtype="float32",
                stepped=True,
                weights=weights,
                num_elements=sum(sizes),
                slots=[
                    SlotLayout(name=f"unit{unit}.{i}", shape=list(shape), stride=[1024, 1], offset=sum(sizes[:i]))
                    for i, shape in enumerate(part)
                ],
                states={},
            )
        )
    return layouts


def values_of(layout: PartLayout) -> torch.Tensor:
    """The weights of a part, the same whenever they are asked for."""
    return torch.randn(layout.num_elements, generator=torch.Generator().manual_seed(layout.unit)).mul_(0.02)


def shards_of(layout: PartLayout) -> Iterator[tuple[str, str, torch.Tensor]]:
    """What a part has on the disk: kind, dtype, bytes."""
    values, count = values_of(layout), layout.num_elements
    param = allocate(2 * count)
    if layout.weights == "master":
        master = allocate(4 * count)
        master.view(torch.float32).copy_(values)
        param.view(torch.bfloat16).copy_(values)
        yield MASTER, "float32", master
    else:
        shard = allocate(Residuals.num_bytes(count))
        residuals = Residuals(shard, count)
        residuals.exceptions = split(values, param.view(torch.bfloat16), residuals.plane)
        yield RESIDUAL, "int16", shard
    yield PARAM, "bfloat16", param


def write_checkpoint(path: Path, layouts: Sequence[PartLayout]) -> None:
    """A checkpoint as an engine saves it."""
    names = [slot.name for layout in layouts for slot in layout.slots]
    snapshot = Snapshot(
        step=1,
        units=[f"unit{layout.unit}" for layout in layouts],
        parts=list(layouts),
        tied={},
        buffers={},
        persistent_buffers=[],
        optimizer=OptimizerState(class_name="AdamW", groups=[{"lr": 0.001, "params": names}], small={}),
        random={},
        scaling={},
        tracked={},
        config={},
        versions={"infinity": infinity.__version__},
    )
    manifest = Manifest(
        state="0" * 32,
        number=1,
        rank=0,
        world_size=1,
        time="2026-01-01T00:00:00+00:00",
        files=[],
        shards=[],
        tensors=None,
        engine=snapshot.model_dump(mode="json"),
    )
    with NewCheckpoint(path, 0) as checkpoint:
        for layout in layouts:
            for kind, dtype, shard in shards_of(layout):
                checkpoint.add(ShardKey(layout.unit, 0, kind), dtype, 1, as_bytes(shard))
        checkpoint.complete(manifest, None)


def export(source: Path, out: Path, ram: str) -> dict[str, Any]:
    """Export in a process of its own; what it says of itself."""
    command = [sys.executable, __file__, "--measured", str(source), str(out), ram]
    package = Path(infinity.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])}
    answered = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    answer: dict[str, Any] = json.loads(answered.stdout.splitlines()[-1])
    return answer


def measure(source: str, out: str, ram: str) -> None:
    """What that process does."""
    import infinity.__main__ as command_line
    import infinity.checkpoint.cli  # noqa: F401  # the baseline has all code in it

    reset_peak_rss()
    baseline, begun = peak_rss_bytes(), time.perf_counter()
    try:
        command_line.main(["checkpoint", "export", source, out, "--ram", ram, "--max-shard-size", "1GB"])
    except SystemExit as end:
        if end.code:
            raise
    seconds = time.perf_counter() - begun
    print(json.dumps({"baseline": baseline, "peak": peak_rss_bytes(), "seconds": seconds}), flush=True)


def num_different(layouts: Sequence[PartLayout], out: Path) -> int:
    """How many parameters of the exported files are not what was written, to the bit."""
    found = infinity.open_weights(out)
    names = {slot.name for layout in layouts for slot in layout.slots}
    different = len(names ^ set(found))
    for layout in layouts:
        values = values_of(layout)
        for slot in layout.slots:
            wanted = values[slot.offset :].as_strided(slot.shape, slot.stride, slot.offset)
            got = found[slot.name]
            same = got.dtype == wanted.dtype and torch.equal(got.view(torch.int32), wanted.view(torch.int32))
            different += not same
    return different


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="an existing directory with room for both")
    size = TypeAdapter(ByteSize).validate_python
    parser.add_argument("--size", type=size, default=size("4GiB"), help="of the weights, in fp32")
    parser.add_argument("--ram", default="512MiB", help="what the export may take")
    parser.add_argument("--log", type=Path, help="write the lines here too")
    arguments = parser.parse_args(argv)
    if not arguments.directory.is_dir():
        parser.error(f"--directory: {arguments.directory} is not a directory; give an existing one")
    if arguments.size < 64 << 20:
        parser.error("--size: expected 64MiB at least")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Write, export, compare, and hold the peak against the budget."""
    arguments = parse(argv)
    end_on_sigterm()
    layouts = layouts_of(arguments.size // ITEM_BYTES)
    largest = max(layout.num_elements for layout in layouts) * ITEM_BYTES
    require_room(arguments.directory, disk_bytes=ON_DISK * arguments.size, memory_bytes=4 * largest + (1 << 30))
    load = os.getloadavg()[0]
    disk = f"disk: {format_bytes(ON_DISK * arguments.size)} at most, deleted at the end"
    lines = [f"{machine()}; load of other programs {load:.1f}; {disk}"]

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="infinity-export-") as scratch:
        source, out = Path(scratch) / "checkpoint", Path(scratch) / "out"
        begun = time.perf_counter()
        write_checkpoint(source, layouts)
        written = sum(each.stat().st_size for each in source.iterdir())
        say(f"wrote a checkpoint of {format_bytes(written)} in {time.perf_counter() - begun:.1f} s")
        measured = export(source, out, arguments.ram)
        exported = sum(each.stat().st_size for each in out.iterdir())
        over = measured["peak"] - measured["baseline"]
        say(
            f"exported {format_bytes(exported)} in {len(list(out.iterdir()))} files in {measured['seconds']:.1f} s, "
            f"{exported / measured['seconds'] / 1e9:.2f} GB/s; the largest parameter has {format_bytes(largest)}"
        )
        say(
            f"peak RSS {measured['peak'] / (1 << 20):.0f} MiB, {over / (1 << 20):.0f} MiB over the "
            f"{measured['baseline'] / (1 << 20):.0f} MiB of the process before; the budget is {arguments.ram}"
        )
        different = num_different(layouts, out)
        say(f"{sum(len(layout.slots) for layout in layouts)} parameters compared, {different} differ")
    budget = int(TypeAdapter(ByteSize).validate_python(arguments.ram))
    checks = [
        Check("peak RSS over the process before", over / (1 << 20), "<=", budget / (1 << 20), "MiB"),
        Check("parameters that differ", different, "<=", 0, "of all"),
    ]
    print_checks(checks)
    if arguments.log is not None:
        lines += [
            f"{'met' if each.met else 'MISSED'}: {each.name}: {each.value:g} {each.direction} {each.bar:g}"
            for each in checks
        ]
        arguments.log.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if all(check.met for check in checks) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measured"]:
        measure(*sys.argv[2:5])
    else:
        sys.exit(main())
