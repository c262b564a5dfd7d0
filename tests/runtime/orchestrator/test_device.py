"""The device orchestrator without a GPU: its kernels in Triton's interpreter, its step not captured."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hetero_gpu.control import ControlRegion, Word
from hetero_gpu.experts.decode import DecodeExperts
from hetero_gpu.experts.prefill import GroupedExperts
from hetero_gpu.tables import TURNS, DeviceTables, MappedBank
from hetero_runtime.assembly import Parts, assemble
from hetero_runtime.config import load_config
from hetero_runtime.errors import DeviceError
from hetero_runtime.experts.kernel_format import expert_format
from hetero_runtime.hf.conversion import expert_modules
from hetero_runtime.hf.forward import SequenceState
from hetero_runtime.hf.hooks import attach
from hetero_runtime.hf.pregate import PreGate
from hetero_runtime.hf.sequences import StaticSequences
from hetero_runtime.in_place.answers import by_backend
from hetero_runtime.orchestrator import Orchestrator, Phase
from hetero_runtime.orchestrator.captured_in_place import CapturedInPlace
from hetero_runtime.orchestrator.captured_prefetch import Asker, AskOneLayerAhead, CapturedPrefetch
from hetero_runtime.orchestrator.device import DeviceOrchestrator
from hetero_runtime.orchestrator.eager import EagerOrchestrator
from hetero_runtime.orchestrator.grouped import GroupedOrchestrator
from hetero_runtime.plan.captured import MOST_OUTSTANDING
from hetero_runtime.planned import plan_for
from hetero_scheduler import Popularity
from tests.architectures import build_checkpoint, prompt_ids
from tests.gpu.control.fake_link import FakeLink

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter stands in where there is no GPU"
)

Extend = Callable[[torch.Tensor], torch.Tensor]
"""Append ids to the only row and give the logits of the last one."""
MakeAsker = Callable[[Parts, DeviceTables, ControlRegion, torch.Tensor], Asker]


def load(folder: Path, eviction: str, residency: float = 0.25, **misses: object) -> Parts:
    backend = misses.pop("backend", "torch") if misses else "native"
    config = {
        "model": {"path": str(folder)},
        "device": "cpu",
        "memory": {"residency": residency},
        "preset": "seqmoe" if eviction == "belady" else "lru",
        "eviction": {"policy": eviction},
        "execution": {"max_length": 64, "max_rows": 1},
        "misses": misses or {"handler": "load"},
        "cpu": {"threads": 2, "backend": backend},
    }
    return assemble(plan_for(load_config(config)).config)


def asks_by_pregate(parts: Parts, tables: DeviceTables, region: ControlRegion, active: torch.Tensor) -> Asker:
    look_ahead = PreGate(parts.model, num_guesses=tables.max_pairs, active=active)
    return AskOneLayerAhead(look_ahead)


def on_device(
    parts: Parts, top_k: int, link: FakeLink | None = None, *, make_asker: MakeAsker = asks_by_pregate
) -> DeviceOrchestrator:
    """The orchestrator, over tables and slabs in host memory. With a `link` it prefetches."""
    cpu = torch.device("cpu")
    modules = list(expert_modules(parts.model).values())
    kernel_form = expert_format(parts.store.layout, parts.store.forms, modules[0])
    assert isinstance(parts.orchestrator, EagerOrchestrator)
    prefill = GroupedOrchestrator(
        parts.cache,
        slabs=parts.slabs,
        experts=GroupedExperts(kernel_form, top_k, max_tokens=64, dtype=torch.float32, device=cpu),
        eviction=parts.orchestrator.eviction,
        popularity=Popularity(parts.store.num_layers, parts.store.num_experts),
        is_fetching_ahead=True,
    )
    bank = MappedBank(parts.store.records.data_ptr(), parts.store.layout.record_bytes)
    tables = DeviceTables(
        num_slots=parts.slabs.num_slabs,
        num_layers=parts.store.num_layers,
        num_experts=parts.store.num_experts,
        max_pairs=top_k,
        device=cpu,
    )
    active = torch.ones(1, dtype=torch.bool)
    prefetch, misses, in_place = None, parts.orchestrator._in_place, None
    if misses is not None:
        region = ControlRegion(cpu)
        tables.attach(region)
        hidden = parts.model.config.hidden_size
        in_place = CapturedInPlace(
            misses.experts, misses.policy, tables=tables, region=region, hidden=hidden, top_k=top_k
        )
    if link is not None:
        link.stop_poisoning()
        region = ControlRegion(cpu, ring_size=MOST_OUTSTANDING)
        tables.attach(region)
        prefetch = CapturedPrefetch(
            make_asker(parts, tables, region, active),
            tables=tables,
            region=region,
            bank=bank,
            records=parts.store.records,
            slabs=parts.slabs,
            engine=link.engine,
        )
    orchestrator = DeviceOrchestrator(
        prefill,
        cache=parts.cache,
        slabs=parts.slabs,
        bank=bank,
        tables=tables,
        experts=DecodeExperts(kernel_form, top_k, max_tokens=1, dtype=torch.float32, device=cpu),
        active=active,
        prefetch=prefetch,
        in_place=in_place,
    )
    attach(modules, orchestrator.run_layer)
    return orchestrator


def greedy(orchestrator: Orchestrator, prefill: Extend, decode: Extend, num_steps: int) -> list[int]:
    with orchestrator.pass_(Phase.PREFILL, checkpoint=lambda: None):
        tokens = [int(prefill(prompt_ids(9)[0]).argmax())]
    for _ in range(num_steps):
        with orchestrator.pass_(Phase.DECODE, checkpoint=lambda: None):
            tokens.append(int(decode(torch.tensor(tokens[-1:])).argmax()))
    return tokens


@pytest.mark.parametrize(
    ("name", "top_k", "eviction"),
    [
        ("Mixtral", 2, "lru"),
        ("GptOssMxfp4", 2, "lfu"),
        pytest.param("MiniMaxM2", 2, "lfru", marks=pytest.mark.slow),
    ],
)
def test_decode_on_the_device_gives_the_eager_tokens(
    tmp_path: Path, name: str, top_k: int, eviction: str
) -> None:
    parts = load(build_checkpoint(name, tmp_path), eviction)
    eager = SequenceState(parts.model)
    expected = greedy(parts.orchestrator, eager.extend, eager.extend, num_steps=3)
    before = parts.cache.stats()
    orchestrator = on_device(parts, top_k)
    sequences = StaticSequences(parts.model, rows=1, max_length=64)
    got = greedy(
        orchestrator,
        lambda ids: sequences.prefill(0, ids),
        lambda token: sequences.decode(token)[0],
        num_steps=3,
    )
    assert got == expected
    counted = orchestrator.device_stats()
    assert counted.required == counted.hits + counted.misses == 3 * top_k * parts.store.num_layers
    assert counted.bytes_moved == counted.misses * parts.store.layout.record_bytes
    assert parts.cache.stats().required > before.required  # prefill was counted on the host
    orchestrator.check()
    parts.close()


@pytest.mark.parametrize(
    "trouble",
    [pytest.param("slow", marks=pytest.mark.slow), pytest.param("none", marks=pytest.mark.slow), "killed"],
)
def test_prefetching_changes_no_token(tmp_path: Path, trouble: str) -> None:
    parts = load(build_checkpoint("Mixtral", tmp_path), "lru", residency=0.6)
    eager = SequenceState(parts.model)
    expected = greedy(parts.orchestrator, eager.extend, eager.extend, num_steps=3)
    link = FakeLink(delay=500 if trouble == "slow" else 0)
    orchestrator = on_device(parts, 2, link)
    sequences = StaticSequences(parts.model, rows=1, max_length=64)

    def decode(token: torch.Tensor) -> torch.Tensor:
        if trouble == "killed" and sequences.length(0) == 10:
            worker = orchestrator._prefetch._worker  # type: ignore[union-attr]
            worker._region.write(Word.STOP, 1)
            worker._thread.join()
        return sequences.decode(token)[0]

    def run() -> list[int]:
        return greedy(orchestrator, lambda ids: sequences.prefill(0, ids), decode, num_steps=3)

    if trouble == "killed":
        with pytest.raises(RuntimeError, match="the prefetch worker ended"):
            run()
        sequences.reset(0)
    assert run() == expected  # a dead worker is told of once, and then done without
    stats = orchestrator.device_stats()
    assert stats.prefetches > 0
    assert stats.required == stats.hits + stats.late + stats.misses
    orchestrator.check()
    orchestrator.close()
    parts.close()


# ---- misses computed on the CPU

HANDLERS: dict[str, dict[str, object]] = {
    "cpu": {"handler": "cpu"},
    "half": {"handler": "hybrid", "cpu_share": 0.5},
    "native": {"handler": "cpu", "backend": "native"},
    "by cost": {"handler": "hybrid"},
}
ASK_NO_CLOCK = ("cpu", "half", "native")


class InPlaceRun:
    """A decoding engine whose captured step calls the CPU, and the tokens of one that loads."""

    def __init__(self, folder: Path, misses: str, *, residency: float) -> None:
        self.parts = load(folder, "lru", residency, **HANDLERS[misses])
        eager = SequenceState(self.parts.model)
        self.expected = greedy(self.parts.orchestrator, eager.extend, eager.extend, num_steps=2)
        self.orchestrator = on_device(self.parts, 2)
        assert self.orchestrator._in_place is not None
        self.in_place = self.orchestrator._in_place
        self.sequences = StaticSequences(self.parts.model, rows=1, max_length=64)

    def tokens(self) -> list[int]:
        self.sequences.reset(0)
        return greedy(
            self.orchestrator,
            lambda ids: self.sequences.prefill(0, ids),
            lambda token: self.sequences.decode(token)[0],
            num_steps=2,
        )

    def close(self) -> None:
        self.orchestrator.close()
        self.parts.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., InPlaceRun]]:
    runs: list[InPlaceRun] = []

    def run(name: str, misses: str, residency: float = 0.35) -> InPlaceRun:
        runs.append(InPlaceRun(build_checkpoint(name, tmp_path), misses, residency=residency))
        return runs[-1]

    yield run
    for each in runs:
        each.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("hetero-", "expert-"))]


@pytest.mark.parametrize("misses", ASK_NO_CLOCK)
@pytest.mark.parametrize("name", ["Mixtral", pytest.param("GptOssMxfp4", marks=pytest.mark.slow)])
def test_the_cpu_computes_misses_of_the_step_and_says_the_same(
    name: str, misses: str, start: Callable[..., InPlaceRun]
) -> None:
    run = start(name, misses)
    for _ in range(2):  # the second prompt finds other slots filled
        assert run.tokens() == run.expected
    stats, in_place = run.orchestrator.device_stats(), run.orchestrator.device_in_place_stats()
    assert in_place.experts > 0
    assert in_place.seconds > 0
    assert stats.required == stats.hits + stats.misses
    assert stats.misses == stats.loads + in_place.experts
    assert (stats.evictions > 0) == (misses == "half")
    run.orchestrator.check()


def test_what_fails_on_the_cpu_fails_the_pass_and_the_next_text_is_served(
    start: Callable[..., InPlaceRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("Mixtral", "cpu")
    monkeypatch.setattr(run.in_place._experts, "submit", lambda work: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.tokens()
    monkeypatch.undo()
    assert run.tokens() == run.expected
    run.orchestrator.check()


@pytest.mark.parametrize(
    "when", [pytest.param("between two passes", marks=pytest.mark.slow), "within a pass"]
)
def test_a_thread_that_died_is_told_of_once_and_the_next_text_has_another(
    when: str, start: Callable[..., InPlaceRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no device hangs."""
    run = start("Mixtral", "cpu")

    def die() -> None:
        run.in_place._region.write(Word.STOP, 1)
        run.in_place._thread.join(10)
        run.in_place._calls.patience.fill_(5)

    if when == "between two passes":
        die()
    else:
        decode = run.sequences.decode
        monkeypatch.setattr(run.sequences, "decode", lambda token: (die(), decode(token))[1])
    with pytest.raises(DeviceError, match="the thread that computes experts on the CPU has ended"):
        run.tokens()
    monkeypatch.undo()
    assert run.tokens() == run.expected
    run.orchestrator.check()


