"""Decode with forecasts runs whole at toy size: models say what the trace says, at every horizon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import predicted_decode, step_breakdown
from bench.decode_case import Measured
from bench.harness import ResultFile, Row
from bench.models.random_geometry import RandomGeometry
from bench.predicted_engines import Bench
from bench.predicted_rows import FULL, Contender
from bench.predicted_texts import PROMPT, Texts
from bench.traces.compact import compress
from bench.traces.routers import replay_routers
from hetero_runtime.errors import BudgetError
from hetero_runtime.foresight.rows import Row as TextRow
from hetero_runtime.prediction import RouterFingerprint, read_predictor, write_predictor
from hetero_scheduler.predict import Forecast
from hetero_scheduler.predict.mamba2_block import Mamba2Sizes
from hetero_scheduler.predict.mamba2_model import GroupModel, GroupShape
from hetero_scheduler.predict.refinement import Refinement
from hetero_scheduler.trace import Trace
from tests.bench.made_up_profile import MadeUpProfile, event
from tests.bench.traces.test_compact import INFO

LAYERS, TOKENS, DECODED = 4, 6 * (PROMPT + 8), 6
KEPT = Path(predicted_decode.__file__).parent / "traces" / "kept" / "24x32-natural"


@pytest.fixture
def trace(geometry: RandomGeometry) -> Trace:
    """Of twice as many layers as the model has; every expert has another strength, a multiple of 1/16."""
    draw = np.random.default_rng(0)
    levels = np.linspace(-7.5, 0, geometry.experts) * np.ones((TOKENS, LAYERS, 1))
    logits, early = (draw.permuted(levels, axis=-1).astype(np.float16) for _ in range(2))
    topk = np.argsort(-logits, axis=-1)[..., : geometry.top_k].astype(np.int16)
    tokens = draw.integers(3, 200, TOKENS).astype(np.int32)
    return Trace(logits, topk, tokens, (PROMPT + 8) * np.arange(7), early)


def refinement(geometry: RandomGeometry) -> Refinement:
    draw = np.random.default_rng(1)
    return Refinement(
        np.ones(LAYERS, np.float32),
        draw.normal(size=(100, 4)).astype(np.float32),
        draw.normal(size=(LAYERS, geometry.experts, 4)).astype(np.float32),
        np.zeros((LAYERS, geometry.experts), np.float32),
        np.ones((LAYERS, 2), np.float32),
    )


@pytest.fixture
def files(trace: Trace, geometry: RandomGeometry, tmp_path: Path) -> list[str]:
    kept, predictor = tmp_path / "kept.trace.xz", tmp_path / "taught.safetensors"
    kept.write_bytes(compress(trace, INFO, keeps_early=True))
    sizes = Mamba2Sizes(d_model=32, state_size=8, head_dim=8)
    groups = [GroupModel(GroupShape(2, geometry.experts, geometry.top_k, sizes=sizes)) for _ in range(2)]
    write_predictor(
        predictor,
        groups,
        fingerprint=RouterFingerprint.of_trace(trace, INFO),
        notes={},
        refinement=refinement(geometry),
    )
    return [str(kept), str(predictor)]


@pytest.fixture
def words(files: list[str], geometry_words: list[str], tmp_path: Path) -> list[str]:
    words = [*files, "--checkpoint", str(tmp_path / "checkpoint"), "--device", "cpu"]
    words += ["--results", str(tmp_path), "--experts-format", "bf16", "--residencies", "0.45"]
    return [*words, "--tokens", str(DECODED), "--runs", "2", "--link", "50", *geometry_words]


@pytest.fixture
def bench(words: list[str], tmp_path: Path) -> Iterator[Bench]:
    options = predicted_decode.parse([*words, "--horizon", "layer"])
    made = predicted_decode.prepare(options, tmp_path, 0.0)
    yield made
    made.close()


def rows_in(folder: Path, name: str) -> dict[str, Row]:
    return {row.id: row for row in ResultFile.read(folder / f"predicted_decode_{name}.json").rows}


def test_routers_say_what_was_recorded(trace: Trace, geometry: RandomGeometry) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_experts=geometry.experts,
        num_experts_per_tok=geometry.top_k,
        moe_intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        norm_topk_prob=True,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    replay_routers(model, trace)
    with torch.no_grad():
        said = [
            model(torch.zeros(1, count, dtype=torch.long), output_router_logits=True).router_logits
            for count in (3, 2)
        ]
    for layer in range(2):
        heard = torch.cat([each[layer].reshape(-1, geometry.experts) for each in said])
        expected = torch.from_numpy(trace.logits[:5, layer]).float()
        assert torch.equal(heard, expected) or torch.allclose(heard, expected.softmax(-1))


def test_bench(words: list[str], tmp_path: Path) -> None:
    assert predicted_decode.main([*words, "--horizon", "auto", "layer"]) == 0
    rows = rows_in(tmp_path, "bf16")
    shares = ["predict.full_load_share_45_bf16", "predict.full_load_share_45_bf16_layer"]
    hits = ["predict.decode_hit_45_bf16", "predict.decode_hit_45_bf16_layer"]
    points = ["predict.engine_minus_sim_45_bf16", "predict.engine_minus_sim_45_bf16_layer"]
    assert set(rows) == {"predict.bound_share_45_bf16", *shares, *hits, *points}
    for share, name in zip(shares, ("step", "layer"), strict=True):
        assert rows[share].value > 0
        assert "LRU" in str(rows[share].reference)
        assert rows[share].note.startswith(f"horizon {name}; ")
        assert "load entropy" in rows[share].note
    assert 0 < rows["predict.bound_share_45_bf16"].value <= 1
    assert all(0 < rows[each].value < 100 for each in hits)
    assert "LRU" in str(rows[points[0]].reference)


def test_misses_on_the_cpu_have_rows_of_their_own(words: list[str], tmp_path: Path) -> None:
    assert predicted_decode.main([*words, "--misses", "load", "hybrid"]) == 0
    rows = rows_in(tmp_path, "bf16")
    hybrid = {name for name in rows if name.endswith("_hybrid")}
    assert hybrid == {"predict.full_load_share_45_bf16_hybrid", "predict.decode_hit_45_bf16_hybrid"}
    assert rows["predict.full_load_share_45_bf16_hybrid"].value > 0
    assert all("LRU" in str(rows[name].reference) for name in hybrid)


@pytest.mark.parametrize("horizon", ["layer", "token"])
def test_forecasts_hear_what_was_recorded(
    horizon: str, bench: Bench, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token that runs, and the next router's word on it; the engine says the recorded text besides."""
    early, tokens = list[Any](), list[int]()
    hear_early, hear_token = TextRow.observe_next, TextRow.begin_step

    def observe_next(row: TextRow, layer: int, logits: Any) -> list[Forecast]:
        early.append((layer, logits[0]))
        return hear_early(row, layer, logits)

    def begin_step(row: TextRow, token: int) -> list[Forecast]:
        tokens.append(token)
        return hear_token(row, token)

    monkeypatch.setattr(TextRow, "observe_next", observe_next)
    monkeypatch.setattr(TextRow, "begin_step", begin_step)
    assert bench.measure(Contender(0.45, horizon))
    decoded = [begin + PROMPT + i for begin in bench.texts.begins for i in range(DECODED)]
    decoded += range(PROMPT + DECODED)  # the counted text, from its first token on
    played = bench.texts.trace
    assert tokens == [int(played.tokens[i]) for i in decoded]
    assert set(tokens) <= set(trace.tokens.tolist())
    if horizon == "token":
        assert not early
        return
    assert played.early is not None
    assert [layer for layer, _ in early] == [1] * len(decoded)
    np.testing.assert_array_equal(np.stack([said for _, said in early]), played.early[decoded, 1])


