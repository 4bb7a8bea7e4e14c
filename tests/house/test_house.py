"""The ratchet: what `house.json` counts does not grow, and a ceiling falls with its figure."""

from __future__ import annotations

from house import HOUSE, LOOSE, ROOT, fallen, now, risen, said

RAISE = "Make it smaller. A higher ceiling in tests/house/house.json takes a page in docs/decisions/."
LOWER = "Run scripts/house --lower, and commit tests/house/house.json."


def test_the_library_does_not_grow() -> None:
    grown = [said(*key) for key in risen() if key[1] not in LOOSE]

    assert not grown, "\n".join([*grown, RAISE])


def test_tests_and_docs_do_not_grow() -> None:
    grown = [said(*key) for key in risen() if key[1] in LOOSE]

    assert not grown, "\n".join([*grown, RAISE])


def test_a_ceiling_falls_with_its_figure() -> None:
    shrunk = [said(*key) for key in fallen() if key[1] not in LOOSE]

    assert not shrunk, "\n".join([*shrunk, LOWER])


def test_an_exception_has_a_reason() -> None:
    assert not [thing for thing, row in HOUSE["exceptions"].items() if not row.get("why")]


def test_a_room_being_built_replaces_one_that_stands() -> None:
    building = HOUSE["building"]

    assert not [room for room in building if not (ROOT / "resumable" / room / "__init__.py").exists()]
    assert not [old for old in building.values() if not now()[old, "files"]]
