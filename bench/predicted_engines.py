"""Engines one after another on the same recorded texts, and the simulator beside them.

made once     experts in host memory ──► full load ──► seqmoe ──► LRU ──► ...    handed on by each
of each       loaded, its model made to say the texts, its step captured anew, decoded
afterwards    the simulator, with the layer time of full load and the policy's kernels, over the measured link
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.decode_case import Case, Loaded, Measured, Plan, capture_anew, config_of, opened
from bench.harness import Row, attempt
from bench.models.random_bank import random_store
from bench.predicted_rows import FULL, Bound, Contender, Outcome, rows_of
from bench.predicted_texts import PROMPT, Texts, decode_counted, decode_texts, recited, settle_on_first
from bench.simulated_twin import simulated_hits
from bench.step_breakdown import profile_steps
from bench.step_time import StepTime
from bench.traces.routers import Recital
from hetero_runtime.config import Config, ResolvedConfig
from hetero_runtime.config.tree import Horizon
from hetero_runtime.experts.base import ExpertStore
from hetero_runtime.planned import decide, plan_for
from hetero_runtime.prediction import read_predictor
from hetero_runtime.prediction.horizons import predictors_of
from hetero_runtime.simulation import Sweep, run_sweep
from hetero_runtime.trace import TraceInfo
from hetero_scheduler.simulator import Machine, Scenario
from hetero_scheduler.simulator.foreseen import Foreseen
from hetero_scheduler.trace import Trace

SIMULATED = (0.25, 0.45)
PROFILED = 0.45


@dataclass
class Bench:
    """What one run works with, and finds. `predictor`: one that the model accepts."""

    plan: Plan
    predictor: Path
    experts_format: str
    trace: Trace
    info: TraceInfo
    texts: Texts
    link_gb_s: float
    began_s: float
    done: dict[Contender, Outcome] = field(default_factory=dict)
    bounds: dict[float, Bound] = field(default_factory=dict)
    store: ExpertStore | None = None
    record_bytes: int = 0
    """Of an expert, as it crosses the link."""
    num_failed: int = 0

    @property
    def is_captured(self) -> bool:
        """Whether steps are captured, and copies overlap with computation."""
        return self.plan.device == "cuda"

    def horizon(self, contender: Contender) -> Horizon | None:
        """As near as its engine looks. Raises what `decide` raises."""
        if contender.horizon is None:
            return None
        return _horizon(decide(self._config(contender)).config)

    def profiles(self, contender: Contender) -> bool:
        """Whether a text of its steps is broken down by kind of kernel."""
        return self.is_captured and contender.horizon is not None and contender.residency == PROFILED

    def counts(self, contender: Contender) -> bool:
        """Whether a text of it is counted, for the simulator, which loads what misses."""
        return contender.residency in SIMULATED and contender.misses == "load"

    # ---- engines

    def measure(self, contender: Contender) -> bool:
        """One engine; its experts go on to the next. Returns that it is done."""
        config = plan_for(self._config(contender)).config  # what cannot be costs no experts
        horizon = None if contender.horizon is None else _horizon(config)
        store, self.store = self.store or self._made(config), None
        loaded = opened(self.plan, self._case(contender), self._words(contender), store=store)
        self.say(f"{contender}: ready after {loaded.load_s:.1f} s, horizon {horizon}")
        try:
            with recited(loaded.parts, self.texts, asks_early=horizon == "layer") as recital:
                capture_anew(loaded.parts)
                measured = self._decode_all(contender, loaded, recital)
                self.done[contender] = Outcome(measured, horizon)
                self.say(str(measured))
                self._look_closer(contender, loaded, recital)
        finally:
            # not the engine's close, which would free the experts
            self.store = loaded.parts.release()
        return True

    def close(self) -> None:
        """Free the experts."""
        if self.store is not None:
            self.store.close()
            self.store = None

    def _decode_all(self, contender: Contender, loaded: Loaded, recital: Recital) -> Measured:
        settle_on_first(loaded.parts, loaded.engine, recital, self.texts)
        return Measured(
            case=self._case(contender),
            decodes=decode_texts(loaded.engine, recital, self.texts),
            ttfts_ms={},
            slabs=loaded.slabs,
            load_s=loaded.load_s,
            start_s=loaded.start_s,
        )

    def _look_closer(self, contender: Contender, loaded: Loaded, recital: Recital) -> None:
        """What is asked of some: a text for the simulator, and where a step's time goes."""
        if self.counts(contender):
            counted = attempt(
                f"counted text of {contender}", partial(decode_counted, loaded.engine, recital, self.texts)
            )
            self.num_failed += counted is None
            self.done[contender] = self.done[contender]._replace(counted=counted)
        if self.profiles(contender):
            step = attempt(f"profile of {contender}", partial(self._profile, loaded, recital))
            self.num_failed += step is None
            self.done[contender] = self.done[contender]._replace(step=step)

    def _profile(self, loaded: Loaded, recital: Recital) -> StepTime:
        """Of a whole text: behind a prompt more is missed than later."""
        recital.seek(0)
        works, num_steps = profile_steps(loaded.engine, self.texts.tokens, self.texts.said(0, PROMPT))
        return StepTime.of(works, num_steps=num_steps)

    def _made(self, config: ResolvedConfig) -> ExpertStore:
        store = random_store(config)
        self.record_bytes = store.stored_bytes
        self.say(f"{store.bank_bytes / 1e9:.1f} GB of experts made, {self.record_bytes / 1e6:.2f} MB each")
        return store

    def _config(self, contender: Contender) -> Config:
        return config_of(self.plan, self._case(contender), self._words(contender))

    def _case(self, contender: Contender) -> Case:
        mode = "graph" if self.is_captured else "eager"
        policy = "lru" if contender.horizon is None else "seqmoe"
        return Case(policy, contender.residency, mode, contender.misses)

    def _words(self, contender: Contender) -> dict[str, Any]:
        """What the configuration of its engine says beside residency and mode."""
        experts = "checkpoint" if self.experts_format == "bf16" else self.experts_format
        words: dict[str, Any] = {"model": {"experts": experts}, "misses": {"handler": contender.misses}}
        if contender.horizon is None:
            return words | {"eviction": {"policy": "lru"}}
        prediction = {"path": str(self.predictor), "horizon": contender.horizon}
        return words | {"preset": "seqmoe", "prediction": prediction}

    # ---- what they are read against

    def bound(self, residency: float) -> bool:
        """Find out what Belady's optimum would come to. Returns that it is done."""
        self.bounds[residency] = bound_of(
            self.trace, residency, record_bytes=self.record_bytes, link_gb_s=self.link_gb_s
        )
        return True

    def simulate(self, contender: Contender, foreseen: Foreseen | None) -> bool:
        """The same policies on the same texts. `foreseen`: what is forecast there, None for LRU. Returns that
        it is done."""
        outcome, full = self.done[contender], self.done[FULL].measured
        machine = Machine(
            layer_ms=1e3 * (1 / full.tok_s + self._own_s(contender)) / self.trace.num_layers,
            record_bytes=self.record_bytes,
            link_gb_s=self.link_gb_s,
            copies_in_flight=1,  # as the worker of captured steps sends them
            overtakes=self.is_captured,
        )
        scenario = Scenario(residency=contender.residency, machine=machine)
        if foreseen is not None:
            schedule = "jsd" if self.is_captured else "none"  # on a CPU nothing is copied ahead
            scenario = replace(scenario, eviction="belady", schedule=schedule, predictor=foreseen.name)
        hits = simulated_hits(
            self.texts.with_counted(), scenario, num_counted=self.texts.counted, predictor=foreseen
        )
        self.done[contender] = outcome._replace(simulated=hits)
        self.say(f"{contender}: hits {100 * hits:.2f} % in the simulator")
        return True

    def _own_s(self, contender: Contender) -> float:
        """What the kernels of its policy add to a step, by the one residency at which that was profiled."""
        alike = (each for each in self.done if each.horizon == contender.horizon)
        return 1e-6 * max(self.done[each].own_us for each in alike)

    def foresee(self, horizon: Horizon) -> Foreseen:
        """All forecasts of the texts, once for all residencies."""
        (predictor,) = predictors_of(read_predictor(self.predictor), 1, nearest=horizon)
        return Foreseen(predictor, self.texts.with_counted())

    # ---- what is told

    def rows(self) -> list[Row]:
        """Of what was measured so far."""
        trace = self.trace
        note = (
            f"{trace.num_layers} layers of {trace.num_experts} experts, random weights, {self.plan.device}; "
            f"routing of {self.info.model}, {self.info.decoding}, load entropy {trace.load_entropy():.3f}; "
            f"{self.plan.runs} texts of {self.texts.tokens} tokens; link {self.link_gb_s:.1f} GB/s, "
            f"{self.record_bytes / 1e6:.2f} MB an expert"
        )
        return rows_of(self.done, self.bounds, experts_format=self.experts_format, note=note)

    def say(self, what: str) -> None:
        """To whoever looks on, with the seconds so far."""
        print(f"[{time.perf_counter() - self.began_s:5.1f} s] {what}", flush=True)


def _horizon(config: ResolvedConfig) -> Horizon:
    horizon = config.prediction.horizon
    assert horizon != "auto", "a predictor that lies somewhere has its horizon decided"
    return horizon


def bound_of(trace: Trace, residency: float, *, record_bytes: int, link_gb_s: float) -> Bound:
    """Of the whole trace, whatever is prefetched. `record_bytes`: of an expert, as it crosses the link."""
    (result,) = run_sweep(trace, Sweep(residencies=(residency,), evictions=("oracle_belady",)))
    moved = (1 - result.hit_rate) * trace.num_layers * trace.top_k * record_bytes
    return Bound(result.hit_rate, moved / (1e9 * link_gb_s))
