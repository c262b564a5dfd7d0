"""Table 4 runs whole at toy size on the CPU: every step of both modes, and Accelerate beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import vl_decode
from bench.harness import ResultFile
from bench.vl_steps import STEPS, Measured
from hetero_gpu import CacheStats
from hetero_runtime.routing import RoutingStats
from hetero_runtime.stats import PhaseStats
from hetero_scheduler.predict.lookahead_training import LookaheadOptions
from tests.runtime.steps_on_cpu import steps_on_cpu

SIZES = {
    "layers": 3,
    "hidden": 256,
    "heads": 8,
    "head-dim": 32,
    "intermediate": 24,
    "vision-hidden": 192,
    "vision-heads": 6,
    "vision-intermediate": 384,
    "patch": 8,
}
FEW = {"side": 1, "tokens": 2, "runs": 1, "lessons": 3, "minutes": 5, "accelerate-tokens": 1}
EPOCHS = 1
MODES = ("offload", "hybrid")
"""What a CPU can run."""
CELLS = {
    f"vl.table4_{mode}_{step}_{phase}_ms"
    for mode in MODES
    for step in STEPS
    for phase in ("prefill", "decode")
}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    checkpoint = tmp_path_factory.mktemp("wide") / "checkpoint"
    numbers = SIZES | FEW | {"residency": 0.6}
    words = [f"--{name}={number}" for name, number in numbers.items()]
    return [*words, "--device=cpu", f"--checkpoint={checkpoint}"]


def rows_in(folder: Path) -> dict[str, Any]:
    return {row.id: row for row in ResultFile.read(folder / "vl_decode.json").rows}


@pytest.fixture(autouse=True)
def _few_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the predictor learns does not depend on how busy the machine is."""
    monkeypatch.setattr(vl_decode, "LookaheadOptions", partial(LookaheadOptions, epochs=EPOCHS))


def test_bench(words: list[str], tmp_path: Path) -> None:
    assert vl_decode.main([*words, f"--results={tmp_path}", "--modes", *MODES]) == 0
    rows = rows_in(tmp_path)
    peer = {"vl.accelerate_prefill_ms", "vl.accelerate_decode_ms"}
    ratios = {f"vl.{name}_{mode}" for name in ("speedup", "accelerate_speedup") for mode in MODES}
    assert set(rows) == CELLS | peer | ratios | {"vl.compress_ms", "vl.predict_ms_layer"}
    assert all(row.value > 0 for row in rows.values())
    assert rows["vl.speedup_offload"].target == ">=2.7"
    assert "load entropy" in rows["vl.speedup_offload"].note
    for mode, step, pinned in (("offload", "base", 0), ("hybrid", "orchestration", 1)):
        assert rows[f"vl.table4_{mode}_{step}_prefill_ms"].note.startswith(f"{pinned} layers pinned")


@pytest.mark.slow
def test_the_captured_step_has_all_steps_too(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("the interpreter stands in where there is no GPU")
    steps_on_cpu(monkeypatch)
    asked = [*words, f"--results={tmp_path}", "--accelerate-tokens=0", "--modes", "offload", "graph"]
    assert vl_decode.main(asked) == 0
    rows = rows_in(tmp_path)
    assert {f"vl.table4_graph_{step}_decode_ms" for step in STEPS} <= set(rows)
    assert rows["vl.speedup_graph"].value > 0
    assert rows["vl.table4_graph_orchestration_prefill_ms"].note.startswith("1 layers pinned")


class _NoBank:
    @contextmanager
    def parts(self, _config: Any) -> Iterator[None]:
        yield None

    def close(self) -> None: ...


def canned(prefill_ms: float) -> Measured:
    phase = PhaseStats(1, 1, 1.0, 0.5, CacheStats(), RoutingStats())
    return Measured(
        all_prefill_ms=(prefill_ms,),
        all_decode_ms=(10.0,),
        prefill=phase,
        decode=phase,
        compress_ms=5.0,
        pinned=1,
    )


def test_parts_that_fail_leave_the_rows_of_others(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = RuntimeError("no room")
    told = iter([canned(180), canned(150), failed, canned(30), *map(canned, (120, 90, 40, 20))])

    def measure(*_: Any, **__: Any) -> Measured:
        # what was measured before is on the disk by now
        found = next(told)
        if isinstance(found, Exception):
            assert "vl.table4_offload_compression_prefill_ms" in rows_in(tmp_path)
            raise found
        return found

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of order")

    for name, stand_in in (("Bank", _NoBank), ("calibrate", fail), ("measure_accelerate", fail)):
        monkeypatch.setattr(vl_decode, name, stand_in)
    monkeypatch.setattr(vl_decode, "measure", measure)
    assert vl_decode.main([*words, f"--results={tmp_path}", "--modes", "offload", "graph"]) == 3
    assert "failed: calibration, offload prediction, accelerate" in capsys.readouterr().out
    rows = rows_in(tmp_path)
    assert rows["vl.speedup_offload"].value == pytest.approx((180 + 2 * 10) / (30 + 2 * 10))
    assert rows["vl.speedup_graph"].value == pytest.approx((180 + 2 * 10) / (20 + 2 * 10))
    assert "vl.table4_graph_orchestration_decode_ms" in rows
    assert "vl.table4_offload_prediction_prefill_ms" not in rows
    assert not [name for name in rows if "hybrid" in name or "accelerate" in name]
