"""What becomes of each DeepSpeed key. ``python tests/deepspeed_table.py`` writes docs/deepspeed-keys.md."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from infinity.deepspeed_json.keys import KEYS
from infinity.deepspeed_json.notes import Key

DOCUMENT = Path(__file__).parents[1] / "docs" / "deepspeed-keys.md"

_HEAD = """\
# DeepSpeed's keys

What becomes of every key of a DeepSpeed configuration, at any depth. `Config.from_deepspeed` and
`infinity.integrations.deepspeed.initialize` read it by this table, of which this page is made. [Coming from
DeepSpeed](deepspeed.md) has the rest.

- **honoured**: something follows from it.
- **not needed**: nothing has to follow from it here; it is said once, with the reason.
- **refused**: it asks for what cannot be done, so there is an error that names it and says what to do. A refused key
  that asks for nothing (`false`, 0, `"enabled": false`) is taken.

What says `"auto"` or `null` is left to its default. Any other key is an error that names it and the nearest that there
is. `.…` is a section whose own keys are looked at no further.
"""


def text() -> str:
    """The page."""
    return "\n".join([_HEAD, *_tables()])


def _tables() -> Iterator[str]:
    for section, keys in groupby(sorted(KEYS, key=_order), _section):
        yield f"## `{section}`\n" if section else "## At the top\n"
        yield "| key | here | what follows, why nothing has to, or what to do |\n|---|---|---|"
        for key in keys:
            yield f"| `{_name(key)}` | {key.fate} | {key.why.replace('|', chr(92) + '|')} |"
        yield ""


def _order(key: Key) -> tuple[list[str], int]:
    return _section(key).split("."), KEYS.index(key)


def _section(key: Key) -> str:
    return key.name.rpartition(".")[0]


def _name(key: Key) -> str:
    return key.name.rpartition(".")[2] + (".…" if key.is_open else "")


if __name__ == "__main__":
    DOCUMENT.write_text(text(), encoding="utf-8")
