"""Judges whether ranks can work together."""

from __future__ import annotations

from collections.abc import Iterator

from infinity.doctor.facts import Ranks
from infinity.doctor.findings import Finding, good

_SLOW_SECONDS = 5.0


def judge_ranks(ranks: Ranks) -> Iterator[Finding]:
    """About collectives."""
    if ranks.library is None:
        yield Finding(
            "collectives",
            "missing",
            f"no library for {ranks.device} devices in this build of torch",
            "needed for several ranks only",
            ("pip install --force-reinstall torch",),
        )
        return
    yield good("collectives", f"{ranks.library} for {ranks.device} devices")
    repairs = ("export GLOO_SOCKET_IFNAME=lo  # or the interface that all machines share: ip -br address",)
    why = "needed for several ranks only; most often the host's name has no address that works (/etc/hosts)"
    if ranks.fault is not None:
        yield Finding("two ranks", "missing", f"do not meet: {ranks.fault}", why, repairs)
    elif ranks.seconds is not None and ranks.seconds > _SLOW_SECONDS:
        yield Finding("two ranks", "slow", f"meet over gloo in {ranks.seconds:.1f} s", why, repairs)
    elif ranks.seconds is not None:
        yield good("two ranks", f"meet over gloo and exchange tensors in {ranks.seconds:.1f} s")
