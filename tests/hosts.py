"""``TwoHosts``: two network namespaces with a cable between them, on which ranks are as on two machines.

The namespaces have no names: each lives as long as a process that waits for the end of its standard input. So they end
with the tests, however these end.
"""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

DEVICE = "infinity0"
"""The network device of each host."""


class TwoHosts:
    """A context manager; skips the test where the system does not allow it, with what it said.

    Attributes:
        pids: of each host, a process that lives there.
        addresses: of each host.
    """

    addresses = ("10.77.77.1", "10.77.77.2")

    def __init__(self) -> None:
        missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
        if missing:
            pytest.skip(f"two hosts are made with {', '.join(missing)}, not found here")
        if os.geteuid() != 0:
            pytest.skip("two hosts are network namespaces, which root alone may make")
        self._holders = [self._hold() for _ in self.addresses]
        self.pids = [holder.pid for holder in self._holders]

    def __enter__(self) -> TwoHosts:
        try:
            for holder in self._holders:
                assert holder.stdout is not None
                if not holder.stdout.readline():
                    pytest.skip(f"no network namespaces here: {holder.communicate()[1].strip()}")
            peer = ["peer", "name", DEVICE, "netns", str(self.pids[1])]
            self._on(0, "ip", "link", "add", DEVICE, "type", "veth", *peer)
            for host, address in enumerate(self.addresses):
                self._on(host, "ip", "address", "add", f"{address}/24", "dev", DEVICE)
                self._on(host, "ip", "link", "set", "lo", "up")
                self._on(host, "ip", "link", "set", DEVICE, "up")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    @property
    def environment(self) -> dict[str, str]:
        """What ranks there need to know."""
        return {"MASTER_ADDR": self.addresses[0], "GLOO_SOCKET_IFNAME": DEVICE}

    def cut(self) -> None:
        """Pull the cable."""
        self._on(1, "ip", "link", "set", DEVICE, "down")

    def mend(self) -> None:
        """Put it back."""
        self._on(1, "ip", "link", "set", DEVICE, "up")

    def _hold(self) -> subprocess.Popen[str]:
        command = ["unshare", "--net", "sh", "-c", "echo here; exec cat"]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def _on(self, host: int, *command: str) -> None:
        enter = ["nsenter", "--net", "--target", str(self.pids[host]), *command]
        done = subprocess.run(enter, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            pytest.skip(f"no cable between two hosts here: {' '.join(command)}: {done.stderr.strip()}")

    def _end(self) -> None:
        for holder in self._holders:
            holder.communicate()
