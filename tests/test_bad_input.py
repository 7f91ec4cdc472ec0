"""What cannot be used is refused with one clear error that names the thing and the repair; nothing stays behind."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ByteSize
from torch import nn

import infinity
import parity_models as models
from accidents import two_groups
from fakes_io import resources
from infinity import (
    BudgetError,
    Config,
    ConfigError,
    DirectoryError,
    DirectoryInUseError,
    DiskFullError,
)
from infinity.engine.budget import plan_within
from infinity.store.directory import JobDirectory
from parity import CPU, ENOUGH, assert_same, plan_of, smallest
from parity_models import GPT, WIDTH


def hooks_on(model: nn.Module) -> dict[str, int]:
    dictionaries = {
        f"{path}.{name}": len(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if "hooks" in name and isinstance(value, dict)
    }
    return dictionaries | {name: len(param._backward_hooks or ()) for name, param in model.named_parameters()}


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    torch.manual_seed(1)
    losses = []
    for seed in range(2):
        loss = model(*models.tokens(seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@contextmanager
def nothing_left(path: Path | None = None) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    """A model and its optimizer for a start that fails: they must train in plain PyTorch as if it had not been."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = two_groups(model)
    threads_and_files = resources()
    files = None if path is None or not path.is_dir() else sorted(path.iterdir())
    hooks = hooks_on(model)
    yield model, optimizer
    assert resources() == threads_and_files
    assert files is None or path is None or sorted(path.iterdir()) == files
    assert hooks_on(model) == hooks
    assert type(model._parameters) is dict
    torch.manual_seed(0)
    other = GPT()
    assert_same(losses_of(model, optimizer), losses_of(other, two_groups(other)), "losses")
    assert_same(dict(model.state_dict()), dict(other.state_dict()), "weights")


# Directories


def missing(path: Path) -> Path:
    return path / "nowhere"


def a_file(path: Path) -> Path:
    (path / "file").touch()
    return path / "file"


def below_a_file(path: Path) -> Path:
    return a_file(path) / "deeper"


