"""Many scenarios on one trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

from hetero_runtime.errors import ConfigError
from hetero_scheduler.predict import Predictor
from hetero_scheduler.simulator import Machine, Pool, Scenario, SimulationResult, simulate
from hetero_scheduler.simulator.policies import needs_forecast
from hetero_scheduler.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Every combination of these that can work together."""

    residencies: tuple[float, ...] = (0.15, 0.25, 0.35, 0.45)
    evictions: tuple[str, ...] = ("lru", "lfu", "lfru", "oracle_belady")
    schedules: tuple[str, ...] = ("none",)
    predictors: tuple[str, ...] = ("none",)
    pools: tuple[Pool, ...] = ("global",)
    extra: int = 3
    uncounted: float = 0.1
    machine: Machine = field(default_factory=Machine)

    def scenarios(self) -> list[Scenario]:
        """One each, by pool, policies and residency.

        A predictor that nothing listens to makes no scenario of its own, and neither does a policy that needs
        forecasts together with the predictor `none`. Raises ConfigError for values that cannot be, and when
        nothing is left.
        """
        found: dict[Scenario, None] = {}
        policies = product(self.pools, self.evictions, self.schedules, self.predictors, self.residencies)
        for pool, eviction, schedule, predictor, residency in policies:
            try:
                scenario = Scenario(
                    eviction=eviction,
                    schedule=schedule,
                    predictor=predictor,
                    residency=residency,
                    pool=pool,
                    extra=self.extra,
                    uncounted=self.uncounted,
                    machine=self.machine,
                )
            except ValueError as error:
                raise ConfigError(str(error)) from error
            if not needs_forecast(scenario):
                found[replace(scenario, predictor="none")] = None
            elif predictor != "none":
                found[scenario] = None
        if not found:
            raise ConfigError(
                f"schedules {', '.join(self.schedules)} and evictions {', '.join(self.evictions)} act on "
                "forecasts; choose a predictor"
            )
        return list(found)


def run_sweep(
    trace: Trace,
    sweep: Sweep,
    *,
    trained: Mapping[str, Predictor] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[SimulationResult]:
    """Replay `trace` under every scenario of `sweep`, in their order.

    `trained`: predictors by the name that scenarios use. `progress(done, total)` is called before the first
    and after each. Raises ConfigError for a policy that is none and a residency too small for the trace.
    """
    scenarios, results = sweep.scenarios(), []
    for number, scenario in enumerate(scenarios):
        if progress is not None:
            progress(number, len(scenarios))
        try:
            results.append(simulate(trace, scenario, predictor=(trained or {}).get(scenario.predictor)))
        except ValueError as error:
            raise ConfigError(str(error)) from error
    if progress is not None:
        progress(len(scenarios), len(scenarios))
    return results
