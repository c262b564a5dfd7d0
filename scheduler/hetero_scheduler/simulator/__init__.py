"""Replay of a recorded routing through a cache, by the policy code that serves.

simulate(trace, Scenario(eviction="lru", residency=0.25)).hit_rate

scenario.py     what is simulated: policies, residency, the machine's times
replay.py       the reference: slot machine, schedule, predictor, imagined copies    (any policy)
fast.py         the same decisions, compiled                                         (cache only)
fast_ahead.py   the same again                    (probabilistic Belady, forecasts made before by foreseen.py)
result.py       hits, late ones, misses, waste, stalls
"""

from __future__ import annotations

from hetero_scheduler.simulator.result import Counts, SimulationResult
from hetero_scheduler.simulator.scenario import Machine, Pool, Scenario
from hetero_scheduler.simulator.simulate import simulate

__all__ = ["Counts", "Machine", "Pool", "Scenario", "SimulationResult", "simulate"]
