"""Table 4 runs whole at toy size on the CPU: every step of both modes, and Accelerate beside them. Captured
steps run uncaptured, their kernels interpreted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import vl_decode, vl_steps
from bench.harness import ResultFile
from bench.vl_steps import SETTLING_TOKENS, STEPS, Measured, Setup
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
FEW = {"side": 1, "tokens": 2, "runs": 1, "lessons": 3, "minutes": 5, "accelerate-tokens": 1, "settling": 0}
EPOCHS = 1
MODES = ("offload", "hybrid")
TIMES = {
    f"vl.{name}_{phase}_ms"
    for mode in MODES
    for name in (*(f"table4_{mode}_{step}" for step in STEPS), f"captured_base_{mode}")
    for phase in ("prefill", "decode")
}
PEER = {"vl.accelerate_prefill_ms", "vl.accelerate_decode_ms"}
RATIOS = {
    f"vl.{name}_{mode}" for name in ("speedup", "captured_speedup", "accelerate_speedup") for mode in MODES
}
COSTS = {"vl.compress_ms", "vl.predict_ms_layer"}


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands in where there is no GPU")
def test_bench(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps_on_cpu(monkeypatch)
    assert vl_decode.main([*words, f"--results={tmp_path}"]) == 0
    rows = rows_in(tmp_path)
    assert set(rows) == TIMES | PEER | RATIOS | COSTS
    assert all(row.value > 0 for row in rows.values())
    speedup, captured = rows["vl.speedup_offload"], rows["vl.captured_speedup_offload"]
    assert (speedup.target, captured.target) == (">=2.7", None)
    assert "eager passes, on demand" in speedup.reference
    assert "captured as the whole is" in captured.reference
    assert "load entropy" in speedup.note
    for mode, step, pinned in (("offload", "base", 0), ("hybrid", "orchestration", 1)):
        assert rows[f"vl.table4_{mode}_{step}_prefill_ms"].note.startswith(f"{pinned} layers pinned")
    whole = {mode: rows[f"vl.table4_{mode}_orchestration_prefill_ms"].note for mode in MODES}
    assert whole["offload"].endswith("steps without forecasts, still trying")
    assert whole["hybrid"].endswith("steps without forecasts, 0% of misses for the CPU, still trying")


def test_settling_ends_when_all_captured_steps_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    orchestrator: Any = SimpleNamespace(is_settled=False)

    def ask(_engine: Any, _mosaic: Any, tokens: int, *, seed: int) -> tuple[float, float]:
        asked.append(tokens)
        orchestrator.is_settled = len(asked) >= 3
        return 10.0, 1.0

    memory, phase = SimpleNamespace(pinned_prefix=1), canned(10).prefill
    stats = SimpleNamespace(prefill=phase, decode=phase, compression=SimpleNamespace(prompts=0, seconds=0.0))
    engine = SimpleNamespace(stats=lambda: stats, check=lambda: None, config=SimpleNamespace(memory=memory))
    monkeypatch.setattr(vl_steps, "Engine", lambda _parts: engine)
    monkeypatch.setattr(vl_steps, "_ask", ask)
    parts: Any = SimpleNamespace(orchestrator=orchestrator)
    question: Any = None
    vl_steps.measure(parts, [question] * 2, tokens=5, settling=12)
    assert asked == [5, SETTLING_TOKENS, SETTLING_TOKENS, 5]


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
        found="",
    )


def test_parts_that_fail_leave_the_rows_of_others(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = RuntimeError("no room")
    told = iter([canned(180), canned(30), canned(60), *[failed] * 3, canned(150), *[failed] * 3])

    def measure(*_: Any, **__: Any) -> Measured:
        # what was measured before is on the disk by now
        found = next(told)
        if isinstance(found, Exception):
            assert "vl.captured_base_offload_prefill_ms" in rows_in(tmp_path)
            raise found
        return found

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of order")

    for name, stand_in in (("Bank", _NoBank), ("calibrate", fail), ("measure_accelerate", fail)):
        monkeypatch.setattr(vl_decode, name, stand_in)
    monkeypatch.setattr(Setup, "config", lambda _setup, _step: None)
    monkeypatch.setattr(vl_decode, "measure", measure)
    assert vl_decode.main([*words, f"--results={tmp_path}"]) == 8
    assert "failed: calibration, hybrid base, hybrid orchestration" in capsys.readouterr().out
    rows = rows_in(tmp_path)
    assert rows["vl.speedup_offload"].value == pytest.approx((180 + 2 * 10) / (30 + 2 * 10))
    assert rows["vl.captured_speedup_offload"].value == pytest.approx((60 + 2 * 10) / (30 + 2 * 10))
    assert "vl.table4_offload_compression_decode_ms" in rows
    assert "vl.table4_offload_prediction_prefill_ms" not in rows
    assert not [name for name in rows if "hybrid" in name or "accelerate" in name]


def test_no_part_is_begun_that_would_end_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(vl_decode.time, "monotonic", lambda: now[0])
    progress = vl_decode.Progress()
    assert progress.has_time(10)
    now[0] += 4
    progress.part_ends()
    assert progress.has_time(8) and not progress.has_time(7.5)
    assert progress.has_time(None)
