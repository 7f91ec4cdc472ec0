"""``TrainSettings``: what the training command is told besides ``infinity.Config``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError

from infinity.console.output import STANDARD_OUTPUT, flag_error
from infinity.errors import ConfigError
from infinity.train.model import GPTShape

VOCAB_SIZE = 256
"""Text is read byte by byte."""

Count = Annotated[int, Field(ge=1)]


class TrainSettings(BaseModel):
    """The model, the text and the schedule of one training run. Fields are set by their alias, the flag's name.

    Raises:
        ConfigError: a value cannot be used; the message names the flag, what was expected and what came.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    num_layers: Count = Field(default=12, alias="layers")
    """Transformer blocks."""

    hidden_size: Count = Field(default=512, alias="hidden")
    """Width of the residual stream; a multiple of --heads."""

    num_heads: Count = Field(default=8, alias="heads")
    """Attention heads per block."""

    seq_length: Count = Field(default=128, alias="seq")
    """Tokens (bytes of text) per sequence."""

    data: Path | None = None
    """Text to train on: a file, or a directory with all its text files. None: the sources of Python's standard
    library."""

    data_limit: Annotated[ByteSize, Field(ge=1)] = ByteSize(32 << 20)
    """Read at most so much text."""

    num_steps: Count = Field(default=50, alias="steps")
    """Optimizer steps."""

    batch_size: Count = Field(default=8, alias="batch")
    """Sequences per micro-batch, of each rank where torchrun has started several: n ranks train on n times as many."""

    num_micro_batches: Count = Field(default=1, alias="accumulate")
    """Micro-batches of each rank whose gradients are summed in one step; each loss is divided by their number."""

    learning_rate: Annotated[float, Field(gt=0)] = Field(default=5e-4, alias="lr")
    """AdamW's learning rate, once it is warm."""

    num_warmup_steps: Annotated[int, Field(ge=0)] = Field(default=10, alias="warmup")
    """Steps over which the learning rate grows linearly to its full value."""

    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Seed of the initial weights and of the choice of batches."""

    eval_every: Annotated[int, Field(ge=0)] = 10
    """Steps between held-out losses, which are also taken at the start and at the end. 0: never."""

    num_eval_batches: Count = Field(default=2, alias="eval_batches")
    """Batches of held-out text that each rank takes in an evaluation; the same ones every time."""

    plain: bool = False
    """Train the same model without infinity, in ordinary PyTorch with all state in memory."""

    save: Path | None = None
    """Write the final weights here, in fp32, as safetensors. None: weights are not kept."""

    json_file: Path | None = Field(default=None, alias="json")
    """Write the run's figures, of every rank, here as one JSON document; - is standard output."""

    trace_file: Path | None = Field(default=None, alias="trace")
    """Write here who did what when in the last steps, for ui.perfetto.dev or chrome://tracing: reads, compute, waits,
    optimizer and writes side by side. Each of several ranks has its own file: trace.json is trace.rank3.json for
    rank 3."""

    num_trace_steps: Count = Field(default=1, alias="trace_steps")
    """How many steps --trace shows."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise flag_error(error) from None
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"--hidden: expected a multiple of --heads {self.num_heads}, got {self.hidden_size}; "
                f"the next one is {-(-self.hidden_size // self.num_heads) * self.num_heads}"
            )

        if self.trace_file is not None and self.plain:
            raise ConfigError("--trace: ordinary PyTorch reports no transfers and no waits; give it without --plain")
        if self.trace_file == STANDARD_OUTPUT:
            raise ConfigError("--trace: expected a file, got -; standard output is for --json")

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of a step; the first is 1."""
        return self.learning_rate * min(1.0, step / max(1, self.num_warmup_steps))

    def shape(self) -> GPTShape:
        """The sizes of the model."""
        return GPTShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            seq_length=self.seq_length,
            vocab_size=VOCAB_SIZE,
        )