def a_dangling_link(path: Path) -> Path:
    (path / "link").symlink_to(path / "gone")
    return path / "link"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (missing, r"does not exist; create it first: mkdir -p .*nowhere"),
        (a_file, r"not a directory; give a directory"),
        (below_a_file, r"not a directory; give a directory"),
        (a_dangling_link, r"does not exist; create it first"),
    ],
)
def test_nvme_path_that_is_no_directory(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    path = make(tmp_path)
    with nothing_left(tmp_path) as (model, optimizer), pytest.raises(DirectoryError, match=message) as error:
        infinity.initialize(model, optimizer, Config(**ENOUGH, nvme=path))
    assert str(path) in str(error.value)
    assert not (tmp_path / "nowhere").exists()


def test_one_of_two_nvme_paths_is_missing(tmp_path: Path) -> None:
    with nothing_left(tmp_path) as (model, optimizer), pytest.raises(DirectoryError, match="nowhere"):
        infinity.initialize(model, optimizer, Config(**ENOUGH, nvme=[tmp_path, tmp_path / "nowhere"]))


@contextmanager
def mounted(path: Path, *arguments: str) -> Iterator[None]:
    done = subprocess.run(["mount", *arguments, str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting needs rights that are not here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_nvme_path_on_a_read_only_file_system(tmp_path: Path) -> None:
    with (
        mounted(tmp_path, "-t", "tmpfs", "-o", "ro", "tmpfs"),
        nothing_left(tmp_path) as (model, optimizer),
        pytest.raises(DirectoryError, match="read-only file system; remount it writable, or give another"),
    ):
        infinity.initialize(model, optimizer, Config(**ENOUGH, nvme=tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; the read-only mount stands in")
def test_nvme_path_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with (
        nothing_left(tmp_path) as (model, optimizer),
        pytest.raises(DirectoryError, match="may not be read and written by this user; give it to the user: chown"),
    ):
        infinity.initialize(model, optimizer, Config(**ENOUGH, nvme=tmp_path))


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    with (
        mounted(tmp_path, "-t", "tmpfs", "-o", "size=1m", "tmpfs"),
        nothing_left(tmp_path) as (model, optimizer),
        pytest.raises(DiskFullError, match=r"are free: short by .*Free space there, or give directories on other"),
    ):
        infinity.initialize(model, optimizer, Config(**ENOUGH, nvme=tmp_path))


def test_a_disk_that_says_it_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobDirectory, "free_bytes", lambda directory: 1 << 20)
    with nothing_left(tmp_path) as (model, optimizer), pytest.raises(DiskFullError, match="are free: short by"):
        infinity.initialize(model, optimizer, Config(**ENOUGH, nvme=tmp_path))


def test_two_engines_on_one_directory(tmp_path: Path) -> None:
    first = GPT()
    with infinity.initialize(first, two_groups(first), Config(**ENOUGH, nvme=tmp_path)) as engine:
        before = resources()
        with nothing_left() as (model, optimizer), pytest.raises(DirectoryInUseError, match=rf"process {os.getpid()}"):
            infinity.initialize(model, optimizer, Config(**ENOUGH, nvme=tmp_path))
        assert resources() == before
        engine.backward(engine(*models.tokens(0)))
        engine.step()
    second = GPT()
    with infinity.initialize(second, two_groups(second), Config(**ENOUGH, nvme=tmp_path)) as engine:
        engine.backward(engine(*models.tokens(0)))


OTHER_JOB = """
import sys, torch, infinity
model = torch.nn.Linear(4, 4)
try:
    infinity.initialize(model, torch.optim.SGD(model.parameters()), {"device": "cpu", "nvme": sys.argv[1]})
except infinity.DirectoryInUseError as error:
    print(error)
    print(model(torch.ones(4)).isnan().any().item())
"""


def test_two_jobs_on_one_directory(tmp_path: Path) -> None:
    model = GPT()
    with infinity.initialize(model, two_groups(model), Config(**ENOUGH, nvme=tmp_path)) as engine:
        files = sorted(tmp_path.rglob("*"))
        other = subprocess.run(
            [sys.executable, "-c", OTHER_JOB, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
        )
        refusal, is_nan = other.stdout.splitlines()
        assert f"in use by process {os.getpid()}" in refusal
        assert "wait until it ends, or give another directory" in refusal
        assert is_nan == "False"
        assert sorted(tmp_path.rglob("*")) == files
        engine.backward(engine(*models.tokens(0)))
        engine.step()


# Budgets


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 700), nn.ReLU(), nn.Linear(700, 40), nn.Linear(40, 1))


BATCHES = {GPT: models.tokens, models.CNN: models.images, wide: models.vectors, models.ViT: models.images}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("make_model", BATCHES)
@pytest.mark.parametrize(
    "given", [{"hbm": 0}, {"ram": 0}, {"hbm": 1, "ram": 1}, {"hbm": 20_000}, {"ram": 70_000, "hbm": 100_000}]
)
def test_budgets_too_small_are_refused_and_those_that_the_message_names_do(
    given: dict[str, int], make_model: Callable[[], nn.Module], precision: str, tmp_path: Path
) -> None:
    for nvme in (tmp_path, ()):
        fields = {**ENOUGH, "precision": precision, "nvme": nvme, **given}
        if (budgets := budgets_asked_for(make_model, fields)) is not None:
            assert list(tmp_path.iterdir()) == []
            fields |= budgets
        model = make_model()
        with infinity.initialize(model, torch.optim.AdamW(model.parameters()), fields) as engine:
            for seed in range(2):
                for micro in range(2):
                    engine.backward(engine(*BATCHES[make_model](2 * seed + micro)).sum())
                engine.step()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("make_model", BATCHES)
@pytest.mark.parametrize("with_nvme", [True, False])
def test_no_budget_below_the_smallest_named_does_and_every_larger_one_does(
    make_model: Callable[[], nn.Module], precision: str, with_nvme: bool, tmp_path: Path
) -> None:
    config = Config(**{**ENOUGH, "precision": precision, "nvme": tmp_path if with_nvme else (), "hbm": 1, "ram": 1})
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())

    def refusal(hbm: int, ram: int) -> str | None:
        given = config.model_copy(update={"hbm": ByteSize(hbm), "ram": ByteSize(ram)})
        try:
            plan = plan_within(model, given, CPU, lambda other: plan_of(model, optimizer, other))
        except BudgetError as error:
            return str(error).rpartition("would do: ")[2].partition(". The largest")[0]
        assert plan.complaints(model, given, CPU) == []
        return None

    named = refusal(1, 1)
    assert named is not None
    hbm, ram = map(int, re.findall(r"=(\d+)", named))
    assert refusal(hbm - 1, ram) == refusal(hbm, ram - 1) == named
    for factor in (1, 1.1, 1.5, 2, 3, 7):
        for wider, longer in ((factor, 1), (1, factor), (factor, factor)):
            assert refusal(int(hbm * wider), int(ram * longer)) is None


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"hbm": 0, "ram": 1}, r"hbm=0B, but .*KiB.*; ram=1B, but"),
        ({"hbm": 1536}, r"hbm=1\.5KiB, but units in use at the same time need \d+KiB \("),
        ({"hbm": 1537}, r"hbm=1537B, but"),
    ],
)
def test_sizes_are_shown_as_people_write_them(given: dict[str, int], shown: str, tmp_path: Path) -> None:
    model = wide()
    with pytest.raises(BudgetError, match=shown):
        infinity.initialize(model, torch.optim.AdamW(model.parameters()), {**ENOUGH, "nvme": tmp_path, **given})


