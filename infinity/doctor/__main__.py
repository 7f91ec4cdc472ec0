"""``python -m infinity.doctor``: the same as ``infinity doctor``."""

from infinity.__main__ import run_command

if __name__ == "__main__":
    run_command("doctor")
