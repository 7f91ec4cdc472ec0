"""The flags of ``infinity checkpoint`` and of the commands below it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console

from infinity.checkpoint.arguments import opened, parse_commit, say
from infinity.checkpoint.compare import compare
from infinity.checkpoint.describe import describe, lines_of
from infinity.checkpoint.moving import Moving, format_moved
from infinity.checkpoint.verify import verify
from infinity.console.formats import format_bytes
from infinity.console.interrupt import ended_by_signals
from infinity.console.output import STANDARD_OUTPUT, OutputConsole, write_json
from infinity.engine.persistence.exporting import DtypeName, Exporter
from infinity.engine.persistence.tensor_files import check_output
from infinity.errors import ConfigError
from infinity.store.pruning import Pruning

DAMAGED_EXIT_CODE = 1
DIFFERENT_EXIT_CODE = 1

app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["--help", "-h"]})

Directories = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="State directories, or the NVMe paths that hold them.")
]
Number = Annotated[int | None, typer.Option("--commit", metavar="NUMBER", help="Which commit, by its number.", min=0)]
Also = Annotated[
    list[Path] | None, typer.Option("--also", metavar="DIR", help="A further directory where its data files may be.")
]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write it as JSON; - is standard output.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show errors with their traceback.")]


@app.callback()
def main() -> None:
    """Look at, check, compare, export and prune the commits of a durable state.

    DIR is a saved checkpoint, or the NVMe path of a run. For example: infinity checkpoint verify /tmp/infinity
    """


@app.command("inspect")
def inspect_command(paths: Directories, number: Number = None, json: Json = None, debug: Debug = False) -> None:
    """Show the commits there are, and what is in the newest, or in another."""
    console = _console(json)
    document = describe(paths, number, console)
    if json != STANDARD_OUTPUT:
        for line in lines_of(document):
            say(console, line)
    _write(document, json)


@app.command("verify")
def verify_command(paths: Directories, number: Number = None, json: Json = None, debug: Debug = False) -> None:
    """Read every byte of every commit, or of one, and compare it with its checksum.

    Exit codes: 0 all is as it was written; 1 something is damaged; 2 it cannot be done.
    """
    console = _console(json)
    report = verify(paths, number, console)
    for fault in report.faults:
        say(console, f"damaged: {fault}", "red")
    verdict = f"{len(report.faults)} faults" if report.faults else "good"
    numbers = ", ".join(map(str, report.commits))
    say(console, f"commit {numbers}: {verdict}; read {format_moved(report.num_bytes, report.seconds)}")
    _write(report.as_document(), json)
    if report.faults:
        raise typer.Exit(DAMAGED_EXIT_CODE)


@app.command("export")
def export_command(
    path: Annotated[str, typer.Argument(metavar="DIR[@NUMBER]", help="A state directory; with @, one of its commits.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A directory that does not exist, or is empty.")],
    also: Also = None,
    dtype: Annotated[
        str, typer.Option(metavar="|".join(get_args(DtypeName)), help="Of what is floating-point; keep: as stepped.")
    ] = "keep",
    compute: Annotated[bool, typer.Option("--compute", help="The weights that compute, not the stepped ones.")] = False,
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Write optimizer.pt, too: its state_dict().")] = False,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Of a safetensors file.")] = "5GB",
    ram: Annotated[str, typer.Option(metavar="SIZE", help="The most memory to take.")] = "512MiB",
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Write the weights as safetensors, as Hugging Face's libraries read them; and the optimizer's state.

    Full precision: fp32 master weights where there are any. Streamed, in so much memory whatever the model's size.
    """
    console = _console(json)
    directory, number = parse_commit(path)
    if dtype not in get_args(DtypeName):
        raise ConfigError(f"--dtype: expected one of {', '.join(get_args(DtypeName))}, got {dtype!r}")
    chosen: Any = dtype
    with opened([directory, *(also or [])], number, console) as state, ended_by_signals():
        exporter = Exporter(
            state,
            dtype=chosen,
            computing=compute,
            with_optimizer=optimizer,
            max_file_bytes=_size("--max-shard-size", max_shard_size),
            ram_bytes=_size("--ram", ram),
        )
        check_output(out, exporter.plan.num_bytes)
        say(console, f"commit {state.commit.manifest.number}: {format_bytes(exporter.plan.num_bytes)} into {out}")
        with Moving(console, "exporting", exporter.moved_bytes) as moving, _one_thread():
            exporter.write(out, moving.moved)
        files = sorted(each.name for each in out.iterdir())
        say(console, f"wrote {len(files)} files: {moving}")
        _write(
            {
                "commit": state.commit.manifest.number,
                "step": state.step,
                "num_bytes": exporter.plan.num_bytes,
                "needed_ram_bytes": exporter.plan.needed_bytes,
                "seconds": moving.seconds,
                "files": files,
            },
            json,
        )