def test_a_cut_predictor_has_learned_as_much_of_the_layers_that_are_left(
    bench: Bench, geometry: RandomGeometry
) -> None:
    cut, whole = read_predictor(bench.predictor).refinement, refinement(geometry)
    assert cut is not None and cut.pool is not None
    np.testing.assert_allclose(cut.head, whole.head[:2], atol=1e-2)  # kept in half precision
    assert cut.scale.shape == (2,)
    assert cut.pool.shape == (2, 2)
    assert bench.horizon(Contender(0.45, "auto")) == "step", "what the product chooses here"


def test_what_cannot_be_replayed_is_refused(
    words: list[str], trace: Trace, tmp_path: Path, geometry: RandomGeometry
) -> None:
    (tmp_path / "kept.trace.xz").write_bytes(compress(trace, INFO))
    options = predicted_decode.parse([*words, "--horizon", "step", "layer"])
    with pytest.raises(ValueError, match="would hear random weights; ask for --horizon token or step"):
        predicted_decode.prepare(options, tmp_path, 0.0)
    with pytest.raises(ValueError, match=r"token \d+ of the trace: the model has 50 tokens"):
        Texts.of(trace, tokens=4, runs=1, vocab_size=50)
    with pytest.raises(ValueError, match="6 documents of 20 tokens, and 8 are to be decoded"):
        Texts.of(trace, tokens=4, runs=7, vocab_size=300)


