"""A program that ends without ``close()``, however it ends, leaves nothing behind and says nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import multiprocessing, os, sys, warnings
import torch
import infinity
from torch import nn

ending, backend, *paths = sys.argv[1:]
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
# State of 270 KB: parts of it are on NVMe, and written ahead, when the program ends.
config = infinity.Config(device="cpu", hbm="1MiB", ram="192KiB", nvme=paths, io_backend=backend)
engine = infinity.initialize(model, optimizer, config)
batch = torch.ones(8, 64)

def step():
    engine.backward(engine(batch).square().mean())
    engine.step()

def fail(*args):
    raise ValueError("boom")

step()
assert all(os.listdir(path) for path in paths)
if ending == "raise":
    fail()
if ending == "raise in forward":
    model[2].register_forward_hook(fail)
    step()
if ending == "exit":
    sys.exit(3)
if ending == "fork":
    def child():
        try:
            step()
        except infinity.EngineStateError:
            os._exit(5)
    warnings.simplefilter("ignore")  # newer Pythons warn of any fork beside threads
    context = multiprocessing.get_context("fork")
    for target in (lambda: None, engine.close, child):
        process = context.Process(target=target)
        process.start()
        process.join()
        assert process.exitcode == (5 if target is child else 0), (target, process.exitcode)
    if os.fork() == 0:
        sys.exit(0)
    assert os.wait()[1] == 0
    step()  # what the children did was their own affair
"""


@pytest.mark.parametrize(
    ("ending", "backend", "code", "last_line"),
    [
        ("normal", "threads", 0, ""),
        ("normal", "aiofiles", 0, ""),
        ("raise", "threads", 1, "ValueError: boom"),
        ("raise in forward", "threads", 1, "ValueError: boom"),
        ("exit", "threads", 3, ""),
        ("fork", "threads", 0, ""),
    ],
)
def test_an_engine_that_was_not_closed_leaves_nothing(
    tmp_path: Path, ending: str, backend: str, code: int, last_line: str
) -> None:
    paths = [tmp_path / "nvme0", tmp_path / "nvme1"]
    for path in paths:
        path.mkdir()
    ended = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", PROGRAM, ending, backend, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        cwd=Path(__file__).parent.parent,
    )
    assert ended.returncode == code, ended.stderr
    assert ended.stdout == ""
    assert ended.stderr.count("Traceback") == bool(last_line), ended.stderr
    assert (ended.stderr.splitlines() or [""])[-1] == last_line
    assert [list(path.iterdir()) for path in paths] == [[], []]