@app.command("diff")
def diff_command(
    first: Annotated[str, typer.Argument(metavar="A", help="A state directory; with @NUMBER, one of its commits.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The same, or another.")],
    also: Also = None,
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Compare the optimizer's states, too.")] = False,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Compare two commits, value by value.

    Exit codes: 0 they are equal; 1 they differ; 2 it cannot be done.
    """
    console = _console(json)
    (path, number), (other_path, other_number) = parse_commit(first), parse_commit(second)
    more = also or []
    with opened([path, *more], number, console) as state, opened([other_path, *more], other_number, console) as other:
        comparison = compare(state, other, with_optimizer=optimizer)
    for line in comparison.lines():
        say(console, line)
    _write(comparison.as_document(), json)
    if not comparison.same:
        raise typer.Exit(DIFFERENT_EXIT_CODE)


@app.command("prune")
def prune_command(
    paths: Directories,
    keep: Annotated[int | None, typer.Option(metavar="COUNT", help="Keep so many of the newest.", min=1)] = None,
    numbers: Annotated[
        list[int] | None, typer.Option("--commit", metavar="NUMBER", help="Remove this one; may be given again.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Remove the whole state.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Remove commits, and give back what only they took of the disk. No job may be running there."""
    console = _console(json)
    if (keep is not None) + bool(numbers) + every != 1:
        raise ConfigError("prune: expected one of --keep COUNT, --commit NUMBER and --all")
    with Pruning(paths) as pruning:
        doomed = [file.number for file in pruning.commits] if every else numbers or pruning.but_newest(keep or 1)
        where = ", ".join(map(str, pruning.directories))
        if not every and not doomed:
            say(console, f"nothing to remove in {where}")
            _write({"commits": [], "freed_bytes": 0, "kept_bytes": 0, "notes": []}, json)
            return
        what = "the whole state" if every else f"commit {', '.join(map(str, sorted(doomed)))}"
        if not yes and not typer.confirm(f"Remove {what} in {where} for good?", err=json == STANDARD_OUTPUT):
            raise typer.Exit(2)
        if every:
            strangers = pruning.remove_all()
            notes = [f"{stranger} is not infinity's, and stays" for stranger in strangers]
            document: dict[str, Any] = {"commits": doomed, "notes": notes}
        else:
            pruned = pruning.remove(doomed)
            notes = pruned.notes
            document = {
                "commits": pruned.commits,
                "freed_bytes": pruned.freed_bytes,
                "kept_bytes": pruned.kept_bytes,
                "notes": notes,
            }
            what = f"{what}: {format_bytes(pruned.freed_bytes)} given back"
        say(console, f"removed {what}")
        for note in notes:
            say(console, f"note: {note}", "yellow")
        _write(document, json)


def _console(json: Path | None) -> Console:
    return OutputConsole(stderr=json == STANDARD_OUTPUT)


def _write(document: dict[str, Any], json: Path | None) -> None:
    if json is not None:
        write_json(document, json)


def _size(flag: str, text: str) -> int:
    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        size = 0
    if size <= 0:
        raise ConfigError(f"{flag}: expected a size such as 512MiB or 5GB, got {text!r}")
    return size


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Arithmetic on one thread: it is short, and threads that wait for one another lose most where others compute.

    (Measured beside eight busy processes on two cores: 9.7 s for 512 MiB with two threads, 2.8 s with one.)
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
