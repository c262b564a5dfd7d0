"""The bench of quantised experts, on two short windows."""

from __future__ import annotations

import pytest

from bench.quantized_bundled import measure


def test_the_bank_shrinks_and_the_text_stays_as_likely() -> None:
    windows = [tuple(range(100, 124)), tuple(range(300, 324))]
    plain = {row.id: row.value for row in measure("checkpoint", windows)}
    rows = {row.id: row.value for row in measure("int8", windows, plain["quantized.checkpoint.nats"])}
    assert rows.keys() == {f"quantized.int8.{name}" for name in ("nats", "excess", "bank", "weight_error")}
    assert rows["quantized.int8.bank"] < 0.6 * plain["quantized.checkpoint.bank"]
    assert abs(rows["quantized.int8.excess"]) < 0.05 * plain["quantized.checkpoint.nats"]
    assert rows["quantized.int8.nats"] - rows["quantized.int8.excess"] == pytest.approx(
        plain["quantized.checkpoint.nats"]
    )
    assert 0 < rows["quantized.int8.weight_error"] < 0.012
