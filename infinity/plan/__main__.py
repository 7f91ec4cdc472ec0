"""``python -m infinity.plan``: the same as ``infinity plan``."""

from infinity.__main__ import run_command

if __name__ == "__main__":
    run_command("plan")
