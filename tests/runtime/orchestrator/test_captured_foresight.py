"""Foresight in the device's steps, without a GPU: what it changes (hits) and what it never does (tokens)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_gpu import CacheStats, HostCopier
from hetero_gpu.control import ControlRegion, Word
from hetero_gpu.experts.decode import DecodeExperts
from hetero_gpu.foresight import Room
from hetero_gpu.predict import DevicePredictor
from hetero_gpu.tables import DeviceTables, MappedBank, ensure
from hetero_runtime.assembly import Parts
from hetero_runtime.config.tree import Horizon
from hetero_runtime.experts.formats import PLAIN
from hetero_runtime.experts.kernel_format import expert_format
from hetero_runtime.foresight.build import router_shape
from hetero_runtime.foresight.prompts import Prompts
from hetero_runtime.hf.forward import SequenceState
from hetero_runtime.hf.router_hooks import listen_to_routers
from hetero_runtime.hf.sequences import StaticSequences
from hetero_runtime.orchestrator import Phase, captured_foresight
from hetero_runtime.orchestrator.captured_foresight import CapturedForesight, Nearer, ReadPrompt
from hetero_runtime.orchestrator.captured_prefetch import CapturedPrefetch
from hetero_runtime.orchestrator.device import DeviceOrchestrator
from hetero_runtime.plan.captured import MOST_OUTSTANDING
from hetero_scheduler.predict import Forecast, RouterShape
from hetero_scheduler.predict.mamba2 import Mamba2Predictor
from hetero_scheduler.predict.refined import Refined
from hetero_scheduler.predict.refinement import Refinement
from hetero_scheduler.predict.routing import layer_groups
from tests.architectures import build_checkpoint
from tests.gpu.control.fake_link import FakeLink
from tests.runtime.foresight.predictors import random_models, random_refinement, write_random_predictor
from tests.runtime.orchestrator.rig import CacheRig
from tests.runtime.orchestrator.test_device import greedy, load, on_device

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter stands in where there is no GPU"
)

CPU = torch.device("cpu")
FEW_LOOKS = 20
"""After so many in vain a layer helps itself; the interpreter looks slowly."""


# ---- an engine whose predictor has learnt nothing


class Whole:
    """Forecasts of which nothing is deferred: there are too few layers."""

    def defer(self, near: int) -> None:
        raise NotImplementedError

    def look_further(self, group: int, num_rows: int) -> None:
        raise NotImplementedError

    def take_further(self, group: int, num_rows: int) -> None:
        raise NotImplementedError


class Guesses(Whole):
    """Forecasts without any sense, for one row."""

    def __init__(self, shape: RouterShape) -> None:
        self.probabilities = torch.zeros(1, 8, shape.num_layers, shape.num_experts)
        self.groups = layer_groups(shape.num_layers, min(2, shape.num_layers))

    def observe(self, layer: int, router_logits: torch.Tensor) -> None:
        assert router_logits.shape == (1, self.probabilities.shape[3])
        self.probabilities.uniform_()

    def load(self, row: int, states: Any, *, forecasts: Any = ()) -> None:
        covered = [layer for forecast in forecasts for layer in forecast.layers]
        assert covered == list(range(self.probabilities.shape[2]))
        self.probabilities.uniform_()


class Foreseen:
    """A model on the device orchestrator, its prompts read by a host predictor of random weights.

    `is_real`: whether the device's predictor goes on from there, one step ahead; or somebody guesses, which
    is faster.
    """

    def __init__(self, parts: Parts, link: FakeLink, *, is_real: bool = False) -> None:
        shape = router_shape(parts.model)
        models = random_models(*shape)

        def make_asker(
            parts: Parts, tables: DeviceTables, region: ControlRegion, active: torch.Tensor
        ) -> CapturedForesight:
            return CapturedForesight(
                DevicePredictor(models, active, horizon=1) if is_real else Guesses(shape),
                active=active,
                tables=tables,
                region=region,
                per_layer=min(shape.top_k + 1, shape.num_experts),
                room=Room(kept_back=shape.top_k, is_shared=True),
            )

        self.orchestrator = on_device(parts, shape.top_k, link, make_asker=make_asker)
        prefetch = self.orchestrator._prefetch
        assert prefetch is not None
        self.worker, self.asker = prefetch._worker, prefetch._asker
        assert isinstance(self.asker, CapturedForesight)
        self.prompts = Prompts([Mamba2Predictor(models)], shape, device=self.asker)
        listen_to_routers(parts.model, self.prompts.hear)
        self.sequences = StaticSequences(parts.model, rows=1, max_length=64)

    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        with self.prompts.read(0, ids, is_first=True):
            return self.sequences.prefill(0, ids)

    def end(self) -> None:
        self.sequences.reset(0)
        self.prompts.end(0)


@pytest.mark.parametrize(
    "trouble",
    [pytest.param(each, marks=pytest.mark.slow) for each in ("none", "slow", "killed")],
)
def test_foresight_changes_no_token(tmp_path: Path, trouble: str) -> None:
    folder = build_checkpoint("Mixtral", tmp_path)
    write_random_predictor(folder)
    parts = load(folder, "belady", residency=0.6)
    eager = SequenceState(parts.model)
    expected = greedy(parts.orchestrator, eager.extend, eager.extend, num_steps=2)
    foreseen = Foreseen(parts, FakeLink(delay=500 if trouble == "slow" else 0))

    def decode(token: torch.Tensor) -> torch.Tensor:
        if trouble == "killed" and foreseen.sequences.length(0) == 10:
            foreseen.orchestrator._tables.patience.fill_(FEW_LOOKS)
            foreseen.worker._region.write(Word.STOP, 1)
            foreseen.worker._thread.join()
        return foreseen.sequences.decode(token)[0]

    def run() -> list[int]:
        return greedy(foreseen.orchestrator, foreseen.prefill, decode, num_steps=2)

    if trouble == "killed":
        with pytest.raises(RuntimeError, match="the prefetch worker ended"):
            run()
        foreseen.end()
    assert run() == expected  # a dead worker is told of once, and then done without
    stats = foreseen.orchestrator.device_stats()
    assert stats.required == stats.hits + stats.late + stats.misses
    foreseen.orchestrator.check()
    foreseen.orchestrator.close()
    parts.close()


def test_the_device_goes_on_from_what_the_host_has_read(tmp_path: Path) -> None:
    """After a prompt and a step its forecasts are those of a host predictor that heard both, and the tokens
    are those of exact routing."""
    folder = build_checkpoint("Mixtral", tmp_path)
    write_random_predictor(folder)
    parts = load(folder, "belady", residency=0.6)
    eager = SequenceState(parts.model)
    tokens = greedy(parts.orchestrator, eager.extend, eager.extend, num_steps=1)
    foreseen, shape = Foreseen(parts, FakeLink(), is_real=True), router_shape(parts.model)
    heard: list[list[torch.Tensor]] = [[] for _ in range(shape.num_layers)]
    listen_to_routers(parts.model, lambda layer, logits, _hidden: heard[layer].append(logits.clone()))
    said = greedy(
        foreseen.orchestrator,
        foreseen.prefill,
        lambda token: foreseen.sequences.decode(token)[0],
        num_steps=1,
    )
    assert said == tokens
    host, expected = Mamba2Predictor(random_models(*shape)), torch.zeros(shape.num_layers, shape.num_experts)
    for token, routed in enumerate(torch.stack([torch.cat(logits) for logits in heard], dim=1)):
        for layer, logits in enumerate(routed):
            host.observe(token, layer, logits.numpy())
            if (forecast := host.forecast()) is not None:
                expected[list(forecast.layers)] = torch.from_numpy(forecast.probabilities[0])
    asker = foreseen.asker
    assert isinstance(asker, CapturedForesight)
    got = asker._forecasts.probabilities[0, 0]
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-4)  # prompts are read in half precision
    assert asker._windows.window.tolist() == [[0] * shape.num_layers]
    foreseen.orchestrator.close()
    parts.close()


# ---- forecasts that come true


NUM_LAYERS, NUM_STEPS, NUM_SLOTS = 4, 5, 12
HORIZONS: tuple[Horizon, ...] = ("step", "token", "layer")


class Foreknown(Whole):
    """Forecasts of a routing that is known: int64 `[steps, layers, top_k]`."""

    groups = (range(2), range(2, NUM_LAYERS))

    def __init__(self, routing: torch.Tensor, num_experts: int) -> None:
        chosen = torch.zeros(len(routing) + 8, NUM_LAYERS, num_experts)
        self._shares = chosen.index_put(
            (torch.arange(len(routing))[:, None, None], torch.arange(NUM_LAYERS)[:, None], routing),
            torch.tensor(1 / routing.shape[2]),
        )
        self.probabilities = torch.zeros(1, 8, NUM_LAYERS, num_experts)
        self._step = 0

    def observe(self, layer: int, router_logits: torch.Tensor) -> None:
        for group in self.groups:
            if layer == group.stop - 1:
                coming = self._shares[self._step + 1 :][:8]
                self.probabilities[0, :, group.start : group.stop] = coming[:, group.start : group.stop]
        self._step += layer == NUM_LAYERS - 1

    def load(self, row: int, states: Any, *, forecasts: Any = ()) -> None:
        for forecast in forecasts:
            self.probabilities[row] = torch.from_numpy(forecast.probabilities)

    def before(self) -> ReadPrompt:
        """As after a prompt."""
        first = Forecast(self._shares[:8].numpy(), tuple(range(NUM_LAYERS)), 0)
        return ReadPrompt((), (first,), np.ones(first.probabilities.shape[1:], np.int64))


class Unaware(Foreknown):
    """Every expert is as likely as any other."""

    def __init__(self, routing: torch.Tensor, num_experts: int) -> None:
        super().__init__(routing, num_experts)
        self._shares = torch.full_like(self._shares, 1 / num_experts)


def told(routing: torch.Tensor, nearest: Horizon, tokens: torch.Tensor) -> Nearer:
    """What tells of `routing`: tokens, each the number of its step, or routers that are asked early."""
    num_steps = len(routing)
    chosen = torch.zeros(num_steps, NUM_LAYERS, 8).scatter_(2, routing, 9.0)
    knows_tokens = nearest == "token"
    refinement = Refinement(
        scale=np.ones(NUM_LAYERS, np.float32),
        embedding=np.eye(num_steps, dtype=np.float32),
        head=(chosen * knows_tokens).permute(1, 2, 0).numpy(),
        bias=np.zeros((NUM_LAYERS, 8), np.float32),
        pool=np.ones((NUM_LAYERS, 2), np.float32),
    )

    def early(layer: int, hidden: torch.Tensor) -> torch.Tensor | None:
        return None if layer + 1 == NUM_LAYERS else chosen[int(tokens[0]), layer + 1][None]

    return Nearer(refinement, tokens, None if knows_tokens else early)


def decoded(
    routing: torch.Tensor,
    link: FakeLink | None,
    *,
    killed_at: int | None = None,
    nearest: Horizon | None = None,
) -> CacheStats:
    """Steps over `routing`, with the right sums whatever befalls the link; without one, LRU alone.

    `killed_at`: the step before which the worker dies. `nearest`: forecasts say nothing until this horizon,
    where they say everything (step: they never do); None: they do from the beginning.
    """
    policy = "lru" if link is None else "belady"
    rig = CacheRig(NUM_SLOTS, HostCopier(), num_layers=NUM_LAYERS, policy=policy)
    records = torch.stack([rig._record(key) for key in rig.all_keys()])
    bank = MappedBank(records.data_ptr(), records.shape[1])
    tables = DeviceTables(num_slots=NUM_SLOTS, num_layers=NUM_LAYERS, num_experts=8, max_pairs=2, device=CPU)
    active, prefetch, asker = torch.ones(1, dtype=torch.bool), None, None
    tokens = torch.zeros(1, dtype=torch.long)
    region = ControlRegion(CPU, ring_size=MOST_OUTSTANDING)
    tables.attach(region)
    if link is not None:
        link.stop_poisoning()
        tables.patience.fill_(FEW_LOOKS)
        forecasts = (Foreknown if nearest is None else Unaware)(routing, 8)
        asker = CapturedForesight(
            forecasts, active=active, tables=tables, region=region, per_layer=3, room=Room(2, is_shared=True)
        )
        prefetch = CapturedPrefetch(
            asker,
            tables=tables,
            region=region,
            bank=bank,
            records=records,
            slabs=rig.slabs,
            engine=link.engine,
        )
        asker.take(0, forecasts.before())
        if nearest in ("token", "layer"):
            asker.follow(told(routing, nearest, tokens))
    form = expert_format(rig.layout, {"gate_up_proj": PLAIN, "down_proj": PLAIN}, rig.experts[0])
    no_prompts: Any = None
    orchestrator = DeviceOrchestrator(
        no_prompts,
        cache=rig.cache,
        slabs=rig.slabs,
        bank=bank,
        tables=tables,
        experts=DecodeExperts(form, 2, max_tokens=1, dtype=torch.float32, device=CPU),
        active=active,
        prefetch=prefetch,
    )
    torch.manual_seed(1)
    weights = torch.tensor([[0.75, 0.25]])
    for i, step in enumerate(routing):
        ending: AbstractContextManager[Any] = nullcontext()
        tokens.fill_(i)
        if prefetch is not None and i == killed_at:
            region.write(Word.STOP, 1)
            prefetch._worker._thread.join()
            ending = pytest.raises(RuntimeError, match="the prefetch worker ended")
        with ending, orchestrator.pass_(Phase.DECODE, checkpoint=lambda: None):
            for layer, experts in enumerate(step):
                hidden = torch.randn(1, rig.sizes.hidden)
                if asker is not None:
                    asker.hear(torch.zeros(1, 8))
                out = orchestrator.run_layer(layer, hidden, experts[None], weights)
                torch.testing.assert_close(out, rig.experts[layer](hidden, experts[None], weights))
                tables.check()
    stats = orchestrator.device_stats()
    if link is not None:
        link.stick(False)
    orchestrator.close()
    return stats


def some_routing() -> torch.Tensor:
    rng = np.random.default_rng(0)
    steps = [[rng.permutation(8)[:2] for _ in range(NUM_LAYERS)] for _ in range(NUM_STEPS)]
    return torch.from_numpy(np.array(steps))


def test_forecasts_that_come_true_hit_more_than_lru() -> None:
    routing = some_routing()
    foreseen, lru = decoded(routing, FakeLink()), decoded(routing, None)
    assert foreseen.required == lru.required
    assert foreseen.prefetches > 0
    assert foreseen.hit_rate > lru.hit_rate + 0.3


def test_what_is_known_nearer_hits_where_forecasts_said_nothing() -> None:
    routing = some_routing()[:3]
    hits = {nearest: decoded(routing, FakeLink(), nearest=nearest).hit_rate for nearest in HORIZONS}
    assert hits["token"] > hits["step"] + 0.3
    assert hits["layer"] > hits["step"] + 0.2  # one layer ahead there is less time


def test_a_worker_that_dies_is_told_of_once_and_done_without() -> None:
    stats = decoded(some_routing()[:3], FakeLink(), killed_at=1)
    assert stats.required == stats.hits + stats.late + stats.misses


def test_a_link_that_hangs_holds_no_step_up() -> None:
    link = FakeLink()
    link.stick(True)
    stats = decoded(some_routing()[:3], link)
    assert 0 < stats.prefetches - stats.prefetches_dropped <= MOST_OUTSTANDING  # stale ones are given back
    assert stats.required == stats.hits + stats.late + stats.misses


# ---- rows


def test_a_row_joins_and_leaves_while_another_goes_on() -> None:
    """What waits for the device is taken up with the next step; others' windows stay; the next layer's tasks
    come too late."""

    class TwoRows(Foreknown):
        def __init__(self) -> None:
            super().__init__(some_routing(), 8)
            self.probabilities = torch.zeros(2, 8, NUM_LAYERS, 8)

    tables = DeviceTables(num_slots=NUM_SLOTS, num_layers=NUM_LAYERS, num_experts=8, max_pairs=4, device=CPU)
    region = ControlRegion(CPU, ring_size=MOST_OUTSTANDING)
    tables.attach(region)
    forecasts, active = TwoRows(), torch.tensor([True, False])
    asker = CapturedForesight(
        forecasts, active=active, tables=tables, region=region, per_layer=3, room=Room(4, is_shared=True)
    )
    windows, candidates = asker._windows.window, asker._candidates.expert
    asker.take(0, forecasts.before())
    assert windows.tolist() == [[-1] * NUM_LAYERS] * 2
    asker.begin_decode()
    assert windows.tolist() == [[0] * NUM_LAYERS, [-1] * NUM_LAYERS]
    assert bool((candidates[0] == -1).all())
    assert bool((candidates[1:, :2] >= 0).all())
    chosen = torch.zeros(1, 2, dtype=torch.int64)
    ensure(tables, 0, chosen, running=asker.begin_layer(0, chosen))
    asker.take(1, forecasts.before())
    asker.begin_decode()
    assert windows.tolist() == [[1, 0, 0, 0], [0] * NUM_LAYERS]
    asker.take(0, forecasts.before())
    asker.forget(0)  # before it ever stepped
    asker.begin_decode()
    assert windows.tolist() == [[-1] * NUM_LAYERS, [0] * NUM_LAYERS]


def test_forecasts_are_made_anew_as_the_hosts_predictor_does() -> None:
    """Layer by layer over two steps: after the token, after each router, after each early word."""
    shape, rng = RouterShape(NUM_LAYERS, 8, 2), np.random.default_rng(0)
    models, refinement = random_models(*shape), random_refinement(NUM_LAYERS, 8)
    host = Refined(Mamba2Predictor(models, 2), refinement, num_layers=NUM_LAYERS, nearest="layer")
    tables = DeviceTables(num_slots=NUM_SLOTS, num_layers=NUM_LAYERS, num_experts=8, max_pairs=2, device=CPU)
    region, active = ControlRegion(CPU, ring_size=MOST_OUTSTANDING), torch.ones(1, dtype=torch.bool)
    tables.attach(region)
    asker = CapturedForesight(
        DevicePredictor(models, active, horizon=2),
        active=active,
        tables=tables,
        region=region,
        per_layer=3,
        room=Room(2, is_shared=True),
    )
    said_early, tokens = rng.normal(size=(NUM_LAYERS, 8)).astype(np.float32), torch.zeros(1, dtype=torch.long)

    def early(layer: int, hidden: torch.Tensor) -> torch.Tensor | None:
        return torch.from_numpy(said_early[layer + 1 :][:1]) if layer + 1 < NUM_LAYERS else None

    asker.follow(Nearer(refinement, tokens, early))
    for step, token in enumerate((7, 11, 999)):
        tokens.fill_(token)
        host.begin_step(step, token)
        for layer in range(NUM_LAYERS):
            said = rng.normal(size=8).astype(np.float32)
            chosen = torch.from_numpy(np.argsort(-said)[None, :2].copy())
            ensure(tables, layer, chosen, running=asker.begin_layer(layer, chosen))
            asker.hear(torch.from_numpy(said[None]))
            asker.think(layer, 1)
            asker.ask(layer, torch.zeros(1, 4))
            host.observe(step, layer, said)
            if layer + 1 < NUM_LAYERS:
                host.observe_next(step, layer + 1, said_early[layer + 1])
            if step:
                expected = np.stack([host._ahead[each] for each in range(NUM_LAYERS)], axis=1)
                np.testing.assert_allclose(asker._forecasts.probabilities[0].numpy(), expected, atol=1e-4)


def test_what_is_said_later_leads_to_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of eight layers, over two steps: once a group's forecast is whole again, its experts score
    as if it had been made at once, and until then the nearest steps do."""
    shape, active = RouterShape(16, 8, 2), torch.ones(1, dtype=torch.bool)
    models, rng = random_models(*shape), np.random.default_rng(0)

    def asker() -> tuple[DeviceTables, CapturedForesight, DevicePredictor]:
        tables = DeviceTables(num_slots=40, num_layers=16, num_experts=8, max_pairs=2, device=CPU)
        tables.policy = "belady"
        region = ControlRegion(CPU, ring_size=MOST_OUTSTANDING)
        tables.attach(region)
        predictor = DevicePredictor(models, active, horizon=4)
        room = Room(2, is_shared=True)
        foresight = CapturedForesight(
            predictor, active=active, tables=tables, region=region, per_layer=3, room=room
        )
        return tables, foresight, predictor

    split = asker()
    monkeypatch.setattr(captured_foresight, "_FURTHER_BY", 99)
    whole = asker()
    monkeypatch.undo()
    num_apart = 0
    for _ in range(2):
        for layer in range(16):
            said = rng.normal(size=(1, 8)).astype(np.float32)
            chosen = torch.from_numpy(np.argsort(-said)[:, :2].copy())
            for tables, foresight, _ in (split, whole):
                ensure(tables, layer, chosen, running=foresight.begin_layer(layer, chosen))
                foresight.hear(torch.from_numpy(said))
                foresight.think(layer, 1)
                foresight.ask(layer, torch.zeros(1, 4))
            near = [each[2].probabilities[:, :2] for each in (split, whole)]
            assert torch.equal(*near), layer
            if layer in (6, 14):  # of the groups before them all is known again
                torch.testing.assert_close(split[0].score, whole[0].score, rtol=0, atol=0)
                assert torch.equal(split[2].probabilities, whole[2].probabilities)
            num_apart += not torch.equal(split[2].probabilities, whole[2].probabilities)
    assert num_apart > 0
