"""Is a pretrained model of 2 GiB loaded within its budgets and 400 MiB, however large it is?

A Llama with random weights is written in bf16, as several safetensors files with their index, and loaded by
``from_pretrained`` and ``infinity.initialize`` in a process of its own, with fp32 master weights (that is twice the
bytes of the files), by a parent that looks at its memory ten times a second. Then every weight that the engine has is
compared with the files. All of it is deleted at the end.

    python bench/load_pretrained.py --directory DIR [--size 2GiB] [--hbm 256MiB] [--ram 384MiB] [--log FILE]

The exit code is 1 where the peak of resident memory, all libraries included, is above the budgets and 400 MiB; where
loading takes more beside the host budget than three copies of the largest tensor; or where a weight differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lib_checks import Check, print_checks, require_room
from lib_training import machine
from lib_work import end_on_sigterm
from lib_worker import peak_rss_bytes
from pydantic import ByteSize, TypeAdapter
from safetensors.torch import save_file

import infinity
from infinity.console.formats import format_bytes

MIB = 1 << 20
BAR_BYTES = 400 * MIB
"""What may be resident beside the budgets."""

NUM_COPIES = 3
"""Of the largest tensor, in fp32, that loading may take beside the host budget."""

NUM_FILES = 8
SAMPLE_SECONDS = 0.1
NUM_ROWS = 12
"""Of the picture of memory over time."""

ON_DISK = 5.2
"""What files and state take, for each byte of the files: parameters, masters and gradients on NVMe beside them."""

_SMALL_HIDDEN, _HIDDEN = 1024, 2048
_VOCAB = 8192


class Sample(NamedTuple):
    """What the process had at a moment: seconds since its start, resident bytes, bytes that it has read."""

    seconds: float
    rss_bytes: int
    read_bytes: int


def config_of(num_bytes: int) -> dict[str, Any]:
    """The ``config.json`` of a model whose bf16 weights take about so many bytes."""
    hidden = _HIDDEN if num_bytes >= 1 << 30 else _SMALL_HIDDEN
    inner = 8 * hidden // 3 // 64 * 64
    layer = 4 * hidden * hidden + 3 * hidden * inner
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "num_hidden_layers": max(1, round((num_bytes / 2 - 2 * _VOCAB * hidden) / layer)),
        "tie_word_embeddings": False,
        "vocab_size": _VOCAB,
    }


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The weights of the model, by name."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (_VOCAB, hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {f"{at}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return {**shapes, "model.norm.weight": (hidden,), "lm_head.weight": (_VOCAB, hidden)}


def write_checkpoint(directory: Path, config: dict[str, Any]) -> int:
    """Write the files, one in memory at a time; how many bytes of tensors they have."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    names = list(shapes_of(config).items())
    file_of: dict[str, str] = {}
    num_bytes = 0
    for number in range(NUM_FILES):
        part = names[number * len(names) // NUM_FILES : (number + 1) * len(names) // NUM_FILES]
        name = f"model-{number + 1:05}-of-{NUM_FILES:05}.safetensors"
        generator = torch.Generator().manual_seed(number)
        tensors = {each: (torch.randn(shape, generator=generator) * 0.02).bfloat16() for each, shape in part}
        save_file(tensors, directory / name, {"format": "pt"})
        file_of |= dict.fromkeys(tensors, name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        forget(directory / name)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": file_of}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return num_bytes


def forget(path: Path) -> None:
    """Have a file's bytes on the disk only."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def read_plainly(directory: Path) -> float:
    """Seconds that it takes to read the files one after the other, into memory that is used again."""
    memory = bytearray(8 * MIB)
    begun = time.perf_counter()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(memory):
                pass
    seconds = time.perf_counter() - begun
    for path in directory.glob("*.safetensors"):
        forget(path)
    return seconds


def load(checkpoint: str, nvme: str, hbm: str, ram: str) -> None:
    """What the process does that is measured."""
    from safetensors import safe_open

    from infinity.integrations.transformers import from_pretrained

    def say(**fields: Any) -> None:
        print(json.dumps(fields), flush=True)

    say(imported=peak_rss_bytes())
    begun = time.perf_counter()
    config = infinity.Config(device="cpu", hbm=hbm, ram=ram, nvme=nvme, precision="bf16")
    model = from_pretrained(checkpoint, config)
    say(made=peak_rss_bytes(), made_seconds=time.perf_counter() - begun)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with infinity.initialize(model, optimizer, config) as engine:
        engine.synchronize()
        usage = {name: tier.peak_bytes for name, tier in engine.usage().items()}
        say(loaded=peak_rss_bytes(), seconds=time.perf_counter() - begun, usage=usage, state_bytes=engine.state_bytes)
        state, different = engine.state_dict(), 0
        for path in sorted(Path(checkpoint).glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # it is no mapping
                    value = state[name]
                    different += value.dtype != torch.float32 or not torch.equal(value, file.get_tensor(name).float())
        say(compared=len(state), different=different)


def watched(checkpoint: Path, nvme: Path, hbm: str, ram: str) -> tuple[dict[str, Any], list[Sample]]:
    """Load in a process of its own; what it says, and its memory until the model is loaded."""
    command = [sys.executable, __file__, "--measured", str(checkpoint), str(nvme), hbm, ram]
    package = Path(infinity.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])}
    said: dict[str, Any] = {}
    samples: list[Sample] = []
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        with ended(process):
            while "compared" not in said and process.poll() is None:
                if "loaded" not in said:
                    samples += sample(process.pid, time.perf_counter() - begun)
                time.sleep(SAMPLE_SECONDS)
                for line in process.stdout:
                    said |= json.loads(line)
            for line in process.stdout:
                said |= json.loads(line)
    if process.returncode:
        raise SystemExit(f"the process that loads the model has failed, with exit code {process.returncode}")
    return said, samples


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """A context that ends a process where it fails itself."""
    try:
        yield
    except BaseException:
        process.kill()
        raise


def sample(pid: int, seconds: float) -> Iterator[Sample]:
    """What a process has now; nothing where it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        counts = Path(f"/proc/{pid}/io").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return
    rss, read = re.search(r"^VmRSS:\s+(\d+)", status, re.MULTILINE), re.search(r"^rchar: (\d+)", counts, re.MULTILINE)
    if rss is not None and read is not None:
        yield Sample(seconds, int(rss[1]) * 1024, int(read[1]))


def picture(samples: Sequence[Sample], num_rows: int = NUM_ROWS) -> list[str]:
    """Memory over time: for each stretch of it the most that was resident, and what had been read at its end."""
    most = max(each.rss_bytes for each in samples)
    lines = [f"{'seconds':>8}  {'RSS MiB':>8}  {'read MB':>8}"]
    for row in range(min(num_rows, len(samples))):
        part = samples[row * len(samples) // num_rows : (row + 1) * len(samples) // num_rows] or samples[row : row + 1]
        rss = max(each.rss_bytes for each in part)
        bar = "#" * round(40 * rss / most)
        lines.append(f"{part[-1].seconds:8.1f}  {rss / MIB:8.0f}  {part[-1].read_bytes / 1e6:8.0f}  {bar}")
    return lines


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="an existing directory with room for all of it")
    size = TypeAdapter(ByteSize).validate_python
    parser.add_argument("--size", type=size, default=size("2GiB"), help="of the files, in bf16")
    parser.add_argument("--hbm", default="256MiB", help="device budget: gathered parameters")
    parser.add_argument("--ram", default="384MiB", help="host budget: shards")
    parser.add_argument("--log", type=Path, help="write the lines here too")
    arguments = parser.parse_args(argv)
    if not arguments.directory.is_dir():
        parser.error(f"--directory: {arguments.directory} is not a directory; give an existing one")
    if arguments.size < 64 * MIB:
        parser.error("--size: expected 64MiB at least")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Write, load, compare, and hold the peak against the budgets."""
    arguments = parse(argv)
    end_on_sigterm()
    size = TypeAdapter(ByteSize).validate_python
    budgets = size(arguments.hbm) + size(arguments.ram)
    disk_bytes = ON_DISK * arguments.size
    require_room(arguments.directory, disk_bytes=disk_bytes, memory_bytes=budgets + arguments.size / NUM_FILES + 1e9)
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    disk = f"disk: {format_bytes(disk_bytes)} at most, deleted at the end"
    say(f"{machine()}; load of other programs {os.getloadavg()[0]:.1f}; {disk}")
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="infinity-load-") as scratch:
        checkpoint, nvme = Path(scratch) / "model", Path(scratch) / "nvme"
        nvme.mkdir()
        config = config_of(arguments.size)
        num_bytes = write_checkpoint(checkpoint, config)
        largest = 2 * _VOCAB * config["hidden_size"]
        say(
            f"a Llama of {num_bytes / 2e9:.2f}B parameters: {format_bytes(num_bytes)} in {NUM_FILES} files in bf16, "
            f"{len(shapes_of(config))} tensors, the largest {format_bytes(largest)}"
        )
        plain = read_plainly(checkpoint)
        said, samples = watched(checkpoint, nvme, arguments.hbm, arguments.ram)
    for line in picture(samples):
        say(line)
    beside = said["loaded"] - said["made"] - size(arguments.ram)
    figures = {
        "budgets": f"{budgets / MIB:.0f} MiB: hbm {arguments.hbm}, ram {arguments.ram}",
        "after all imports": f"{said['imported'] / MIB:.0f} MiB",
        "after from_pretrained": f"{said['made'] / MIB:.0f} MiB, {said['made_seconds']:.1f} s",
        "peak": f"{said['loaded'] / MIB:.0f} MiB: {beside / MIB:.0f} MiB beside that and the host budget",
        "tiers, at their peak": ", ".join(f"{name} {format_bytes(each)}" for name, each in said["usage"].items()),
        "loaded": f"{said['seconds']:.1f} s, {num_bytes / said['seconds'] / 1e9:.2f} GB/s of the files",
        "the files read plainly": f"{plain:.1f} s, {num_bytes / plain / 1e9:.2f} GB/s",
        "weights compared": f"{said['compared']}, {said['different']} differ",
    }
    for name, figure in figures.items():
        say(f"{name:24}{figure}")
    checks = [
        Check("peak RSS over the budgets", (said["loaded"] - budgets) / MIB, "<=", BAR_BYTES / MIB, "MiB"),
        Check("peak beside imports and ram", beside / (2 * largest), "<=", NUM_COPIES, "largest tensors in fp32"),
        Check("weights that differ", said["different"], "<=", 0, "of all"),
    ]
    print_checks(checks)
    if arguments.log is not None:
        verdicts = [
            f"{'met' if each.met else 'MISSED'}: {each.name}: {each.value:g} <= {each.bar:g}" for each in checks
        ]
        arguments.log.write_text("\n".join([*lines, *verdicts]) + "\n", encoding="utf-8")
    return 0 if all(check.met for check in checks) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measured"]:
        load(*sys.argv[2:6])
    else:
        sys.exit(main())
