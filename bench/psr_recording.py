"""What the policies' bench replays: routers and tokens of real text, laid over a large geometry.

trace      the bundled model on the text of `bench/text`, or a file of `hetero-runtime trace --early`
documents  nine tenths calibrate; of the others one a run is decoded, the same by every policy
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from bench.models.random_geometry import RandomGeometry
from bench.traces.bundled import record_bundled
from bench.traces.laid_over import for_sigmoid, laid_over, whole_documents
from hetero_runtime.trace import read_trace
from hetero_scheduler.trace import Trace

CALIBRATED = 0.9
"""Share of the documents that calibrate."""


class Heard(NamedTuple):
    """A trace whose documents are all equally long. `source`: what it is of."""

    trace: Trace
    source: str

    def fitted(self, geometry: RandomGeometry, *, is_sigmoid: bool) -> Recording:
        """As the routers of a model of `geometry` say it. Raises what `laid_over` raises."""
        trace = for_sigmoid(self.trace) if is_sigmoid else self.trace
        return Recording(laid_over(trace, layers=geometry.layers, top_k=geometry.top_k), {}, self.source)


class Recording(NamedTuple):
    """What is replayed. `texts`: what is decoded, by the token of `trace` where it begins."""

    trace: Trace
    texts: dict[int, list[int]]
    source: str


def recorded(file: Path | None, corpus: Path, window: int, *, most: int | None = None) -> Heard:
    """The trace in `file`, or one of `most` documents of `corpus` that is made now, in documents of `window`
    tokens."""
    if file is None:
        trace, info = record_bundled(corpus, length=window, most=most)
    else:
        trace, info = read_trace(file)
    name = "the bundled model" if file is None else info.model
    return Heard(whole_documents(trace, window), f"routing of {name}, {info.decoding}")


def divided(recording: Recording, *, num_runs: int) -> tuple[Recording, Trace]:
    """`recording` with its texts, one a run, and what calibrates: others. Raises ValueError for too few."""
    trace = recording.trace
    num_documents, window = len(trace.bounds) - 1, int(trace.bounds[1])
    num_lessons = min(int(CALIBRATED * num_documents), num_documents - num_runs)
    if num_lessons < 1:
        raise ValueError(f"{num_documents} documents of {window} tokens for {num_runs} runs and calibration")
    begins = [int(begin) for begin in trace.bounds[num_lessons : num_lessons + num_runs]]
    texts = {begin: trace.tokens[begin : begin + window].tolist() for begin in begins}
    end = int(trace.bounds[num_lessons])
    lesson = Trace(trace.logits[:end], trace.topk[:end], trace.tokens[:end], trace.bounds[: num_lessons + 1])
    return recording._replace(texts=texts), lesson