def budgets_asked_for(make_model: Callable[[], nn.Module], fields: dict[str, Any]) -> dict[str, int] | None:
    """What a refusal names, or ``None`` if there is none."""
    model, before = make_model(), resources()
    try:
        infinity.initialize(model, torch.optim.AdamW(model.parameters()), fields).close()
    except BudgetError as error:
        message = str(error)
    else:
        return None
    assert resources() == before
    found = re.fullmatch(
        r"budgets too small for this model: (hbm|ram)=.*\. "
        r"Smallest budgets that would do: hbm=(\d+), ram=(\d+) \(bytes\)"
        r"(?:\. The largest parameter of .* could be gathered in tiles: .*)?",
        message,
    )
    assert found is not None, message
    return {"hbm": int(found[2]), "ram": int(found[3])}


def test_no_nvme_and_too_little_memory_for_all_state() -> None:
    with (
        nothing_left() as (model, optimizer),
        pytest.raises(BudgetError, match=r"no nvme, but all state takes .*; give nvme= directories or more ram"),
    ):
        infinity.initialize(model, optimizer, Config(**{**ENOUGH, "ram": smallest(GPT, two_groups, nvme=".").ram}))


# Configuration


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rma": "1GiB"}, r"unknown key 'rma'; did you mean 'ram'\?"),
        ({"offload": True}, r"unknown key 'offload'; known keys: device, hbm, ram, nvme"),
        ({"hbm": math.nan}, r"hbm: .*nan"),
        ({"ram": math.inf}, r"ram: .*inf"),
        ({"prefetch": math.nan}, r"prefetch: .*nan"),
        ({"io_num_threads": math.nan}, r"io_num_threads: .*nan"),
        ({"hbm": -1}, r"hbm: .*-1"),
        ({"hbm": "lots"}, r"hbm: .*lots"),
        ({"hbm": True}, r"hbm: expected a number of bytes or a string such as '20GiB', got True"),
        ({"hbm": None}, r"hbm: .*None"),
        ({"prefetch": 1.5}, r"prefetch: .*1\.5"),
        ({"prefetch": 65}, r"prefetch: .*65"),
        ({"nvme": 3}, r"nvme: .*3"),
        ({"precision": "fp8"}, r"precision: .*'bf16' or 'fp16'.*fp8"),
        ({"io_backend": "libaio"}, r"io_backend: .*libaio"),
        ({"io_block_bytes": 1000}, r"io_block_bytes: .*4096.*1000"),
        ({"units": 7}, r"units: .*7"),
        ({"debug": "perhaps"}, r"debug: .*perhaps"),
        ({"device": 3}, r"device: .*3"),
    ],
)
def test_configuration_by_keyword_dictionary_and_file(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    finite = all(math.isfinite(value) for value in fields.values() if isinstance(value, float))
    with pytest.raises(ConfigError, match=message):
        Config(**fields)
    with pytest.raises(ConfigError, match=message):
        Config.from_dict(fields)
    with pytest.raises(ConfigError, match=message if finite else r"not valid JSON: (NaN|Infinity) is not allowed"):
        Config.from_json(path)
    for config in (fields, path, str(path)):
        with nothing_left(tmp_path) as (model, optimizer), pytest.raises(ConfigError):
            infinity.initialize(model, optimizer, config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (5, "config: expected a Config, a dictionary or a path, got int"),
        ({"units": ["Blok"]}, r"units: the model has no module of class 'Blok'.*Block"),
        ({"device": "abacus"}, "device: torch does not know 'abacus'"),
        ({"device": "cuda:77"}, r"device: 'cuda:77' is not available; accelerators here: .*Use device='cpu'"),
        ("nowhere.json", "config file nowhere.json: No such file or directory; give an existing JSON file"),
    ],
)
def test_configuration_that_does_not_fit_the_model_or_machine(config: Any, message: str) -> None:
    with nothing_left() as (model, optimizer), pytest.raises(ConfigError, match=message):
        infinity.initialize(model, optimizer, config)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1]", "expected a dictionary of fields, got list"), ("{", "not valid JSON"), ("\xff", "not valid JSON")],
)
def test_a_file_that_is_no_configuration(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with nothing_left(tmp_path) as (model, optimizer), pytest.raises(ConfigError, match=message):
        infinity.initialize(model, optimizer, path)


def test_the_debug_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINITY_DEBUG", "1")
    assert Config().debug
    monkeypatch.setenv("INFINITY_DEBUG", "maybe")
    with pytest.raises(ConfigError, match="INFINITY_DEBUG: expected 0 or 1, got 'maybe'"):
        Config()