def test_what_ended_the_thread_is_what_is_raised(
    start: Callable[..., InPlaceRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("Mixtral", "cpu")
    monkeypatch.setattr(by_backend, "answer", lambda region, number: 1 / 0)
    run.in_place._calls.patience.fill_(5)
    with pytest.raises(ZeroDivisionError):
        run.tokens()
    monkeypatch.undo()
    assert run.tokens() == run.expected
    run.orchestrator.check()


def test_shares_are_tried_and_a_cpu_that_loses_is_asked_no_more(
    start: Callable[..., InPlaceRun], caplog: pytest.LogCaptureFixture
) -> None:
    run = start("Mixtral", "by cost")
    trials, tables = run.in_place.trials, dict[float, list[list[int]]]()
    assert trials is not None
    assert run.orchestrator.trials is trials
    while not trials.is_lost:
        assert not run.orchestrator.is_outdated
        run.in_place.begin_pass()
        tables[trials.choice] = run.in_place._division.number_of.T.tolist()
        run.orchestrator.observe_steps(4, 4 * (1 + trials.choice))
    all_in_place = tables.pop(1.0)
    assert all_in_place == [[0, 1, 2]] * TURNS
    one_is_loaded = {share: columns.pop(0) for share, columns in tables.items()}
    assert one_is_loaded == {share: [0, 0, int(share > 0.2)] for share in one_is_loaded}
    by_share = {
        0.0: [0, 0, 0],
        0.2: [0, 0, 0],
        0.35: [0, 0, 1],
        0.5: [0, 1, 1],
        0.7: [0, 1, 1],
    }
    assert tables == {share: [numbers] * (TURNS - 1) for share, numbers in by_share.items()}
    run.orchestrator.observe_steps(4, 1.0)
    said = [record.message for record in caplog.records if "all loaded from now on" in record.message]
    assert len(said) == 1
    assert "a step takes 1000.00 ms so, and 1200.00 ms at best" in said[0]
    assert run.orchestrator.is_outdated
    computed = run.orchestrator.device_in_place_stats()
    assert run.tokens() == run.expected  # each step of this run is as if captured anew
    assert not run.orchestrator.is_outdated
    assert run.orchestrator.device_in_place_stats() == computed


def test_nothing_is_captured_anew_once_the_engine_is_closed(start: Callable[..., InPlaceRun]) -> None:
    run = start("Mixtral", "by cost")
    trials = run.in_place.trials
    assert trials is not None
    while not trials.is_lost:
        run.orchestrator.observe_steps(4, 4 * (1 + trials.choice))
    assert run.orchestrator.is_outdated
    run.orchestrator.close()
    assert not run.orchestrator.is_outdated


def test_what_is_captured_does_not_count(start: Callable[..., InPlaceRun]) -> None:
    run = start("Mixtral", "cpu")
    run.tokens()
    before = run.orchestrator.device_stats(), run.orchestrator.device_in_place_stats()
    with run.orchestrator.uncounted():
        run.tokens()
    assert (run.orchestrator.device_stats(), run.orchestrator.device_in_place_stats()) == before
    assert before[1].experts > 0
