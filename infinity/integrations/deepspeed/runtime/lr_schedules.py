"""``deepspeed.runtime.lr_schedules``: DeepSpeed's schedules, for scripts that make them themselves."""

from infinity.deepspeed_json.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]
