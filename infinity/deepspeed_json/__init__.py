"""DeepSpeed's JSON configurations: every key is honoured, or told to be not needed, or refused."""

from infinity.deepspeed_json.notes import Note
from infinity.deepspeed_json.optimizers import OptimizerSpec
from infinity.deepspeed_json.reading import DeepSpeedConfig, read_deepspeed
from infinity.deepspeed_json.scheduling import SchedulerSpec
from infinity.deepspeed_json.telling import tell

__all__ = ["DeepSpeedConfig", "Note", "OptimizerSpec", "SchedulerSpec", "read_deepspeed", "tell"]
