"""Goes through the machine, section by section."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.doctor.computing import judge_accelerator, judge_huge_pages, judge_memory, judge_processors
from infinity.doctor.facts import Accelerator, Directory
from infinity.doctor.findings import Finding, good
from infinity.doctor.limits import judge_limits, judge_uring
from infinity.doctor.programs import judge_extras, judge_software, judge_torch
from infinity.doctor.storage import judge_directories, judge_directory
from infinity.doctor.together import judge_ranks
from infinity.doctor.view import View


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page."""

    title: str
    findings: tuple[Finding, ...]


def examine(view: View, paths: Sequence[Path]) -> Iterator[Section]:
    """All sections, each as soon as it is known. A check that fails is said, and the others go on.

    Args:
        view: asks the machine.
        paths: directories for the NVMe tier.
    """
    place = view.place()
    kind = place.host.container or place.host.virtualization
    where = () if kind is None else (good("place", f"{kind}{', container' if place.in_container else ''}"),)
    yield Section(
        "software",
        (
            *_tried("software", lambda: judge_software(view.software())),
            *where,
            *_tried("torch", lambda: judge_torch(view.torch_build()), essential=True),
        ),
    )
    accelerators: list[Accelerator] = []

    def accelerator() -> Iterator[Finding]:
        accelerators.append(view.accelerator())
        return judge_accelerator(accelerators[0], place)

    yield Section(
        "computing",
        (
            *_tried("accelerator", accelerator, essential=True),
            *_tried("cores", lambda: judge_processors(view.processors(), place)),
            *_tried("RAM", lambda: judge_memory(view.memory(), place)),
            *_tried("huge pages", lambda: judge_huge_pages(view.huge_pages(), place)),
        ),
    )
    found = accelerators[0] if accelerators else Accelerator()
    yield Section(
        "limits",
        (
            *_tried("limits", lambda: judge_limits(view.limits(), found, place)),
            *_tried("io_uring", lambda: judge_uring(view.uring(), place)),
        ),
    )
    directories: list[Directory] = []
    for path in paths:

        def directory(path: Path = path) -> Iterator[Finding]:
            directories.append(view.directory(path))
            return judge_directory(directories[-1], place)

        yield Section(f"directory {path}", _tried("directory", directory, essential=True))
    if together := tuple(judge_directories(directories)):
        yield Section("directories together", together)
    yield Section("several ranks", _tried("collectives", lambda: judge_ranks(view.ranks())))
    yield Section("optional", _tried("extras", lambda: judge_extras(view.extras())))


def _tried(name: str, check: Callable[[], Iterator[Finding]], *, essential: bool = False) -> tuple[Finding, ...]:
    """What a check finds, or that it failed."""
    try:
        return tuple(check())
    except Exception as error:  # of whatever is below: the rest of the page is worth having
        text = f"the check failed: {type(error).__name__}: {error}"
        repair = f"# report this: python -m infinity.doctor fails at {name}"
        return (Finding(name, "missing", text, "nothing is known of it", (repair,), essential=essential),)
