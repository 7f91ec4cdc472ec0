"""An environment of its own for DeepSpeed: installed, compiled and found again, or a reason why not.

It shares the PyTorch of the Python that runs this (by a ``.pth`` file), so both train with the same kernels and nothing
large is downloaded. Its compiled operations need a C++ compiler, and libaio with its headers; where these headers are
missing they are taken from the Debian package, unpacked beside the environment, if ``apt-get`` is there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

REQUIREMENTS = (
    "deepspeed==0.19.8",
    "einops==0.8.2",
    "hjson==3.1.0",
    "msgpack==1.2.4",
    "ninja==1.13.2",
    "py-cpuinfo==9.0.0",
    "setuptools==84.2.1",
    "tqdm==4.70.1",
)
NEEDS = "about 250 MB of disk, a C++ compiler, libaio's headers, and about 10 minutes of compiling at the first time"
_INSTALL_SECONDS, _BUILD_SECONDS = 1800, 4 * 3600
_TAIL_LINES = 6


class UnavailableError(Exception):
    """The environment cannot be made here; the message says why."""


class PeerEnvironment:
    """DeepSpeed, ready to run."""

    def __init__(self, directory: Path) -> None:
        """Nothing is done yet.

        Args:
            directory: where everything of it lives; kept, it is used again.
        """
        self._directory = directory.resolve()
        self._venv = self._directory / "venv"
        self._libaio = self._directory / "libaio"
        self.log = self._directory / "log.txt"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self._venv / "bin" / "python"

    def variables(self) -> dict[str, str]:
        """The environment variables of its processes."""
        repository = Path(__file__).resolve().parents[1]
        own = {
            "DS_ACCELERATOR": "cpu",
            "TORCH_EXTENSIONS_DIR": str(self._directory / "extensions"),
            "PATH": f"{self._venv / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "PYTHONPATH": str(repository),
            "PYTHONUNBUFFERED": "1",
        }
        libraries = sorted(self._libaio.glob("usr/lib/*/libaio.so"))
        if libraries:
            where = str(libraries[0].parent)
            own |= {
                "CPATH": str(self._libaio / "usr" / "include"),
                "LIBRARY_PATH": where,
                "LD_LIBRARY_PATH": os.pathsep.join(filter(None, (where, os.environ.get("LD_LIBRARY_PATH")))),
            }
        return {**os.environ, **own}

    def prepare(self) -> None:
        """Install and compile what is not there yet.

        Raises:
            UnavailableError: something is missing, or a step failed.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        stamp = self._directory / "ready.txt"
        wanted = "\n".join((*REQUIREMENTS, f"torch {torch.__version__}", f"python {sys.version}", ""))
        if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted and self.python.exists():
            return
        compiler = os.environ.get("CXX", "c++")
        if shutil.which(compiler) is None:
            raise UnavailableError(f"no C++ compiler ({compiler}) on PATH")
        self._find_libaio()
        self._run([sys.executable, "-m", "venv", "--clear", str(self._venv)], "making a virtual environment")
        packages = next(self._venv.glob("lib/python*/site-packages"))
        shared = Path(torch.__file__).resolve().parents[1]
        (packages / "shared_torch.pth").write_text(f"{shared}\n", encoding="utf-8")
        self._run([str(self.python), "-m", "pip", "install", *REQUIREMENTS], "installing DeepSpeed")
        worker = Path(__file__).with_name("deepspeed_worker.py")
        self._run(
            [str(self.python), str(worker), "--build"],
            "compiling DeepSpeed's operations",
            seconds=_BUILD_SECONDS,
            environment=self.variables(),
        )
        stamp.write_text(wanted, encoding="utf-8")

    def _find_libaio(self) -> None:
        """Make sure of ``libaio.h``: the system's, or the package's unpacked beside the environment."""
        if any(Path(folder, "libaio.h").exists() for folder in ("/usr/include", "/usr/local/include")):
            return
        if self._libaio.is_dir():
            return
        missing = "libaio's headers are missing (Debian: apt-get install libaio-dev)"
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            raise UnavailableError(missing)
        packages = self._directory / "packages"
        packages.mkdir(exist_ok=True)
        try:
            self._run(["apt-get", "download", "libaio-dev"], "downloading libaio-dev", folder=packages)
            try:
                self._run(["apt-get", "download", "libaio1t64"], "downloading libaio", folder=packages)
            except UnavailableError:  # its name before 2024
                self._run(["apt-get", "download", "libaio1"], "downloading libaio", folder=packages)
        except UnavailableError as error:
            raise UnavailableError(f"{missing}; {error}") from error
        unpacked = self._directory / "libaio.partial"
        shutil.rmtree(unpacked, ignore_errors=True)
        for package in sorted(packages.glob("*.deb")):
            self._run(["dpkg-deb", "-x", str(package), str(unpacked)], f"unpacking {package.name}")
        for library in unpacked.glob("usr/lib/*/libaio.so.1t64"):  # what libaio.so.1 is called there
            (library.parent / "libaio.so.1").symlink_to(library.name)
        unpacked.rename(self._libaio)

    def _run(
        self,
        command: Sequence[str],
        what: str,
        *,
        seconds: float = _INSTALL_SECONDS,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        print(f"  {what} ...", file=sys.stderr, flush=True)
        with self.log.open("ab") as log:
            try:
                done = subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=folder,
                    timeout=seconds, check=False,
                )  # fmt: skip
            except (OSError, subprocess.TimeoutExpired) as error:
                raise UnavailableError(f"{what}: {error}") from error
        if done.returncode:
            tail = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
            raise UnavailableError(f"{what} failed with exit code {done.returncode}: " + " | ".join(tail))
