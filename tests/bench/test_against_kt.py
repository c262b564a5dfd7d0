"""The bench beside kt-kernel: its work, its check before a time is taken, its rows."""

from __future__ import annotations

from argparse import Namespace

import numpy as np
import pytest
import torch

from bench import against_kt
from bench.against_kt import Call, Layer, Side, compare
from bench.cpu_expert_records import layer_reference
from bench.harness import Row


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"HIDDEN": 64, "INTERMEDIATE": 32, "NUM_EXPERTS": 16, "SETTLE_S": 0.0}.items():
        monkeypatch.setattr(against_kt, name, size)
    monkeypatch.setattr(against_kt, "CALLS", {1: 2, 5: 1})


def side_of(name: str, layer: Layer, *, factor: float = 1.0) -> Side:
    def run(call: Call) -> torch.Tensor:
        routing = call.routing(layer.form.record_bytes)
        numbers = (routing.offsets // layer.form.record_bytes).tolist()
        plain = [layer.bank.reshape(16, -1)[number] for number in numbers]
        total = layer_reference(call.hidden.float().numpy(), plain, layer.form, routing)
        return torch.from_numpy(factor * total).bfloat16()

    return Side(name, run)


def test_a_routing_says_what_the_call_does() -> None:
    call = Call.of(9, np.random.default_rng(0), num_experts=12)
    assert all(len(set(row)) == against_kt.TOP_K and max(row) < 12 for row in call.experts.tolist())
    np.testing.assert_allclose(call.weights.sum(1), 1, rtol=1e-6)
    routing, pairs = call.routing(4096), set()
    for i, offset in enumerate(routing.offsets.tolist()):
        for j in range(routing.bounds[i], routing.bounds[i + 1]):
            pairs.add((int(routing.tokens[j]), offset // 4096, float(routing.weights[j])))
    assert pairs == {
        (token, int(expert), float(weight))
        for token in range(9)
        for expert, weight in zip(call.experts[token], call.weights[token], strict=True)
    }


def test_rows_are_ratios_with_both_errors() -> None:
    layer = Layer.of("int4")
    rows = compare(layer, side_of("ours", layer), side_of("theirs", layer))
    assert [(row.id, row.target) for row in rows] == [
        ("cpu.vs_kt_q1_int4", ">=1.2"),
        ("cpu.vs_kt_q5_int4", ">=1.0"),
    ]
    assert "theirs, same run" in str(rows[0].reference)
    assert "GB/s" in rows[0].note and "errors" in rows[0].note


def test_a_wrong_sum_is_not_timed() -> None:
    layer = Layer.of("bf16")
    with pytest.raises(AssertionError, match=r"theirs, bf16: relative error 5\.0e-01"):
        compare(layer, side_of("ours", layer), side_of("theirs", layer, factor=0.5))


def test_older_kernels_take_the_place_of_kt_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    options = Namespace(formats=["int8"], tokens=[5])
    against_kt.against_older("hetero_cpu_kernels", (0,), options)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("cpu.vs_older_q5_int8 ") and "hetero_cpu_kernels, same run" in line


class NoPool:
    """In the place of kt-kernel's."""

    def __init__(self, cpus: tuple[int, ...]) -> None:
        self.spare_cpus = set(cpus)

    def close(self) -> None:
        pass


def test_rows_are_written_after_each_format(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_row(name: str, *_pools: object) -> list[Row]:
        if name == "int8":
            raise ValueError("no such kernel")
        return [Row(id=f"kt.{name}", value=1.0, unit="times faster")]

    monkeypatch.setattr(against_kt, "KtPool", NoPool)
    monkeypatch.setattr(against_kt, "compare_format", one_row)
    rows, written = [Row(id="kt.alone", value=1.0, unit="ratio")], list[list[str]]()
    against_kt.against_kt((0,), rows, lambda: written.append([row.id for row in rows]))
    assert written == [
        ["kt.alone", "kt.bf16"],
        ["kt.alone", "kt.bf16"],
        ["kt.alone", "kt.bf16", "kt.fp8"],
        ["kt.alone", "kt.bf16", "kt.fp8", "kt.int4"],
    ]
