from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import infinity
import infinity.__main__ as command_line
from infinity.config import Config
from infinity.console.flags import given_fields, make_flags
from infinity.errors import ConfigError
from infinity.train.cli import CONFIG_DEFAULTS, make_config
from infinity.train.settings import TrainSettings

TINY = ["--layers", "2", "--hidden", "32", "--heads", "2", "--seq", "16", "--batch", "2", "--data-limit", "20KiB"]
REPOSITORY = Path(command_line.__file__).parents[1]


def flags_of(**given: Any) -> dict[str, Any]:
    """What typer passes to the command: every flag, ``None`` if not given."""
    names = [parameter.name for model in (TrainSettings, Config) for parameter in make_flags(model, "panel")]
    assert given.keys() <= set(names)
    return {**dict.fromkeys(names), **given}


def call(arguments: Sequence[str]) -> int:
    """Run the command line in this process and return its exit code."""
    with pytest.raises(SystemExit) as exit_info:
        command_line.main(arguments)
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code


def start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        [sys.executable, "-m", "infinity.train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_help_lists_every_field_with_its_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert call(["train", "--help"]) == 0
    printed = capsys.readouterr().out
    for model in (TrainSettings, Config):
        for name, field in model.model_fields.items():
            assert f"--{(field.alias or name).replace('_', '-')} " in printed, name
    assert printed.count("[default: ") == len(TrainSettings.model_fields) + len(Config.model_fields)
    for text in ("[default: 12]", "[default: 32MiB]", "[default: 96MiB]", "fp32|bf16", "DIR[,DIR…]", "--no-debug"):
        assert text in printed


def test_the_list_of_commands_imports_none_of_them() -> None:
    script = (
        "import sys, infinity.__main__ as m\n"
        "try: m.main(['--help'])\n"
        "finally: print('loaded', [n for n in sys.modules if n.startswith('infinity.') and n.endswith('.cli')])"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert "Train a GPT on text" in done.stdout
    assert "loaded []" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "0"], "--layers: Input should be greater than or equal to 1, got '0'"),
        (["--layers", "many"], "--layers"),
        (["--hidden", "33"], "--hidden: expected a multiple of --heads 8, got 33; the next one is 40"),
        (["--eval-every", "-1"], "--eval-every"),
        (["--lr", "nan"], "--lr"),
        (["--hbm", "much"], "hbm: "),
        (["--precision", "fp8"], "precision: Input should be 'fp32', 'bf16' or 'fp16', got 'fp8'"),
        (["--device", "abacus"], "device: torch does not know 'abacus'"),
        (["--data", "/nowhere/text"], "--data: /nowhere/text does not exist"),
        (["--config", "/nowhere/config.json"], "config file /nowhere/config.json"),
        (["--json", "/nowhere/x.json"], "--json: directory /nowhere does not exist"),
    ],
)
def test_errors_of_use_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["train", "--plain", *arguments]) == 2
    captured = capsys.readouterr()
    [line] = captured.err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert captured.out == ""


def test_an_unknown_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["train", "--frobnicate"]) == 2
    assert "--frobnicate" in capsys.readouterr().err


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["trian"]) == 2
    assert "trian" in capsys.readouterr().err


def test_the_debug_flag_keeps_the_traceback() -> None:
    with pytest.raises(ConfigError, match="--layers"):
        command_line.main(["train", "--plain", "--layers", "0", "--debug"])


