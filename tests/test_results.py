"""Every committed result follows the form, so that it can be read and compared by a program."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.harness import RESULTS, ResultFile, Target

FILES = sorted(RESULTS.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_result_file_follows_the_form(path: Path) -> None:
    result = ResultFile.read(path)
    assert result.commit
    assert result.command
    assert result.machine["cpu"]
    for row in result.rows:
        if row.target is not None:
            Target.parse(row.target)


def test_no_row_is_reported_by_two_files() -> None:
    owners: dict[str, list[str]] = {}
    for path in FILES:
        for row in ResultFile.read(path).rows:
            owners.setdefault(row.id, []).append(path.name)
    assert not {row_id: names for row_id, names in owners.items() if len(names) > 1}
