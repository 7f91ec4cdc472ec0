"""``python -m infinity.checkpoint``: the same as ``infinity checkpoint``."""

from infinity.__main__ import run_command

if __name__ == "__main__":
    run_command("checkpoint")
