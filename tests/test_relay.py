"""Threads that take turns: the order of turns, and what becomes of all when one fails."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from infinity.engine.relay import Relay, Unwound


def relay(num_threads: int, log: list[str]) -> Relay:
    return Relay(
        num_threads,
        pause=lambda number: log.append(f"pause {number}"),
        resume=lambda number: log.append(f"resume {number}"),
        end_lap=lambda: log.append("lap"),
    )


def test_turns_go_round_until_all_have_ended() -> None:
    log: list[str] = []
    turns = relay(3, log)

    def work(number: int) -> None:
        for round_ in range(3 - number):  # the last one ends first
            assert turns.current == number
            log.append(f"{number}.{round_}")
            turns.hand_over()

    turns.run(work)
    assert turns.failure is None
    assert [each for each in log if "." in each or each == "lap"] == [
        "0.0", "1.0", "2.0", "lap", "0.1", "1.1", "lap", "0.2", "lap",
    ]  # fmt: skip
    resumed = [each for each in log if "." not in each and each != "lap"]
    assert resumed == [f"{word} {each.split()[1]}" for each in resumed[::2] for word in ("resume", "pause")]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_when_one_fails_the_others_unwind_in_order(failing: int) -> None:
    ended: list[str] = []
    turns = relay(3, [])

    def work(number: int) -> None:
        try:
            turns.hand_over()
            if number == failing:
                raise ArithmeticError
            turns.hand_over()
            ended.append(f"{number} complete")
        except BaseException as error:
            ended.append(f"{number} {type(error).__name__}")
            if isinstance(error, Unwound):
                with pytest.raises(Unwound):  # whoever catches it gets no further
                    turns.hand_over()
            raise

    turns.run(work)
    assert turns.failure is not None
    assert turns.failure[0] == failing
    assert isinstance(turns.failure[1], ArithmeticError)
    order = [failing, *(n for n in range(3) if n > failing), *(n for n in range(3) if n < failing)]
    assert ended == [f"{n} {'ArithmeticError' if n == failing else 'Unwound'}" for n in order]


def test_a_failing_end_of_a_lap_and_a_failing_switch_are_failures() -> None:
    for broken in ("resume", "pause", "end_lap"):
        calls: list[int] = []

        def fail(number: int = 0) -> None:
            calls.append(number)  # noqa: B023
            if len(calls) == 2:  # noqa: B023
                raise ArithmeticError

        quiet: dict[str, Callable[..., None]] = dict.fromkeys(("resume", "pause", "end_lap"), lambda *_: None)
        turns = Relay(2, **{**quiet, broken: fail})

        def work(number: int) -> None:
            for _ in range(4):
                turns.hand_over()  # noqa: B023

        turns.run(work)
        assert turns.failure is not None, broken
        assert isinstance(turns.failure[1], ArithmeticError), broken


def test_a_system_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    real_start = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread.name)
        real_start(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    turns = relay(4, [])
    worked: list[int] = []
    turns.run(worked.append)
    assert worked == []
    assert turns.failure is not None
    assert turns.failure[0] == 2
    assert "can't start new thread" in str(turns.failure[1])
    assert len(started) == 2
