"""``deepspeed.runtime.zero``: see ``deepspeed.zero``."""

from infinity.integrations.deepspeed.zero import GatheredParameters, Init, register_external_parameter

__all__ = ["GatheredParameters", "Init", "register_external_parameter"]
