"""Counts of a JUnit report."""

from __future__ import annotations

from pathlib import Path

from bench.gpu_tests import rows_of


def test_counts_add_up(tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    report.write_text(
        '<testsuites><testsuite tests="10" failures="2" errors="1" skipped="3" time="7.5"/></testsuites>'
    )
    rows = {row.id: row.value for row in rows_of(report)}
    assert rows == {
        "gpu_tests.passed": 4,
        "gpu_tests.failed": 3,
        "gpu_tests.skipped": 3,
        "gpu_tests.seconds": 7.5,
    }
