"""Of the ranks of a job that end with errors, one says each error; the others are told of it through their store.

Most errors are met by all ranks at once (a flag, a missing file), and most of the others end all ranks: one fails, and
every rank that waits for it then fails for that reason. So each rank leaves its words where all can read them, and says
them itself only where nobody else does.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from infinity.errors import RanksError

_MEETING_SECONDS = 5.0
_ALIKE_SECONDS = 1.0
"""How long a rank waits for a lower one to say the same."""
_CAUSE_SECONDS = 3.0
"""How long a rank that fails because another has ended waits for that one's words."""
_POLL_SECONDS = 0.05
_MOST_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Words:
    """What a rank ends with.

    Attributes:
        rank: whose.
        follows: whether it only says that another rank has ended, or did not come.
        kind: the same for errors that differ in numbers only.
    """

    rank: int
    follows: bool
    kind: str


def in_ranks() -> bool:
    """Whether this process is one of several ranks."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def named(error: BaseException) -> str:
    """An error in words, with the rank that has it."""
    text = str(error) or repr(error)
    who = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
    return text if text.startswith(who) else f"{who} ({socket.gethostname()}): {text}"


def leave_words(error: BaseException) -> bool:
    """Tell the other ranks what this one ends with; whether it is this one that says it to the user."""
    mine = Words(int(os.environ["RANK"]), isinstance(error, RanksError), _kind(str(error) or repr(error)))
    store: Store | None = None
    with contextlib.suppress(RuntimeError, ValueError, KeyError, OSError):  # then there is nobody to tell
        store = _open_store(mine.rank)
        line = json.dumps([mine.rank, mine.follows, mine.kind]) + "\n"
        store.append(_key(), line)  # type: ignore[attr-defined]  # the stubs lack it
        return _is_mine_to_say(mine, store)
    return True


def _is_mine_to_say(mine: Words, store: Store) -> bool:
    deadline = time.monotonic() + (_CAUSE_SECONDS if mine.follows else _ALIKE_SECONDS)
    while True:
        others = [words for words in _read(store) if words.rank != mine.rank]
        if mine.follows:
            if any(not words.follows for words in others):
                if _hosts_store(mine.rank):  # others still look into it, and torch complains loudly if it goes
                    time.sleep(_ALIKE_SECONDS + 2 * _POLL_SECONDS)
                return False
        elif any(words.rank < mine.rank and words.kind == mine.kind for words in others):
            return False
        elif mine.rank == 0 and not _hosts_store(0):
            return True
        if time.monotonic() > deadline:
            return not (mine.follows and any(words.rank < mine.rank for words in others))
        time.sleep(_POLL_SECONDS)


def _read(store: Store) -> Iterator[Words]:
    for line in store.get(_key()).decode().splitlines():
        yield Words(*json.loads(line))


def _key() -> str:
    """Where the words are; those of ranks that torchrun has started anew are others'."""
    return f"infinity/last_words/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _open_store(rank: int) -> Store:
    """Where the ranks meet: torchrun's, or rank 0's, which lasts as long as that does."""
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=_hosts_store(rank),
        timeout=timedelta(seconds=_MEETING_SECONDS),
        wait_for_workers=False,
        multi_tenant=True,
    )


def _hosts_store(rank: int) -> bool:
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _kind(text: str) -> str:
    return re.sub(r"\d+", "0", text)[:_MOST_CHARACTERS]
