"""``Config``: every choice a user can make, in one place, validated in one place.

Budgets are hard: they bound what the engine leases from a tier, and they are refused at start if one unit of the model
does not fit. Unknown keys are refused by name, from keywords, dictionaries and JSON files alike.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn

import torch
from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from infinity.errors import ConfigError
from infinity.fields import Bytes, Digit, Names, Number, Paths, Patterns, Scale

Precision = Literal["fp32", "bf16", "fp16"]
BackendName = Literal["auto", "threads", "uring", "aiofiles"]

_MIB = 1 << 20


def _debug_from_environment() -> bool:
    value = os.environ.get("INFINITY_DEBUG", "0").strip().lower()
    if value in {"", "0", "false", "no", "off"}:
        return False
    if value in {"1", "true", "yes", "on"}:
        return True
    raise ConfigError(f"environment variable INFINITY_DEBUG: expected 0 or 1, got {value!r}")


class Config(BaseModel):
    """Where state may live, how much of it, and how it moves.

    Build it from keywords (``Config(hbm="2GiB", ram="8GiB", nvme="/mnt/nvme0")``), from a dictionary
    (``Config.from_dict``) or from a JSON file (``Config.from_json``).

    Raises:
        ConfigError: a key is unknown, or a value cannot be used; the message names the field, what was expected and
            what came.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True
    )

    device: str = "auto"
    """Where arithmetic runs: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or any accelerator torch knows. ``"auto"`` takes the
    current accelerator, else the CPU, whose device tier is then a bounded arena in RAM."""

    hbm: Bytes = ByteSize(1024 * _MIB)
    """Bytes of device memory for gathered parameters. Activations and kernel workspaces are not in it."""

    ram: Bytes = ByteSize(4096 * _MIB)
    """Bytes of host memory for shards: pinned where an accelerator is used, huge pages where the system has them."""

    nvme: Paths = ()
    """Directories for shards that fit neither tier; several are striped. Each must exist. Empty: no third tier. Of
    several ranks each has its own: ``{rank}``, ``{local_rank}`` and ``{host}`` in a path are replaced, and in a path
    without them it makes a directory ``rank-<rank>``."""

    nvme_weights: tuple[Annotated[float, Number, Field(gt=0)], ...] | None = None
    """Relative speeds of the ``nvme`` directories, one for each: shards are cut in this proportion. ``None``: several
    directories are measured at start, together, and a fifth more or less counts as equal. Changes speed only."""

    stage: Annotated[Literal[0, 1, 2, 3], Digit] = 3
    """What several ranks divide among them, each keeping one of as many equal slices. 0: nothing. 1: master weights and
    optimizer states. 2: also gradients. 3: also parameters. The numbers are the same."""

    shard_ranks: Annotated[int, Number, Field(ge=1)] | None = None
    """With several ranks: so many consecutive ones share the state, and others have copies of it (hybrid sharding: the
    ranks of a host share, hosts have copies, so that parameters never travel between hosts). ``None``: all share it.
    A mesh of two dimensions, given to ``initialize``, says the same for any arrangement."""

    reduction_dtype: Literal["same", "fp32"] = "same"
    """With ``bf16`` and ``fp16``: what gradients travel in between ranks. ``"same"``: their own dtype, as in PyTorch's
    DDP. ``"fp32"``: twice the bytes, and sums over ranks are kept in fp32."""

    ranks_timeout_seconds: Annotated[float, Number, Field(gt=0, le=86400)] = 600.0
    """How long ranks wait for one that does not come before all end with an error. One that has ended ends the others
    at once."""

    precision: Precision = "fp32"
    """``"fp32"``: parameters and arithmetic as they are. ``"bf16"``: bf16 parameters, buffers and gradients, fp32
    master weights and optimizer states; gradients of several backwards are summed in fp32. ``"fp16"``: the same with
    fp16, and the loss is scaled: call ``engine.backward(loss)``."""

    keep_fp32: Patterns = ()
    """With ``bf16`` and ``fp16``: patterns of names of parameters and buffers that stay as the model made them, and are
    computed and stepped so: ``("*norm*", "blocks.*.router.*")``, ``*`` for any characters. Their modules get inputs as
    they come, so a module that wants them in fp32 casts them."""

    accumulation_dtype: Literal["fp32", "same"] = "fp32"
    """With ``bf16`` and ``fp16``: what gradients of several backwards are summed in. ``"fp32"``: exactly what each
    backward made, summed in fp32. ``"same"``: in the gradients' own dtype, as PyTorch does on ``param.grad``; half the
    bytes, and small gradients are lost in large sums."""

    loss_scale: Literal["dynamic"] | Scale = "dynamic"
    """With ``fp16``: what the loss is multiplied by. ``"dynamic"``: it is halved when a gradient overflows, and that
    step is skipped; a number stays as it is."""

    initial_loss_scale: Scale = 65536.0
    """What ``loss_scale="dynamic"`` begins with."""

    loss_scale_window: Annotated[int, Number, Field(ge=1)] = 2000
    """So many steps in a row without an overflow double the scale (``GradScaler``'s ``growth_interval``)."""

    loss_scale_hysteresis: Annotated[int, Number, Field(ge=1)] = 1
    """So many overflows halve the scale, counted anew when it doubles; as in DeepSpeed. 1 is ``GradScaler``."""

    min_loss_scale: Annotated[float, Number, Field(ge=0)] = 0.0
    """The scale gets no smaller; an overflow there is an error. As in DeepSpeed; 0 is ``GradScaler``."""

    optimizer_states: Literal["full", "bf16", "int8"] = "full"
    """``"full"``: optimizer states as the optimizer makes them. ``"bf16"``, ``"int8"``: its fp32 states of parameters
    of 4096 elements or more take 2 bytes, or 1 (and a scale for every 256), for each element, and are stepped in fp32:
    fewer bytes to keep and move, and **not** the numbers of plain PyTorch."""

    prefetch: Annotated[int, Number, Field(ge=0, le=64)] = 2
    """How many units ahead of the one computing may be gathered. 0: every gather waits for its read."""

    units: Names = "auto"
    """What is gathered together. ``"auto"`` finds repeated blocks; or class names of modules to take as units."""

    tile_large_layers: bool = False
    """At start, cut ``nn.Linear`` and ``nn.Embedding`` of more than a quarter of ``hbm`` into tiles that are gathered
    one by one, in the model and in the optimizer's groups: see ``infinity.tile_large_layers``. Names and number of the
    parameters change, and gradients of inputs are summed over tiles, which rounds them otherwise."""

    recompute: bool = False
    """Keep no activations inside repeated blocks (or inside the modules that ``units`` names): compute them again in
    backward, as ``torch.utils.checkpoint`` with ``use_reentrant=False`` does, with the same random numbers and
    autocast. Less memory, a third more arithmetic. As there, a buffer that forward changes (BatchNorm's) is changed
    twice. The rest of the model (embeddings, norms, heads) keeps what it saves."""

    activation_bytes: Bytes = ByteSize(0)
    """Keep tensors that autograd saves for backward, of 64 KiB and more, in ``ram`` and on ``nvme`` instead of where
    they are computed, up to so many bytes; these are reserved on ``nvme`` at start (without ``nvme``: of ``ram``,
    beside all state). What finds no room stays where it is; ``engine.usage()["activations"]`` tells how much was used.
    0: all stay."""

    sub_group_bytes: Bytes | None = None
    """Largest state (parameters, master weights, gradients, optimizer states) that one optimizer sub-group may hold;
    a larger single parameter makes its own. ``None``: a sixteenth of ``ram`` within 32 and 256 MiB, but at most a
    quarter: what is being stepped, read and written takes memory from what could stay. Or as much as the largest
    parameter with the biases and norms beside it, where half of ``ram`` holds that."""

    overlap: bool = True
    """Step sub-groups beside training: ``step()`` returns at once, and the next forward waits for each unit. Off, or
    where ``ram`` has no room for a step and a backward at the same time: ``step()`` returns when all is stepped."""

    accumulation_steps: Annotated[int, Number, Field(ge=1)] | None = None
    """How many backwards make a step, not counting those in ``engine.no_sync()``. Given, and with ``overlap``,
    sub-groups are stepped under the last of them, as soon as their gradients are final: hyper-parameters must be set
    before it, and ``step()`` must follow, before the model is used, saved or given other gradients. Where ``ram`` has
    no room for a step and a backward at the same time, backward waits for them meanwhile. With ``max_grad_norm``,
    ``fp16`` or ``on_nonfinite`` see ``speculation``. ``None``: nothing is stepped before ``step()``."""

    speculation: Literal["auto", "off"] = "off"
    """With ``accumulation_steps`` and ``max_grad_norm``, ``fp16`` or ``on_nonfinite``: whether sub-groups whose state
    is on ``nvme`` are stepped under the last backward although it is not known yet if gradients will be clipped, or the
    step skipped. If so, or if anything else comes between backward and ``step()``, they are put back and stepped again:
    the numbers are the same. ``"off"``: they wait for ``step()``. ``"auto"``: as long as less than half of the last
    steps were clipped or skipped; ``nvme`` then needs room for half of all weights and optimizer states more."""

    accumulation: Literal["auto", "horizontal", "vertical"] = "horizontal"
    """How ``engine.accumulate`` runs micro-batches. ``"horizontal"``: one after the other; parameters move once for
    each. ``"vertical"``: each unit runs all of them before the next unit does, so that parameters move once per step,
    and the activations of all live at once. ``"auto"``: vertically where ``hbm`` does not hold all units, and
    activations are recomputed (``recompute``) or put away (``activation_bytes``). The numbers are the same, unless the
    model or ``compute_loss`` keeps Python state from one call to the next (an auxiliary loss in an attribute)."""

    max_grad_norm: Annotated[float, Number, Field(gt=0)] | None = None
    """Clip gradients in every step as ``torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)`` does, to
    the last bit; ``engine.grad_norm`` is the norm before. The norm needs all gradients, so sub-groups are
    stepped under backward on trial only (``speculation``). A value larger than any norm only measures. ``None``: no
    clipping, and no norm."""

    durability: Literal["off", "checkpoint"] | Annotated[int, Number, Field(ge=1)] = "off"
    """``"off"``: what is on ``nvme`` ends with the run. ``"checkpoint"``: the state on ``nvme`` is kept, and
    ``engine.commit()`` makes the moments to which a later run, or ``engine.rollback()``, returns, bit for bit, whatever
    kills this one. A number: a commit also after every so many steps, beside training. Needs ``nvme``, with room for
    the state ``retained_commits + 1`` times."""

    resume: Literal["never", "auto", "must"] = "never"
    """What to do with a state that is on ``nvme`` already. ``"never"``: refuse to start there. ``"auto"``: go on from
    its last commit, or begin where there is none. ``"must"``: go on, and refuse to begin."""

    retained_commits: Annotated[int, Number, Field(ge=1, le=1000)] = 1
    """How many commits are kept, the last ones. What did not change between two is there once."""

    verify: Literal["always", "resume", "off"] = "resume"
    """Which shards are checked, when they are read from ``nvme``, against the checksums of what was written:
    ``"resume"``: those of a run before, once; ``"always"``: all (0.1 s of a core for each GB, read or written)."""

    on_nonfinite: Literal["continue", "error", "rollback"] = "continue"
    """What ``step()`` does when a gradient is infinite or NaN, other than by overflow in fp16. ``"continue"``: as
    PyTorch does, step with it. ``"error"``: raise ``NonFiniteError`` before anything is stepped. ``"rollback"``: go
    back to the last commit, and warn. Both take the norm of each gradient, so sub-groups are stepped under
    backward on trial only (``speculation``)."""

    io_backend: BackendName = "auto"
    """``"threads"``: direct I/O on worker threads. ``"uring"``: io_uring, which Linux may refuse to containers.
    ``"aiofiles"``: portable. ``"auto"``: the best that a probe in the target directory shows to work; io_uring only
    where a short race there shows it to be clearly better than threads."""

    io_num_threads: Annotated[int, Number, Field(ge=1, le=64)] = 4
    """Worker threads per NVMe directory, or blocks in an io_uring: the queue depth seen by the device. At most 64 MiB
    are in flight for each directory, whatever ``io_block_bytes``."""

    io_block_bytes: Annotated[Bytes, Field(ge=4096)] = ByteSize(8 * _MIB)
    """Largest single system call, and the grain at which an urgent read overtakes a write."""

    compile: bool = False
    """Compile the forward of each block (``units``) with ``torch.compile``: the numbers of plain PyTorch whose blocks'
    forwards are compiled. A block is then gathered whole, whatever ``hbm``, and may use its own modules only."""

    compile_backend: str = "inductor"
    """With ``compile``: which backend of ``torch.compile``. ``"inductor"`` needs a C++ compiler for the CPU, Triton for
    accelerators; ``"aot_eager"`` needs nothing, and makes no kernels."""

    debug: bool = Field(default_factory=_debug_from_environment)
    """Fill released memory with NaN, so that any use after release shows. Also ``INFINITY_DEBUG=1``."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            _refuse(error)

    @field_validator("durability")
    @classmethod
    def _durable_where(cls, durability: str | int, info: ValidationInfo) -> str | int:
        if durability != "off" and info.data.get("nvme") == ():
            raise ValueError("commits are kept on nvme: give directories there, or durability='off'")
        return durability

    @field_validator("resume")
    @classmethod
    def _resume_what(cls, resume: str, info: ValidationInfo) -> str:
        if resume != "never" and info.data.get("durability", "") == "off":
            raise ValueError(f"{resume!r} needs a state that is kept: set durability='checkpoint' or a number of steps")
        return resume

    @field_validator("on_nonfinite")
    @classmethod
    def _rollback_to_what(cls, what: str, info: ValidationInfo) -> str:
        if what == "rollback" and info.data.get("durability", "") == "off":
            raise ValueError("'rollback' needs commits: set durability='checkpoint' or a number of steps")
        return what

    @field_validator("nvme_weights")
    @classmethod
    def _one_weight_per_directory(
        cls, weights: tuple[float, ...] | None, info: ValidationInfo
    ) -> tuple[float, ...] | None:
        nvme = info.data.get("nvme")  # missing where it was refused
        if weights is not None and nvme is not None and len(weights) != len(nvme):
            raise ValueError(f"expected one weight for each of the {len(nvme)} nvme directories")
        return weights

    @classmethod
    def of(cls, config: Config | dict[str, Any] | str | os.PathLike[str] | None) -> Config:
        """From whatever says one: a ``Config``, its fields, the path of a JSON file; ``None`` for the defaults.

        Raises:
            ConfigError: as for the constructor, or ``config`` is none of these.
        """
        if config is None:
            return cls()
        if isinstance(config, Config):
            return config
        if isinstance(config, dict):
            return cls.from_dict(config)
        if isinstance(config, (str, os.PathLike)):
            return cls.from_json(config)
        raise ConfigError(f"config: expected a Config, a dictionary or a path, got {type(config).__name__}")

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Config:
        """Build from a dictionary with the field names as keys.

        Raises:
            ConfigError: as for the constructor, or ``fields`` is not a dictionary.
        """
        if not isinstance(fields, dict):
            raise ConfigError(f"Config: expected a dictionary of fields, got {type(fields).__name__}")
        return cls(**{str(key): value for key, value in fields.items()})

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Config:
        """Build from a JSON file holding one object.

        Raises:
            ConfigError: the file is missing or unreadable, is not JSON (``NaN`` and ``Infinity`` are not JSON either),
                has a key twice, or a field is refused.
        """
        fields = read_json(path)
        return cls.from_dict(fields)

    @classmethod
    def from_deepspeed(
        cls, source: Mapping[str, Any] | str | os.PathLike[str], *, num_ranks: int | None = None, **fields: Any
    ) -> Config:
        """Build from a DeepSpeed configuration: what each of its keys becomes is in ``docs/deepspeed-keys.md``.

        Its optimizer, its schedule and its batch sizes are no fields: ``infinity.integrations.deepspeed`` honours them.
        The logger ``infinity.deepspeed`` says once what became of each key.

        Args:
            source: the configuration, or the path of a JSON file with it.
            num_ranks: how many train; ``None``: what torchrun says, else one.
            fields: fields of ``Config`` for which DeepSpeed has no word (``hbm``, ``ram``), or that count more.

        Raises:
            ConfigError: a key is unknown, or asks for what cannot be done; the message names it, and what to do.
        """
        from infinity.deepspeed_json import read_deepspeed, tell  # which make a Config

        if num_ranks is None:
            num_ranks = int(os.environ.get("WORLD_SIZE", "1") or 1)
        return tell(read_deepspeed(source, num_ranks=num_ranks, fields=fields)).config

    def torch_device(self) -> torch.device:
        """The device that ``device`` names.

        Raises:
            ConfigError: torch does not know it, or it is not there.
        """
        if self.device == "auto":
            return _accelerator() or torch.device("cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise ConfigError(f"device: torch does not know {self.device!r}: {error}") from error
        if device.type == "cpu":
            return torch.device("cpu")
        accelerator = _accelerator()
        num_devices = torch.accelerator.device_count() if accelerator is not None else 0
        if accelerator is None or accelerator.type != device.type or (device.index or 0) >= num_devices:
            there = "none" if accelerator is None else f"{num_devices} of type {accelerator.type!r}"
            raise ConfigError(
                f"device: {self.device!r} is not available; accelerators here: {there}. "
                "Use device='cpu', or install a torch build for your accelerator"
            )
        return device


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def read_json(path: str | os.PathLike[str]) -> Any:
    """What a JSON file holds.

    Raises:
        ConfigError: the file is missing or unreadable, is not JSON, or has a key twice.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_twice)
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}; give an existing JSON file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"config file {path}: not valid JSON: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"key {', '.join(map(repr, twice))} stands there more than once; keep one")
    return fields


def _refuse(error: ValidationError) -> NoReturn:
    """Raise the first few complaints of pydantic as one ``ConfigError`` in the user's terms."""
    lines = []
    for item in error.errors():
        name = str(item["loc"][0]) if item["loc"] else "Config"
        if item["type"] == "extra_forbidden":
            close = difflib.get_close_matches(name, Config.model_fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(Config.model_fields)}"
            lines.append(f"unknown key {name!r}{hint}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"{name}: {message}, got {item['input']!r}")
    raise ConfigError("Config: " + " | ".join(dict.fromkeys(lines))) from None
