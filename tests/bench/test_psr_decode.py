"""The policies' bench runs whole at toy size: same text for all, decisions those of the policy's own code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bench import psr_decode
from bench.decode_case import Case
from bench.harness import ResultFile
from bench.models.random_checkpoint import write_checkpoint
from bench.models.random_geometry import MoonlightGeometry, OlmoeGeometry, RandomGeometry
from bench.psr_case import PROMPT, Run, Steps, Stretch, numbers_of, recite_in, words_of
from bench.psr_decode import Model
from bench.psr_recording import Recording, divided, recorded
from bench.psr_rows import Key, Link, rows_of
from bench.slow_link import ExtraBytes, LinkRates
from bench.traces.bundled import TEXT
from bench.traces.laid_over import for_sigmoid, laid_over, sigmoid_scores, whole_documents
from bench.traces.routers import Recital, recite
from hetero_gpu import CacheStats
from hetero_gpu.tables import MappedBank
from hetero_runtime.calibration.file import read_calibration
from hetero_runtime.generation import SamplingParams
from hetero_runtime.hf.graph_sequences import GraphSequences, StepPlan
from hetero_runtime.hf.router_hooks import routed_layers
from hetero_runtime.hf.small_ops import install_small_ops
from hetero_runtime.routing import Routing, RoutingStats
from hetero_runtime.routing.captured import CapturedRouting
from hetero_runtime.trace import write_trace
from hetero_scheduler.routing import LogicalCache, Shape, make_routing_policy
from hetero_scheduler.trace import Trace
from tests.bench.toy_geometry import TINY
from tests.bench.traces.test_compact import INFO
from tests.runtime.steps_on_cpu import steps_on_cpu

SIZES = asdict(TINY) | {"kv_heads": 4, "experts": 16, "layers": 3}
OLMOE = OlmoeGeometry(**SIZES)
MOONLIGHT = MoonlightGeometry(**SIZES, shared=2, rotated=8, latent=32, dense=96)
STRETCH = Stretch(settle=2, tokens=6)
DOCUMENTS = 6


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(psr_decode.MODELS, "olmoe", Model(OLMOE, False, STRETCH.tokens, 2))
    monkeypatch.setitem(psr_decode.MODELS, "moonlight", Model(MOONLIGHT, True, STRETCH.tokens, 2))


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Of two layers, with early routers that are often right."""
    draw, num_tokens = np.random.default_rng(0), DOCUMENTS * (STRETCH.window + 3)
    logits = draw.normal(size=(num_tokens, 2, 16))
    logits[1:] += logits[:-1] / 2
    early = logits + draw.normal(size=logits.shape) / 3
    topk = np.argsort(-logits, axis=-1)[..., :2].astype(np.int16)
    bounds = np.arange(DOCUMENTS + 1) * (STRETCH.window + 3)
    tokens = draw.integers(3, 40, num_tokens).astype(np.int32)
    return Trace(logits.astype(np.float16), topk, tokens, bounds, early.astype(np.float16))


@pytest.fixture(scope="module")
def file(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "routing.safetensors"
    write_trace(path, trace, INFO)
    return path


def words(folder: Path, file: Path, model: str) -> list[str]:
    said = ["--model", model, "--checkpoint", str(folder / "checkpoint"), "--trace", str(file)]
    return [*said, "--device", "cpu", "--settle", "2", "--results", str(folder)]


@pytest.mark.parametrize("model", ["olmoe", "moonlight"])
def test_bench(model: str, file: Path, tmp_path: Path) -> None:
    percents = [50, 25] if model == "olmoe" else [25]
    residencies = ["--residencies", *(str(percent / 100) for percent in percents)]
    assert psr_decode.main([*words(tmp_path, file, model), *residencies]) == 0
    rows = {row.id: row for row in ResultFile.read(tmp_path / "psr_decode.json").rows}
    end = "" if model == "olmoe" else "_moonlight"
    for percent in percents:
        name = f"{percent}{end}"
        for ratio in ("vs_lru", "vs_cacheprior", "p99_vs_best"):
            assert rows[f"psr.{ratio}_{name}"].value > 0
        assert "load entropy" in rows[f"psr.vs_lru_{name}"].note
        copies = {policy: rows[f"psr.copies_{policy}_{name}"].value for policy in ("lru", "cache_prior")}
        assert copies["cache_prior"] < copies["lru"], "a bonus for what is resident, and nothing else differs"
        demanded = rows[f"psr.demand_copies_cache_prior_{name}"].value
        assert demanded == copies["cache_prior"], "nothing is fetched ahead"
        assert 0 < rows[f"psr.hit_psr_{name}"].value < 100
    assert len(rows) == len(percents) * (2 * 3 + 4 * 5)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["olmoe", "moonlight"])
