"""Judges the programs: Python, torch, and what some features need."""

from __future__ import annotations

from collections.abc import Iterator

from infinity.doctor.facts import Extras, Software, Torch
from infinity.doctor.findings import Finding, good

_OLDEST_PYTHON = (3, 10)
_OLDEST_TORCH = (2, 6)
_ARCHITECTURES = ("x86_64", "aarch64", "arm64")
_USES = {
    "transformers": ("InfinityTrainer and from_pretrained", "pip install 'infinity[transformers]'"),
    "accelerate": ("an Accelerate-style loop", "pip install 'infinity[accelerate]'"),
    "peft": ("LoRA adapters", "pip install peft"),
    "lightning": ("the Lightning strategy", "pip install 'infinity[lightning]'"),
    "matplotlib": ("--plot", "pip install 'infinity[plot]'"),
}


def judge_software(software: Software) -> Iterator[Finding]:
    """About Python, infinity and the system."""
    version = ".".join(map(str, software.python))
    text = f"{version}, {software.executable}"
    if software.python[:2] < _OLDEST_PYTHON:
        yield Finding(
            "Python", "missing", text, "infinity needs 3.10 or newer", ("python3.12 -m venv venv",), essential=True
        )
    else:
        yield good("Python", text)
    yield good("infinity", f"{software.infinity}, {software.directory}")
    system = f"{software.system}, {software.architecture}"
    if not software.system.startswith("Linux") or software.architecture not in _ARCHITECTURES:
        yield Finding(
            "system",
            "missing",
            system,
            "infinity needs 64-bit Linux",
            ("docker build -f docker/Dockerfile -t infinity .  # Linux in a container",),
            essential=True,
        )
    else:
        yield good("system", system)


def judge_torch(torch: Torch) -> Iterator[Finding]:
    """About torch on the CPU."""
    text = f"{torch.version}, built for {torch.build}, {torch.num_threads} threads"
    numbers = tuple(int(part) if part.isdecimal() else 0 for part in torch.version.split("+")[0].split(".")[:2])
    if numbers < _OLDEST_TORCH:
        yield Finding(
            "torch", "missing", text, "infinity needs 2.6 or newer", ("pip install 'torch>=2.6'",), essential=True
        )
    elif torch.fault is not None:
        yield Finding(
            "torch",
            "missing",
            text,
            f"a small model does not train on the CPU: {torch.fault}",
            ("pip install --force-reinstall torch",),
            essential=True,
        )
    else:
        yield good("torch", text)


def judge_extras(extras: Extras) -> Iterator[Finding]:
    """About optional packages, and compiling."""
    for name, version in extras.versions.items():
        use, command = _USES[name]
        if version is None:
            yield Finding(name, "missing", "not installed", f"needed for {use} only", (command,))
        else:
            yield good(name, version)
    if extras.compiling is None:
        yield good("compile", "Inductor has the compiler that Config(compile=True) needs")
        return
    what, _, repair = extras.compiling.partition(": ")
    command = repair.rpartition("(Debian: ")[2].removesuffix(")") if "(Debian: " in repair else repair
    yield Finding("compile", "missing", what, "needed for Config(compile=True) only", (command,))
