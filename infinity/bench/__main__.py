"""``python -m infinity.bench``: the same as ``infinity bench``."""

from infinity.__main__ import run_command

if __name__ == "__main__":
    run_command("bench")
