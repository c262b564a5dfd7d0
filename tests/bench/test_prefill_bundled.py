"""The bench of popularity, on two short prompts."""

from __future__ import annotations

from bench.prefill_bundled import VARIANTS, rows_of


def test_what_is_fetched_ahead_is_hit() -> None:
    windows = [tuple(range(100, 180)), tuple(range(300, 380))]
    rows = {row.id: row for row in rows_of(0.25, 64, windows)}
    assert rows.keys() == {f"prefill.bundled_{name}_hit_25_of_64" for name in VARIANTS}
    plain = rows["prefill.bundled_none_hit_25_of_64"]
    assert ", 0 of them ahead, 0.0 for nothing" in plain.note
    for name in ("counted", "profiled"):
        row = rows[f"prefill.bundled_{name}_hit_25_of_64"]
        assert row.value > plain.value + 10
        assert "nothing fetched ahead" in (row.reference or "")
