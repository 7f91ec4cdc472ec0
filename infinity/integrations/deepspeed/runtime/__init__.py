"""``deepspeed.runtime``: the paths by which scripts know the memory estimators and the schedules."""