def test_the_debug_environment_changes_memory_and_not_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INFINITY_DEBUG", "1")
    assert call(["train", "--plain", "--layers", "0"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["--version"]) == 0
    assert capsys.readouterr().out == f"infinity {infinity.__version__}\n"


def test_a_run_that_diverges_exits_with_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    arguments = ["train", "--plain", *TINY, "--steps", "9", "--lr", "1e30", "--warmup", "0", "--eval-every", "0"]
    assert call([*arguments, "--json", str(figures)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: training diverged: the loss is nan at step ")
    assert "lower --lr 1e+30 or raise --warmup 0" in error
    document = json.loads(figures.read_text(), parse_constant=pytest.fail)
    assert document["losses"][document["diverged_at_step"] - 1] is None


@pytest.mark.parametrize("flags", [["--batch", "100000000000000"], ["--batch", "10000000000000000"]])
def test_a_batch_that_memory_cannot_hold_is_an_error_of_use(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["train", "--plain", *TINY, "--seq", "1000", *flags, "--steps", "1", "--eval-every", "0"]) == 2
    error = capsys.readouterr().err
    assert "out of memory" in error
    assert f"lower --batch {flags[1]}" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("module", ["infinity", "infinity.train"])
def test_an_interrupt_while_torch_is_imported_ends_quietly(module: str, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    arguments = [*(["train"] if module == "infinity" else []), "--plain"]
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_every_public_name_is_found_where_it_is_said_to_be() -> None:
    assert infinity.__all__ == sorted(infinity._HOMES, key=infinity.__all__.index)
    for name in infinity.__all__:
        assert getattr(infinity, name).__module__ == infinity._HOMES[name]
        assert name in dir(infinity)
    with pytest.raises(AttributeError, match="module 'infinity' has no attribute 'initialise'"):
        infinity.initialise  # type: ignore[attr-defined]  # noqa: B018


def test_without_a_directory_the_command_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["train", *TINY, "--hidden", "64", "--ram", "256KiB"]) == 2
    error = capsys.readouterr().err
    assert "--nvme DIR (for example --nvme /tmp/infinity)" in error
    assert "--ram" in error
    assert "Traceback" not in error


def test_flags_go_before_the_file_and_the_file_before_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"ram": "1GiB", "prefetch": 5, "units": ["Block"]}))
    config = make_config(file, flags_of(prefetch="7", nvme="/a,/b"))
    assert config == Config(hbm=CONFIG_DEFAULTS["hbm"], ram="1GiB", prefetch=7, units=("Block",), nvme=("/a", "/b"))
    assert make_config(None, flags_of()) == Config(**CONFIG_DEFAULTS)
    assert make_config(file, flags_of(units="auto")).units == "auto"
    assert make_config(None, flags_of(units="Block,GPT")).units == ("Block", "GPT")


def test_a_file_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"hbn": 1}')
    with pytest.raises(ConfigError, match="did you mean 'hbm'"):
        make_config(file, flags_of())


def test_flags_that_were_not_given_leave_the_defaults() -> None:
    settings = TrainSettings(**given_fields(TrainSettings, flags_of(steps="7", plain=True, data="text")))
    assert settings == TrainSettings(steps=7, plain=True, data=Path("text"))


def test_on_standard_output_there_is_only_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["train", "--plain", *TINY, "--steps", "3", "--json", "-"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert len(document["losses"]) == 3
    assert "step 3/3" in captured.err
    assert "infinity train (plain PyTorch)" in captured.err


@pytest.mark.parametrize(("number", "exit_code", "plain"), [(signal.SIGINT, 130, False), (signal.SIGTERM, 143, True)])
def test_a_signal_ends_the_command_cleanly(number: signal.Signals, exit_code: int, plain: bool, tmp_path: Path) -> None:
    directory, figures = tmp_path / "nvme", tmp_path / "figures.json"
    where = ["--plain"] if plain else ["--nvme", str(directory), "--hbm", "256KiB", "--ram", "512KiB"]
    process = start([*TINY, *where, "--steps", "1000000", "--eval-every", "0", "--json", str(figures)])
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            if line.startswith("step 1/"):
                process.send_signal(number)
                break
        rest = process.stdout.read()
        errors = process.stderr.read() if process.stderr is not None else ""
    assert process.returncode == exit_code, errors
    assert "Traceback" not in errors
    assert "weights were not saved: this run keeps no checkpoint" in rest
    steps = re.search(r"steps\s+│ (\d+) of 1000000", rest)
    assert steps is not None
    document = json.loads(figures.read_text())
    assert len(document["losses"]) == int(steps[1]) >= 1
    assert document["stopped_by"] == number.name
    assert not directory.exists()
