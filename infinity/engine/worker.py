"""``Worker``: where the optimizer computes, with exactly the training thread's number of threads. ``OptimizerThread``.

The number of threads that an operator runs on is part of its result: ``sum``, ``mean`` and ``dot`` over a whole tensor
split it by threads and round once for each. (Found by trying 1 to 4 threads: these change their bits, norms and matrix
products did not. All of ``torch.optim`` but LBFGS and SparseAdam, which were not tried, gave the same bits with 1, 2
and 3 threads; an optimizer of a user's own may use anything.) Plain PyTorch steps with the setting of the thread that
calls ``step()``; so that setting, taken there by ``follow_caller``, is used here for every optimizer. No list of
classes has to be right.

A thread does not have the setting by itself. ``torch.set_num_threads`` sets the number of the calling thread, and what
threads started later begin with. So a thread keeps what it began with when the user sets another later; and the thread
with which ``DataLoader`` pins memory sets 1, with which every thread begins that is started afterwards. Calling
``torch.set_num_threads`` here would do the same to others, and where torch sets MKL for the whole process, change it
below the training thread. Hence OpenMP and MKL are asked themselves, for this thread alone (``ThreadCounts``).

What else was tried, and is not done. Two cores, a forward and backward on two threads beside AdamW (8 rounds or more
of each setting, while others used the machine too, so that wall times say little; for these see ``lent.py``): CPU time
of both together, over the sum of each alone. 1.0 is no loss, and no setting differs from it by more than the noise:

==========================  ======  ======  =======
optimizer's threads         nice 0  nice 5  nice 10
==========================  ======  ======  =======
2 (as training)             1.00    0.99    1.02
1                           1.01    1.02    1.03
2, ``OMP_WAIT_POLICY=``
``passive``                 0.99    0.93    0.96
``active``                  0.98    1.03    1.02
==========================  ======  ======  =======

* Fewer threads save nothing. On many cores they would make the optimizer the slower half: one core does not fill the
  memory's bandwidth.
* A lower priority showed no gain for training, and costs the optimizer: at nice 10 it made a third of its steps in the
  same time, at nice 19 two trials took two and four times as long, because a priority holds against strangers on the
  machine as well. A step that waits holds up the reads and writes around it; and without a privilege the priority
  cannot be raised again. Neither the loop nor the I/O threads need it: beside both, a wake-up of the loop took 150 us
  instead of 130 (median), and reads went at 0.47 GB/s instead of 0.52, whatever the priorities.
* ``OMP_WAIT_POLICY`` is read when the runtime is loaded, with torch: too late for a library to set it. It need not be:
  GNU's runtime spins less by itself once it has more threads than there are processors.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

import torch

from infinity.store.loop import Idle

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Worker(Executor):
    """Where sub-groups are stepped, one call after the other.

    Attributes:
        counts: with how many threads what is submitted now computes: as many as whoever is followed, at first the
            thread that made it.
    """

    def __init__(self) -> None:
        self.counts = ThreadCounts.of_caller()

    def follow_caller(self) -> None:
        """Compute what is submitted from now on with the calling thread's numbers of threads: training's."""
        self.counts = ThreadCounts.of_caller()

    @property
    @abstractmethod
    def has_calls(self) -> bool:
        """Whether calls wait for a thread to be lent."""

    @abstractmethod
    def lend(self) -> None:
        """Use the calling thread for calls that wait for one."""

    @abstractmethod
    def wait(self, future: Future[Any], timeout: float) -> None:
        """Wait for a future of the loop's, for ``timeout`` seconds at most while nothing is done meanwhile."""


class OptimizerThread(Worker):
    """A thread of its own, beside which the training thread feeds an accelerator."""

    def __init__(self, name: str = "infinity-optimizer") -> None:
        super().__init__()
        self._thread = ThreadPoolExecutor(1, name)

    @property
    def has_calls(self) -> bool:
        """Never: it has its own."""
        return False

    def lend(self) -> None:
        """Nothing: it has its own."""

    def wait(self, future: Future[Any], timeout: float) -> None:
        """Wait, and do nothing else."""
        Idle().wait(future, timeout)

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Have ``fn(*args, **kwargs)`` called on the thread, after what was submitted before, and return its future.

        Raises:
            RuntimeError: the executor is shut down.
        """
        return self._thread.submit(_call_with, self.counts, fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls and end the thread. Shutting down twice is harmless."""
        self._thread.shutdown(wait, cancel_futures=cancel_futures)


@dataclass(frozen=True, slots=True)
class ThreadCounts:
    """With how many threads a thread computes.

    Attributes:
        operators: in torch's own operators.
        mkl: in MKL's matrix products; ``None`` where torch has no MKL, or keeps it to itself.
    """

    operators: int
    mkl: int | None

    @classmethod
    def of_caller(cls) -> ThreadCounts:
        """Those of the calling thread."""
        operators = torch.get_num_threads()  # first: asking makes a thread begin with torch's own numbers
        get_mkl = _runtime("MKL_Get_Max_Threads")
        return cls(operators, None if get_mkl is None else get_mkl())

    def apply(self) -> None:
        """Make them those of the calling thread, and of no other."""
        if self == ThreadCounts.of_caller():
            return
        for name, count in (("omp_set_num_threads", self.operators), ("MKL_Set_Num_Threads_Local", self.mkl)):
            set_count = _runtime(name)
            if set_count is not None and count is not None:
                set_count(count)
        if torch.get_num_threads() != self.operators:  # a torch without OpenMP, with one number for all threads
            torch.set_num_threads(self.operators)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """``apply`` for a while."""
        before = ThreadCounts.of_caller()
        self.apply()
        try:
            yield
        finally:
            before.apply()


def _call_with(counts: ThreadCounts, function: Callable[..., _T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _T:
    counts.apply()
    return function(*args, **kwargs)


@functools.cache
def _runtime(name: str) -> Callable[..., int] | None:
    """A function of the very runtimes that torch is linked with; ``None`` where it is not."""
    try:
        function = getattr(ctypes.CDLL(torch._C.__file__), name)  # the system looks in all that torch depends on
    except (AttributeError, OSError, TypeError):
        return None
    return cast("Callable[..., int]", function)