def test_captured_steps_of_the_whole_bench(
    model: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefetches over a link of the test, kernels in the interpreter."""
    steps_on_cpu(monkeypatch)
    monkeypatch.setattr(psr_decode, "Case", lambda policy, residency, _: Case(policy, residency, "graph"))
    said = [*words(tmp_path, file, model), "--residencies", "0.5", "--runs", "1", "--tokens", "3"]
    assert psr_decode.main([*said, "--policies", "cache_prior", "psr"]) == 0
    rows = {row.id: row.value for row in ResultFile.read(tmp_path / "psr_decode.json").rows}
    end = "50" if model == "olmoe" else "50_moonlight"
    assert rows[f"psr.copies_psr_{end}"] > rows[f"psr.demand_copies_psr_{end}"] >= 0, "some are prefetched"


def test_both_models_stand_in_one_file(file: Path, tmp_path: Path) -> None:
    for model in ("olmoe", "moonlight"):
        checkpoint = tmp_path / model
        said = [*words(tmp_path, file, model), "--checkpoint", str(checkpoint), "--runs", "1"]
        assert psr_decode.main([*said, "--residencies", "0.5", "--policies", "cache_prior", "psr"]) == 0
    rows = {row.id for row in ResultFile.read(tmp_path / "psr_decode.json").rows}
    assert {f"psr.vs_cacheprior_50{end}_psr" for end in ("", "_moonlight")} <= rows
    assert {f"psr.p99_ms_psr_50{end}" for end in ("", "_moonlight")} <= rows


def test_no_engine_is_begun_without_time(file: Path, tmp_path: Path) -> None:
    assert psr_decode.main([*words(tmp_path, file, "olmoe"), "--seconds", "0", "--runs", "1"]) == 0
    assert not (tmp_path / "psr_decode.json").exists()


def test_a_text_is_recorded_where_no_trace_is_given() -> None:
    trace, source = recorded(None, TEXT, 40, most=4)
    assert trace.bounds.tolist() == [0, 40, 80, 120, 160]
    assert trace.logits.shape == (160, 8, 64)
    assert trace.early is not None
    assert trace.early[:, 1:].any(axis=-1).all()
    assert source == "routing of the bundled model, teacher-forced"


def test_a_policy_that_fails_leaves_the_others(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(policy: str, residency: float, calibration: Path) -> dict[str, Any]:
        if policy == "cache_prior":
            raise RuntimeError("broken on purpose")
        return words_of(policy, residency, calibration)

    monkeypatch.setattr(psr_decode, "words_of", broken)
    assert psr_decode.main([*words(tmp_path, file, "olmoe"), "--residencies", "0.5", "--runs", "1"]) == 1
    rows = {row.id for row in ResultFile.read(tmp_path / "psr_decode.json").rows}
    assert "psr.vs_lru_50" in rows
    assert not any("prior" in row or "p99_vs_best" in row for row in rows)


def test_the_slow_link_has_rows_of_its_own(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MappedBank, "of", lambda records, size, _: MappedBank(records.data_ptr(), size))
    monkeypatch.setattr(LinkRates, "slowed_to", lambda *_: ExtraBytes(64, 64))
    bench = toy_bench(file, tmp_path)
    bench.is_slowed = True
    bench.measure("lru", 0.5)
    bench.measure("psr", 0.5)
    bench.close()
    rows = rows_of(bench.done, model="olmoe", rates=bench.rates, note="toys")
    assert {"psr.vs_lru_50_psr", "psr.vs_lru_50_25gbs_psr"} <= {row.id for row in rows}
    (slow,) = [row for row in rows if row.id == "psr.vs_lru_50_25gbs_psr"]
    assert bench.rates is not None
    assert f"own: {bench.rates.load:.1f} GB/s loaded by the device" in slow.note
    own, other = (bench.done[Key("psr", 0.5, link)] for link in Link)
    assert own.logical == other.logical, "the same text, the same decisions"


def toy_bench(file: Path, folder: Path, model: str = "olmoe") -> psr_decode.Bench:
    options = psr_decode.parse(words(folder, file, model))
    return psr_decode.prepare(options, psr_decode.MODELS[model], folder, 0.0)


# ---- what is decided is what the policy decides of the recording


def decided(bench: psr_decode.Bench, routing: LogicalCache) -> RoutingStats:
    """By the policy's own code, of the tokens whose decisions the bench counts."""
    total = RoutingStats()
    for begin in bench.recording.texts:
        routing.reset()
        rows = slice(begin, begin + STRETCH.window - 1)
        total += decided_of(routing, bench.recording.trace, rows, counted=PROMPT + STRETCH.settle)
    return total


Hearing = Callable[[torch.Tensor], torch.Tensor]


def by_softmax(logits: torch.Tensor) -> torch.Tensor:
    """What a bf16 model compares."""
    return logits.bfloat16().float()


def by_sigmoid(logits: torch.Tensor) -> torch.Tensor:
    """Whatever the model's type."""
    return logits.float().sigmoid()


def decided_of(
    routing: LogicalCache, trace: Trace, rows: slice, *, counted: int, hearing: Hearing = by_softmax
) -> RoutingStats:
    """Of `rows` of the trace, without the first `counted`."""
    assert trace.early is not None
    scores, guesses = (hearing(torch.from_numpy(each[rows])) for each in (trace.logits, trace.early))
    made = routing.select(
        scores.numpy(),
        scores.topk(routing.shape.top_k).indices.numpy(),
        trace.tokens[rows],
        first_layer=0,
        guesses=guesses.numpy(),
    )
    counts = (made.inserted, made.demanded, made.deviating)
    return RoutingStats(*(int(each[counted:].sum()) for each in counts))


def logical_cache(policy: str, bench: psr_decode.Bench, capacity: int) -> LogicalCache:
    calibration = read_calibration(bench.calibration).calibration
    made = make_routing_policy(policy, bonus=0.2)
    return LogicalCache(made, Shape(3, 16, 2), capacity=capacity, calibration=calibration)


@pytest.mark.parametrize("policy", ["cache_prior", "psr"])
def test_engines_decide_as_the_recording_makes_the_policy_decide(
    policy: str, file: Path, tmp_path: Path
) -> None:
    bench = toy_bench(file, tmp_path)
    bench.measure(policy, 0.5)
    bench.close()
    (steps,) = bench.done.values()
    expected = decided(bench, logical_cache(policy, bench, 8))
    assert sum((run.routing for run in steps.runs), RoutingStats()) == expected
    assert expected.demanded > 0
    assert all(len(run.steps_ms) == STRETCH.tokens for run in steps.runs)


@pytest.mark.parametrize(("name", "hearing"), [("olmoe", by_softmax), ("moonlight", by_sigmoid)])
def test_a_captured_step_decides_so_too(name: str, hearing: Hearing, file: Path, tmp_path: Path) -> None:
    """Kernels run in the interpreter, and what is captured runs again."""
    bench = toy_bench(file, tmp_path, name)
    model = AutoModelForCausalLM.from_pretrained(bench.plan.checkpoint, dtype=torch.bfloat16).eval()
    calibration = read_calibration(bench.calibration).calibration
    policy = make_routing_policy("psr", bonus=0.2)
    routing = Routing(policy, Shape(3, 16, 2), capacity=4, calibration=calibration)
    active = torch.ones(1, dtype=torch.bool)
    captured = CapturedRouting(routing, active=active, vocab_size=model.config.vocab_size)
    sequences = GraphSequences(model, active=active, max_length=64, capture=lambda work: work, texts=captured)
    captured.attach(model, sequences.tokens)
    parts: Any = SimpleNamespace(
        model=model, device=torch.device("cpu"), routing=routing, sequences=sequences
    )
    recital = recite_in(parts, bench.recording.trace)
    begin, tokens = next(iter(bench.recording.texts.items()))
    rows = slice(begin, begin + PROMPT + 6)
    cache = logical_cache("psr", bench, 4)
    expected = decided_of(cache, bench.recording.trace, rows, counted=PROMPT, hearing=hearing)
    for _ in range(2):  # as for the slower link, the second time behind a text that nobody has taken away
        sequences.capture(prefill=nullcontext, decode=lambda _: captured.uncounted())
        before = routing.device_stats()
        recital.seek(begin)
        assert say(sequences, tokens[:PROMPT], 6) == tokens[PROMPT : PROMPT + 7]
        assert routing.device_stats() - before == expected


def say(sequences: GraphSequences, prompt: list[int], num_steps: int) -> list[int]:
    """Greedy tokens after `prompt`, in the row of the last text, which is given back now, as engines do."""
    if not sequences._free:
        sequences.give_back(0)
    row, greedy = sequences.take_row(), SamplingParams(temperature=0.0)
    said = [sequences.first_token(row, torch.tensor(prompt), {}, params=greedy, uniform=0.0)]
    for _ in range(num_steps):
        ((token,),) = sequences.submit(StepPlan([[True]], None)).wait()
        said.append(token)
    return said


@pytest.mark.parametrize("geometry", [OLMOE, MOONLIGHT], ids=["softmax", "sigmoid"])
def test_routers_of_one_launch_say_what_others_say(
    geometry: RandomGeometry, trace: Trace, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, geometry)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    whole, hidden = laid_over(trace, layers=3, top_k=2), torch.randn(1, geometry.hidden).bfloat16()
    router = routed_layers(model)[0].router

    def said() -> tuple[torch.Tensor, ...]:
        recite(model, Recital(whole, num_layers=3, device=torch.device("cpu"), asks_early=False))
        heard: tuple[torch.Tensor, ...] = router(hidden)
        return heard

    _, weights, experts = said()
    for layer in routed_layers(model):
        del layer.router.forward
    assert install_small_ops(model).num_routers == 3
    logits, *one_launch = said()
    assert torch.equal(logits, torch.from_numpy(whole.logits[:1, 0]).float())
    assert torch.equal(one_launch[1].sort().values, experts.sort().values)
    torch.testing.assert_close(one_launch[0].sort().values, weights.sort().values, rtol=2**-7, atol=1e-5)


# ---- laid over


def test_layers_beyond_the_trace_say_the_same_again(trace: Trace) -> None:
    whole = laid_over(trace, layers=3, top_k=4)
    assert trace.early is not None
    assert whole.early is not None
    assert np.array_equal(whole.logits[:, 2], trace.logits[:, 1])
    assert np.array_equal(whole.early[:, 1], trace.early[:, 1])
    assert np.array_equal(whole.early[:, 2], trace.early[:, 1]), "what was really said early"
    assert np.array_equal(whole.topk[:, 0, :2], trace.topk[:, 0])
    least = np.take_along_axis(whole.logits[:, 1], whole.topk[:, 1, 3:].astype(np.int64), axis=-1)
    assert ((whole.logits[:, 1] >= least).sum(axis=-1) >= 4).all()


def test_sigmoid_scores_lie_as_logits_lay(trace: Trace) -> None:
    scores = sigmoid_scores(for_sigmoid(trace)).logits.astype(np.float64)
    logits = trace.logits.astype(np.float64)
    span = logits.max(axis=-1, keepdims=True) - logits.min(axis=-1, keepdims=True)
    expected = 0.01 + 0.98 * (logits - logits.min(axis=-1, keepdims=True)) / span
    assert np.abs(scores - expected).max() < 2e-3


def test_a_trace_without_early_routers_is_refused(trace: Trace) -> None:
    with pytest.raises(ValueError, match="when they are asked early"):
        laid_over(replace(trace, early=None), layers=3, top_k=2)
    with pytest.raises(ValueError, match="no document of the trace has 99 tokens"):
        whole_documents(trace, 99)


def test_too_few_documents_are_refused(trace: Trace) -> None:
    with pytest.raises(ValueError, match="6 documents of 31 tokens for 6 runs and calibration"):
        divided(Recording(trace, {}, "toys"), num_runs=6)


# ---- rows


def test_percentiles_and_shares() -> None:
    fast = Run([1.0] * 99 + [5.0], CacheStats(required=800, hits=600, misses=100, loads=100), RoutingStats())
    slow = replace(
        fast, steps_ms=[3.0] * 100, cache=CacheStats(required=800, hits=200, late=80, loads=80, prefetches=80)
    )
    steps = Steps((fast, slow, slow), pairs=8)
    assert (steps.mean_ms, steps.p50_ms) == (3.0, 3.0)
    assert steps.p99_ms == pytest.approx(3.0, abs=1e-9)
    assert steps.hit_rate == pytest.approx(1000 / 2400)
    assert steps.copies == pytest.approx(260 / 300), "prefetches are loads too"
    assert steps.demand_copies == pytest.approx(100 / 300)
    assert steps.late == pytest.approx(160 / 300)


def test_targets_are_of_the_papers_ratios_alone() -> None:
    run = Run([2.0, 2.0], CacheStats(required=16, hits=8), RoutingStats(inserted=4, demanded=2))
    done = {
        Key(policy, 0.5, Link.OWN): Steps((replace(run, steps_ms=[ms, ms]),), pairs=8)
        for policy, ms in (("lru", 6.0), ("cache_prior", 3.0), ("paper", 2.0), ("psr", 2.5))
    }
    rows = {row.id: row for row in rows_of(done, model="moonlight", rates=None, note="toys")}
    assert {row.id: (row.value, row.target) for row in rows.values() if row.target} == {
        "psr.vs_lru_50_moonlight": (3.0, ">=2.2"),
        "psr.vs_cacheprior_50_moonlight": (1.5, ">=1.25"),
        "psr.p99_vs_best_50_moonlight": (pytest.approx(2 / 3), "<=1.0"),
    }
    assert rows["psr.vs_cacheprior_50_moonlight_psr"].value == 1.2
    assert "copies per token 3.0" in rows["psr.copies_psr_50_moonlight"].note


def test_other_numbers_have_rows_of_their_own() -> None:
    run = Run([2.0, 2.0], CacheStats(required=16, hits=8), RoutingStats(inserted=4, demanded=2))
    done = {
        Key(policy, 0.5, Link.OWN): Steps((replace(run, steps_ms=[ms, ms]),), pairs=8)
        for policy, ms in (("cache_prior", 3.0), ("psr", 2.0), ("psr:0.3:1:2", 1.5))
    }
    rows = {row.id: row.value for row in rows_of(done, model="olmoe", rates=None, note="toys")}
    assert rows["psr.vs_cacheprior_50_psr"] == 1.5
    assert rows["psr.vs_cacheprior_50_psr_0_3_1_2"] == 2.0
    assert rows["psr.p50_ms_psr_0_3_1_2_50"] == 1.5
    assert numbers_of("psr:0.3:1:2") == {"bonus": 0.3, "insertions": 1, "window": 2}
    assert numbers_of("psr") == numbers_of("lru") == {}
    calibration = Path("calibration")
    assert words_of("paper", 0.5, calibration) == words_of("psr:0.3", 0.5, calibration)
    assert words_of("paper", 0.25, calibration) == words_of("psr:0.25", 0.25, calibration)
    with pytest.raises(ValueError, match="375 resident is nothing that the paper compares; it has 0"):
        words_of("paper", 0.375, calibration)
    assert numbers_of("cache_prior:0.15") == {"bonus": 0.15}
    for wrong in ("lru:1", "psr:0.3:1:2:3", "best"):
        with pytest.raises(ValueError, match="is no policy; known: lru, cache_prior"):
            numbers_of(wrong)
