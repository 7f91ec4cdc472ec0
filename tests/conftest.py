"""Hypothesis runs the same examples every time, so that a red run is red for its reader; INFINITY_FUZZ=1 explores."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # here and in all that tests start: two test files share the cores

settings.register_profile("same", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("explore" if os.environ.get("INFINITY_FUZZ") == "1" else "same")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Matrices this small are slower on several threads, far slower on a busy machine."""
    import torch  # not before a test asks: some are of what works without

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
