"""What a configuration's keys became, said once in a process, through the logger ``infinity.deepspeed``."""

from __future__ import annotations

import logging
import os

from infinity.deepspeed_json.reading import DeepSpeedConfig

_logger = logging.getLogger("infinity.deepspeed")
_said: set[str] = set()


def tell(settings: DeepSpeedConfig) -> DeepSpeedConfig:
    """Say on rank 0 what became of each key, a warning for what is asked for and no field; and give it back."""
    if os.environ.get("RANK", "0") != "0":
        return settings
    for note in settings.notes:
        _once(logging.INFO, str(note))
    for name, spec in (("optimizer", settings.optimizer), ("scheduler", settings.scheduler)):
        if spec is not None:
            _once(
                logging.WARNING,
                f"{name} = {spec.type}: Config.from_deepspeed() leaves it to you: make it in your script, or take "
                "infinity.integrations.deepspeed.initialize(), which makes it",
            )
    return settings


def _once(level: int, message: str) -> None:
    if message not in _said:
        _said.add(message)
        _logger.log(level, message)