def test_a_model_that_ends_inside_a_group(files: list[str], geometry: RandomGeometry, tmp_path: Path) -> None:
    model = RouterFingerprint(3, geometry.experts, geometry.top_k, "")
    with pytest.raises(ValueError, match=r"3 layers; the predictor's groups end with \[2, 4\]"):
        predicted_decode.fitted(Path(files[1]), model, tmp_path)


def test_what_fails_leaves_the_rest(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that breaks while it holds the experts, a profile, and one for which no time is left."""
    of_texts, asked = Bench._decode_all, list[Contender]()

    def decode_all(self: Bench, contender: Contender, *others: Any) -> Measured:
        asked.append(contender)
        if contender == Contender(0.45):
            raise RuntimeError("broken on purpose")
        return of_texts(self, contender, *others)

    monkeypatch.setattr(Bench, "_decode_all", decode_all)
    assert predicted_decode.main([*words, "--residencies", "0.45", "0.25"]) == 1
    assert asked == [FULL, *(Contender(share, each) for share in (0.45, 0.25) for each in ("auto", None))]
    rows = rows_in(tmp_path, "bf16")
    assert rows["predict.full_load_share_45_bf16"].reference is None
    assert "LRU" in str(rows["predict.full_load_share_25_bf16"].reference)
    assert "FAILED: lru at 45 %" in capsys.readouterr().out
    assert predicted_decode.main([*words, "--seconds", "0"]) == 3
    assert "not begun: full load" in capsys.readouterr().out


def test_an_engine_that_cannot_be_costs_no_experts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[object]()
    monkeypatch.setattr(Bench, "_made", lambda *arguments: made.append(arguments))
    with pytest.raises(BudgetError, match="residency"):
        bench.measure(Contender(0.001))
    assert not made


PROFILE = MadeUpProfile(
    [
        event(name, 10 * i, 10 * i + 6)
        for i, name in enumerate(4 * ["up_kernel", "_forecast_kernel", "_jsd_kernel"])
    ]
)
"""Four steps of one expert kernel and two of foresight."""


def test_overhead_is_of_the_step_that_nobody_looks_at(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_breakdown, "profile", PROFILE)
    monkeypatch.setattr(Bench, "profiles", lambda *_: True)
    assert bench.measure(Contender(0.45, "layer"))
    (outcome,) = bench.done.values()
    (row,) = [row for row in bench.rows() if "overhead" in row.id]
    assert row.id == "predict.overhead_share_bf16_layer"
    step_us = 1e6 / outcome.measured.tok_s
    assert row.value == pytest.approx(4 * (6 + 6) / DECODED / step_us)
    assert "predictor 4, tables 4" in row.note


def test_a_kept_trace_in_fp8(tmp_path: Path) -> None:
    """Half the layers of a narrow model, at toy width: the engine hits what the simulator hits."""
    sizes = {"layers": 12, "hidden": 128, "intermediate": 128, "heads": 4, "kv-heads": 2, "head-dim": 16}
    sizes |= {"experts": 32, "top-k": 4, "vocab-size": 6144}
    words = [str(KEPT / "sampled.trace.xz"), str(KEPT / "predictor.safetensors"), "--device", "cpu"]
    words += [f"--{name}={size}" for name, size in sizes.items()]
    words += ["--checkpoint", str(tmp_path / "checkpoint"), "--results", str(tmp_path), "--link", "50"]
    assert predicted_decode.main([*words, "--residencies", "0.45", "--tokens", "16", "--runs", "1"]) == 0
    rows = rows_in(tmp_path, "fp8")
    assert rows["predict.full_load_share_45_fp8"].target == ">=0.80"
    assert rows["predict.decode_hit_45_fp8"].value > 50
    assert rows["predict.engine_minus_sim_45"].is_met, "on what prompts left behind, the same decisions"
