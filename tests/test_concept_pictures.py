"""The pictures of docs/concepts.md show what the engine's own residency does."""

from __future__ import annotations

from pathlib import Path

import concept_pictures as pictures
from concept_pictures import NUM_FITTING, NUM_UNITS

_ORDER = (*range(NUM_UNITS), *reversed(range(NUM_UNITS)))


async def test_what_is_shown_fits_and_each_unit_is_there_when_it_computes() -> None:
    moments = await pictures.follow(_ORDER, NUM_FITTING)
    assert [moment.computing for moment in moments] == list(_ORDER)
    for moment, after in zip(moments, moments[1:] + moments[:1], strict=True):
        assert len({moment.computing} | moment.read | moment.staying) <= NUM_FITTING
        assert after.computing in {moment.computing} | moment.read | moment.staying
    # What does not fit is read once for forward and once for backward: nobody can read less.
    assert sum(len(moment.read) for moment in moments) == 2 * (NUM_UNITS - NUM_FITTING)


def test_the_pictures_are_written(tmp_path: Path) -> None:
    pictures.main(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["order.png", "tiers.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
