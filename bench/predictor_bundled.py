"""How well the bundled model's predictor foresees routing, on documents that its training never looked at.

`python -m bench.predictor_bundled TRACE PREDICTOR`: the trace that `hetero-runtime trace` recorded, and what
`hetero-runtime train-predictor TRACE` made of it. Small models route by token far more than big ones, and the
token to come is not known here: read the shares against the rivals beside them, not against a big model's.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import ResultFile, Row, measure
from hetero_runtime.prediction import RouterFingerprint, StoredPredictor, read_predictor
from hetero_runtime.trace.file import TraceInfo, read_trace
from hetero_scheduler.predict.mamba2 import Mamba2Predictor
from hetero_scheduler.predict.recall import Recall, measure_recall
from hetero_scheduler.predict.training_data import DocumentSplit, split_documents
from hetero_scheduler.trace import Trace

DISTANCES = (1, 2, 4, 8)
TIMED_STEPS = 50


def recall_rows(stored: StoredPredictor, trace: Trace, info: TraceInfo) -> list[Row]:
    """Recall one to eight steps ahead with the rivals beside it, and what shuffled steps leave of it."""
    split = _split_of(stored, trace)
    found = measure_recall(stored.models, trace, train=split.train, test=split.test)
    recalls = {(recall.predictor, recall.distance): recall for recall in found}
    note = f"{info.decoding} held-out text, {len(split.test)} test documents, {len(split.train)} trained on"
    rows = []
    for distance in DISTANCES:
        rivals = [recalls[name, distance] for name in ("first-order", "persistence", "static")]
        for field, name in (("at_k", "k"), ("at_k3", "k3"), ("at_2k", "2k")):
            rows.append(
                Row(
                    id=f"predict.bundled_recall_{name}" + (f"_{distance}" if distance > 1 else ""),
                    value=getattr(recalls["mamba2", distance], field),
                    unit="share",
                    reference=_beside(rivals, field),
                    note=f"{note}; {distance} ahead" if field == "at_k" else "",
                )
            )
    mixed = measure_recall(stored.models, shuffled(trace), train=split.train, test=split.test, horizon=1)
    chance = f"by chance {trace.top_k / trace.num_experts:.3f}"
    shuffled_note = "the same predictor, the steps of each document in a random order"
    rows.append(
        Row(
            id="predict.bundled_recall_k_shuffled",
            value=mixed[0].at_k,
            unit="share",
            reference=chance,
            note=shuffled_note,
        )
    )
    return rows


def cost_rows(stored: StoredPredictor, trace: Trace, about: str = "") -> list[Row]:
    """What a step of prediction takes on this CPU, and how balanced the trace's load is."""
    predictor = Mamba2Predictor(stored.models)

    def predict_steps() -> None:
        predictor.reset()
        for step in range(TIMED_STEPS):
            for layer in range(trace.num_layers):
                predictor.observe(step, layer, trace.logits[step % trace.num_tokens, layer])

    ms = measure(predict_steps).median / TIMED_STEPS * 1e3
    parameters = sum(p.numel() for model in stored.models for p in model.parameters())
    note = f"all groups, one step and {predictor.horizon - 1} recursive ones, eager on the CPU"
    size = f"{trace.num_tokens} tokens, {len(trace.bounds) - 1} documents"
    entropy_note = f"{size}; {about}" if about else size
    return [
        Row(id="predict.bundled_step_ms", value=ms, unit="ms", note=note),
        Row(id="predict.bundled_bytes", value=parameters * 4, unit="bytes", note="float32"),
        Row(id="predict.bundled_entropy", value=trace.load_entropy(), unit="ratio", note=entropy_note),
    ]


def shuffled(trace: Trace, seed: int = 0) -> Trace:
    """The same steps, those of each document in a random order."""
    draw = np.random.default_rng(seed)
    documents = zip(trace.bounds[:-1], trace.bounds[1:], strict=True)
    order = np.concatenate([draw.permutation(np.arange(first, last)) for first, last in documents])
    return dataclasses.replace(
        trace, logits=trace.logits[order], topk=trace.topk[order], tokens=trace.tokens[order]
    )


def _split_of(stored: StoredPredictor, trace: Trace) -> DocumentSplit:
    """The split of the training. Raises ValueError when the predictor was trained on another trace."""
    trained_on: dict[str, Any] = stored.notes["trace"]
    if trained_on["num_tokens"] != trace.num_tokens:
        raise ValueError(
            f"the predictor was trained on {trained_on['num_tokens']} tokens, this trace has "
            f"{trace.num_tokens}: which documents it has not seen is unknown"
        )
    return split_documents(len(trace.bounds) - 1, seed=stored.notes["training"]["seed"])


def _beside(rivals: list[Recall], field: str) -> str:
    return ", ".join(f"{rival.predictor} {getattr(rival, field):.3f}" for rival in rivals)


def main() -> None:
    """Measure and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("predictor", type=Path)
    parser.add_argument("--about", default="", help="how the trace was recorded: kept with its load entropy")
    arguments = parser.parse_args()
    trace, info = read_trace(arguments.trace)
    stored = read_predictor(arguments.predictor, RouterFingerprint.of_trace(trace, info))
    rows = [*recall_rows(stored, trace, info), *cost_rows(stored, trace, arguments.about)]
    ResultFile.write("predictor_bundled", rows)


if __name__ == "__main__":
    main()
