"""Trains with infinity, or in ordinary PyTorch, on request: the process behind a row of figures (see ``lib_worker``).

    python bench/infinity_worker.py '{"shape": {...}, "work": [1, 32], "precision": "bf16", "fused": true,
        "config": {...} or null}'

Request ``{"steps": N, "settling": M}``: train so many steps, of which the first M are not counted.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

from lib_training import Runner, make_engine, make_plain
from lib_work import Work, batches
from lib_worker import peak_rss_bytes, reset_peak_rss, serve

from infinity.config import Config
from infinity.train.model import GPTShape


class Training:
    """One model in training, made at ``start``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._work = Work(*settings["work"])
        self._shape = GPTShape(**settings["shape"])

    def start(self) -> dict[str, Any]:
        """Make the model; what it is."""
        begun = time.perf_counter()
        fields, precision, fused = (self._settings[key] for key in ("config", "precision", "fused"))
        trainer = (
            make_plain(self._shape, precision, fused=fused)
            if fields is None
            else make_engine(self._shape, Config(**fields, precision=precision), fused=fused)
        )
        self._runner = Runner("worker", trainer)
        self._batches = batches(self._work, self._shape.vocab_size)
        document = {
            "parameters": trainer.num_parameters,
            "state_bytes": trainer.state_bytes,
            "start_seconds": time.perf_counter() - begun,
            "start_rss_bytes": peak_rss_bytes(),
        }
        reset_peak_rss()
        return document

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Train; what that took."""
        runner = self._runner
        samples = runner.train(
            list(itertools.islice(self._batches, request["steps"])), num_settling=request["settling"]
        )
        return {
            "seconds": [sample.seconds for sample in samples],
            "read_bytes": [sample.read_bytes for sample in samples],
            "written_bytes": [sample.written_bytes for sample in samples],
            "losses": runner.losses[-request["steps"] :],
            "peak_rss_bytes": peak_rss_bytes(),
            "peak_pool_bytes": {
                name: usage.peak_bytes for name, usage in runner.trainer.usage().items() if name != "nvme"
            },
        }

    def close(self) -> None:
        """Give everything back."""
        if hasattr(self, "_runner"):
            self._runner.trainer.close()


def main() -> None:
    training = Training(json.loads(sys.argv[1]))
    try:
        serve(training.start, training.answer)
    finally:
        training.close()


if __name__ == "__main__":
    main()
