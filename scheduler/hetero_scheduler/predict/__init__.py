"""Predictors: which experts will the coming steps use?"""

from __future__ import annotations

from hetero_scheduler.predict.base import Forecast, Predictor
from hetero_scheduler.predict.routing import RouterShape
from hetero_scheduler.trace import Trace, count_uses

PREDICTORS = ("none", "frequency", "static_frequency", "persistence", "first_order", "oracle")
"""Predictors that need no training beyond counting; `oracle` only makes sense on its own trace."""

__all__ = ["PREDICTORS", "Forecast", "Predictor", "RouterShape", "make_predictor"]


def make_predictor(
    name: str,
    shape: RouterShape,
    *,
    horizon: int = 9,
    num_groups: int = 2,
    trace: Trace | None = None,
) -> Predictor:
    """The predictor called `name`. Raises ValueError for a name that is none, or when it needs a trace.

    `horizon`: steps ahead. `num_groups`: groups of layers, each forecast when its last layer has routed.
    `trace`: what `static_frequency` and `first_order` count, on other text than they are tried on; and what
    `oracle` reads, the very one that is replayed.
    """
    if name == "none":
        from hetero_scheduler.predict.none import NoPredictor

        return NoPredictor()
    if name == "frequency":
        from hetero_scheduler.predict.frequency import Frequency

        return Frequency(shape, horizon=horizon, num_groups=num_groups)
    if name == "persistence":
        from hetero_scheduler.predict.persistence import Persistence

        return Persistence(shape, horizon=horizon, num_groups=num_groups)
    if name not in PREDICTORS:
        raise ValueError(f"unknown predictor {name!r}; known: {', '.join(PREDICTORS)}")
    if trace is None:
        raise ValueError(f"predictor {name!r} needs a trace")
    if shape != (trace.num_layers, trace.num_experts, trace.top_k):
        raise ValueError(
            f"the trace's {trace.topk.shape[1:]} and {trace.num_experts} experts do not fit {shape}"
        )
    return _make_from_trace(name, shape, horizon=horizon, num_groups=num_groups, trace=trace)


def _make_from_trace(
    name: str, shape: RouterShape, *, horizon: int, num_groups: int, trace: Trace
) -> Predictor:
    if name == "static_frequency":
        from hetero_scheduler.predict.frequency import Frequency

        counts = count_uses(trace.topk, trace.num_experts)
        return Frequency(shape, horizon=horizon, num_groups=num_groups, counts=counts, is_running=False)
    if name == "first_order":
        from hetero_scheduler.predict.first_order import FirstOrder, learn_transitions

        return FirstOrder(shape, learn_transitions(trace), horizon=horizon, num_groups=num_groups)
    from hetero_scheduler.predict.oracle import Oracle

    return Oracle(trace, horizon=horizon, num_groups=num_groups)
