"""``PlanSettings``: what is planned, besides ``infinity.Config``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infinity.console.output import flag_error
from infinity.errors import ConfigError
from infinity.plan.units import Count, Endurance, Operations, Speed

Whole = Annotated[int, Field(ge=1)]


class PlanSettings(BaseModel):
    """The model, the batch, the machine and what to show. Fields are set by their alias, the flag's name.

    Raises:
        ConfigError: a value cannot be used, or two contradict; the message names the flag, what was expected and what
            came.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model_class: str | None = Field(default=None, alias="model")
    """The model's class, package.module:Class, made with --kwargs."""

    kwargs: str | None = None
    """With --model: its arguments, as a JSON object."""

    hf_config: Path | None = Field(default=None, alias="hf")
    """A Hugging Face config.json, or the directory that holds it. Needs transformers; no weights are read."""

    num_parameters: Count | None = Field(default=None, alias="parameters")
    """Elements of all parameters, such as 7e9, with --layers and --hidden: for a model of which only this is known."""

    num_layers: Whole | None = Field(default=None, alias="layers")
    """Transformer blocks. Without --model, --hf and --parameters: of the GPT of infinity train, 12 if not said."""

    hidden_size: Whole | None = Field(default=None, alias="hidden")
    """Width of the residual stream, 512 if not said."""

    num_heads: Whole | None = Field(default=None, alias="heads")
    """Attention heads per block, 8 if not said."""

    vocab_size: Whole | None = Field(default=None, alias="vocab")
    """Distinct tokens, 256 if not said, or 32000 with --parameters."""

    batch_size: Whole = Field(default=8, alias="batch")
    """Sequences per micro-batch, of each rank."""

    seq_length: Whole = Field(default=128, alias="seq")
    """Tokens per sequence."""

    num_micro_batches: Whole = Field(default=1, alias="accumulate")
    """Micro-batches in one step."""

    optimizer: str = "AdamW"
    """A class of torch.optim."""

    num_ranks: Whole = Field(default=1, alias="ranks")
    """Ranks that share the state; budgets, batch and speeds are those of one."""

    bench_file: Path | None = Field(default=None, alias="bench")
    """Speeds of the machine: what infinity bench --json wrote. The flags below go before it."""

    read: Speed | None = None
    """Bytes per second from NVMe, reads alone: 3GB/s."""

    write: Speed | None = None
    """Bytes per second to NVMe, writes alone."""

    mixed: Speed | None = None
    """Bytes per second of NVMe, reads and writes together while both go on."""

    pcie: Speed | None = None
    """Bytes per second between host memory and an accelerator, each way."""

    network: Speed | None = None
    """Bytes per second that a rank sends to others."""

    flops: Operations | None = None
    """Operations per second of forward and backward: 45TFLOPS. Without it, and without --compute-seconds, matrix
    products of the model's own shapes are measured on this machine."""

    optimizer_speed: Speed | None = None
    """Bytes of state per second that the optimizer goes through in host memory. Without it, and without --bench, it is
    measured on this machine."""

    compute_seconds: Annotated[float, Field(gt=0)] | None = None
    """Seconds of forward and backward of a step, where they are known."""

    endurance: Endurance | None = None
    """What the drive may be written in its life: 600TBW."""

    plot_file: Path | None = Field(default=None, alias="plot")
    """Draw the plan as a picture here (.png; needs matplotlib)."""

    json_file: Path | None = Field(default=None, alias="json")
    """Write the plan here as one JSON document; - is standard output."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise flag_error(error) from None
        chosen = [
            flag
            for flag, value in (
                ("--model", self.model_class),
                ("--hf", self.hf_config),
                ("--parameters", self.num_parameters),
            )
            if value is not None
        ]
        if len(chosen) > 1:
            raise ConfigError(f"{' and '.join(chosen)}: each names a model; give one of them")
        if self.kwargs is not None and self.model_class is None:
            raise ConfigError("--kwargs: expected together with --model, whose arguments they are")
        if self.num_parameters is not None and (self.num_layers is None or self.hidden_size is None):
            raise ConfigError("--parameters: expected together with --layers and --hidden, which say how it is divided")

    @property
    def num_tokens(self) -> int:
        """Of one rank in one step."""
        return self.batch_size * self.seq_length * self.num_micro_batches
