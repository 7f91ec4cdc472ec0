"""``python -m infinity.train``: the same as ``infinity train``."""

from infinity.__main__ import run_command

if __name__ == "__main__":
    run_command("train")
