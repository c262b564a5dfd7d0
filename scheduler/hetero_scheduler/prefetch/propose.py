"""Tasks from a forecast (SeqMoE §6.1)."""

from __future__ import annotations

import numpy as np

from hetero_scheduler.predict.base import Forecast
from hetero_scheduler.prefetch.base import Tasks


def propose(forecast: Forecast, *, num_layers: int, per_layer: int) -> Tasks:
    """The `per_layer` likeliest experts of each covered layer at its next run: top_k plus a few (the paper's
    k'). Ties to the lowest expert; one that is not expected at all is worth no transfer, however idle the
    link. Raises ValueError when there are not that many experts.

    Only the forecast's first entry makes tasks; the later ones are for eviction. Experts that are present
    get tasks too: whether they still are is the schedule's question at each transfer. The paper counts steps
    from the one in which the forecast is made; a deadline here is the pos of the run itself.
    """
    first = forecast.probabilities[0]  # [layers, experts]
    if not 1 <= per_layer <= first.shape[1]:
        raise ValueError(f"per_layer is {per_layer}; it must be 1 to {first.shape[1]}")
    expert = np.argsort(-first, axis=1, kind="stable")[:, :per_layer]
    confidence = first[np.arange(len(first))[:, None], expert]
    layer = np.array(forecast.layers, dtype=np.int64)
    deadline = forecast.positions(num_layers)[0]
    tasks = Tasks(
        np.repeat(layer, per_layer),
        expert.reshape(-1).astype(np.int64),
        confidence.reshape(-1).astype(np.float64),
        np.repeat(deadline, per_layer),
    )
    return tasks.take(tasks.confidence > 0)
