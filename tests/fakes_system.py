"""The ``os`` module as faults have it: what a module under test gets in the place of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any


class Crash(BaseException):
    """The process ends here."""


class System:
    """The ``os`` module with some functions replaced."""

    def __init__(self, replacements: dict[str, Callable[..., Any]]) -> None:
        self._replacements = replacements

    def __getattr__(self, name: str) -> Any:
        return self._replacements.get(name) or getattr(os, name)


class FaultySystem(System):
    """Fails the system call number ``fail_at``: with ``error`` once, or, when that is ``Crash``, for ever after too.

    ``close`` always works: a process that ends closes its descriptors.

    Args:
        calls: the names of those that count.
        fail_at: from 1.
        error: what is raised.
    """

    def __init__(self, calls: Iterable[str], fail_at: int, error: BaseException) -> None:
        super().__init__({name: self.wrap(getattr(os, name)) for name in calls})
        self._fail_at = fail_at
        self._error = error
        self.num_calls = 0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call that counts and fails like the others."""

        def faulty(*arguments: Any, **options: Any) -> Any:
            self.num_calls += 1
            if self.num_calls == self._fail_at or (self.num_calls > self._fail_at and isinstance(self._error, Crash)):
                raise self._error
            return call(*arguments, **options)

        return faulty
