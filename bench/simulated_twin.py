"""What the simulator would have hit where an engine did: the same policies on the same tokens.

The two differ by what the simulator only imagines: copies and their time, and a prompt, which an engine reads
in one pass and the simulator token by token.
"""

from __future__ import annotations

from dataclasses import replace

from hetero_scheduler.predict import Predictor
from hetero_scheduler.simulator import Scenario, simulate
from hetero_scheduler.trace import Trace


def simulated_hits(
    trace: Trace, scenario: Scenario, *, num_counted: int, predictor: Predictor | None = None
) -> float:
    """Hit rate of the last `num_counted` tokens of `trace`, behind all that comes before them.

    `predictor`: a trained one, which is what the scenario's name for it then means. Raises what `simulate`
    raises.
    """
    before = trace.num_tokens - num_counted
    uncounted = (before + 0.5) / trace.num_tokens  # half a token more: it is rounded down
    return simulate(trace, replace(scenario, uncounted=uncounted), predictor=predictor).hit_rate
