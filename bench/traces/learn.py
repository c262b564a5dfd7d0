"""Teach predictors a narrow model's routing, on a GPU in minutes, and measure what they foresee.

    python -m bench.traces.learn DIR --flavour matched --shape 48x128 --out FILE --minutes 2.5

DIR holds what `bench.traces.record` wrote. Predictors learn from `learning`, a tenth of it deciding when to
stop; every recall is of `heldout`, text that neither they nor the model were trained on. Beside the Mamba2
predictor stand a Transformer probe, the same probe taught on shuffled steps (SeqMoE Fig. 1c: whatever it then
knows is frequency, not sequence), and the rivals that only count. A taught predictor is refined: what the
token adds, and the next router where traces hold its early word. What that is worth in hits,
`bench.traces.horizons` replays. Measuring takes as long as teaching: the predictor is written
before, and rows as they come.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bench.harness import RESULTS, ResultFile, Row
from bench.horizons_bundled import HORIZONS
from bench.predictor_bundled import shuffled
from bench.traces.facts import FLAVOURS, row_prefix
from bench.traces.probe import TransformerProbe
from bench.traces.shapes import SHAPES
from hetero_runtime.prediction import RouterFingerprint, write_predictor
from hetero_runtime.trace import TraceInfo, read_trace
from hetero_scheduler.predict.mamba2_block import Mamba2Sizes
from hetero_scheduler.predict.mamba2_model import GroupModel, GroupShape
from hetero_scheduler.predict.recall import (
    Origins,
    Recall,
    Scores,
    find_origins,
    measure_recall,
    recall_at,
    refined_recall,
)
from hetero_scheduler.predict.refinement import Refinement
from hetero_scheduler.predict.refinement_training import (
    RefinementOptions,
    RefinementProgress,
    one_step_shares,
    train_refinement,
)
from hetero_scheduler.predict.routing import layer_groups
from hetero_scheduler.predict.training import (
    STAGES,
    TrainingOptions,
    TrainingProgress,
    train_group,
    train_model,
)
from hetero_scheduler.predict.training_data import DocumentSplit, GroupData
from hetero_scheduler.trace import Trace

VALIDATION = 0.1
"""Share of the documents learned from that decide when to stop."""
COUNTED = 150
"""Documents over which the rivals count: more change nothing but the time."""
STRIDE = 16
FAR = 8
PROBE_SHARE = 0.2
"""Of the minutes: for the probe, and as much for the shuffled one."""
REFINED_SHARE = 0.1
"""Of the minutes: for what the token and the next router add."""
TAUGHT_SHARE = 1 - 2 * PROBE_SHARE - REFINED_SHARE
"""Of the minutes: for the predictor itself."""


class Lesson(NamedTuple):
    """One trace of all documents, and what each is for."""

    trace: Trace
    split: DocumentSplit

    @classmethod
    def of(cls, learning: Trace, heldout: Trace) -> Lesson:
        """Documents of `learning`, mixed kinds, then those of `heldout`, which are the test."""
        trace = Trace.joined([learning, heldout])
        known, total = len(learning.bounds) - 1, len(trace.bounds) - 1
        deciding = max(1, round(VALIDATION * known))
        numbers = np.arange(total, dtype=np.int64)
        return cls(trace, DocumentSplit(numbers[deciding:known], numbers[:deciding], numbers[known:]))


class Student(NamedTuple):
    """How models are made and taught: `width` of the predictor, the options of a group and of refining."""

    width: int
    options: TrainingOptions
    refining: RefinementOptions
    device: str

    def teach(self, lesson: Lesson, tell: Callable[[TrainingProgress], None]) -> list[GroupModel]:
        """A Mamba2 model a group of layers, on the device."""
        trace = lesson.trace
        sizes = Mamba2Sizes(d_model=self.width, state_size=32, head_dim=32)
        return [
            train_group(
                GroupShape(len(group), trace.num_experts, trace.top_k, 2, sizes, 0.05),
                GroupData(trace, group, self.device),
                split=lesson.split,
                options=self.options,
                progress=tell,
            )
            for group in layer_groups(trace.num_layers)
        ]

    def refine(self, models: Sequence[GroupModel], lesson: Lesson) -> tuple[Refinement, list[Recall]]:
        """What more knowledge adds to the forecasts of `models`, and the recall that it then has."""
        trace, split = lesson
        shares = one_step_shares(models, trace)
        refinement = train_refinement(
            trace, shares, split=split, options=self.refining, device=self.device, progress=_tell_refining
        )
        return refinement, refined_recall(refinement, shares, trace, test=split.test, stride=STRIDE)

    def probe(self, lesson: Lesson, tell: Callable[[TrainingProgress], None]) -> list[TransformerProbe]:
        """A Transformer a group of layers: twice as wide, taught by the truth alone."""
        trace, width = lesson.trace, 2 * self.width
        options = replace(self.options, learning_rate=self.options.learning_rate / 4)
        return [
            train_model(
                partial(TransformerProbe.of, len(group), trace.num_experts, trace.top_k, width=width),
                GroupData(trace, group, self.device),
                split=lesson.split,
                options=options,
                stages=("teacher forcing",),
                progress=tell,
            )
            for group in layer_groups(trace.num_layers)
        ]


@torch.no_grad()
def one_step_scores(models: Sequence[GroupModel], trace: Trace, origins: Origins) -> Scores:
    """What `models`, without recurrence, say of the step after each origin. `[N, L, E]`"""
    first, parts = 0, []
    documents, rows = np.unique(origins.documents, return_inverse=True)
    windows = np.stack([trace.bounds[documents], np.diff(trace.bounds)[documents]], axis=1)
    for model in models:
        group = range(first, first + model.shape.num_layers)
        data = GroupData(trace, group, str(next(model.parameters()).device))
        said = np.empty((len(rows), len(group), trace.num_experts), dtype=np.float32)
        for document, window in enumerate(windows):
            states = data.batch(window[None]).states
            logits, _ = model.eval()(states, model.initial_state(1))
            mine = np.flatnonzero(rows == document)
            said[mine] = logits[0, torch.from_numpy(origins.offsets[mine]).to(logits.device)].cpu().numpy()
        parts.append(said)
        first = group.stop
    return np.concatenate(parts, axis=1)


class Taught(NamedTuple):
    """Models on the device, what refines them, and the recall of that."""

    models: list[GroupModel]
    refinement: Refinement
    refined: list[Recall]
    """One step ahead: the token known, then the next router asked as well."""


def recall_rows(recalls: Sequence[Recall], *, prefix: str, note: str) -> list[Row]:
    """Rows of the predictor, with rivals beside it."""
    found = {(recall.predictor, recall.distance): recall for recall in recalls}
    near, far = found["mamba2", 1], found["mamba2", FAR]
    drop, first_order = 100 * (near.at_k3 - far.at_k3), found["first-order", 1].at_k3

    def share(name: str, value: float, reference: str | None = None, **about: str) -> Row:
        return Row(id=f"{prefix}recall_{name}", value=value, unit="share", reference=reference, **about)

    return [
        share("k", near.at_k, f"static {found['static', 1].at_k:.3f}", note=note),
        share("k3", near.at_k3, _rivals(found, 1), target=">=0.9"),
        share("2k", near.at_2k),
        share("k3_8", far.at_k3, _rivals(found, FAR)),
        Row(id=f"{prefix}recall_drop_8", value=drop, unit="points", target="<=4", note="at k + 3"),
        share("k3_first_order", first_order, note="conditional statistics of adjacent tokens"),
    ]


def probe_row(recall_k3: float, probe_k3: float, *, prefix: str) -> Row:
    """The predictor's recall at k + 3 as a share of a Transformer probe's."""
    return Row(
        id=f"{prefix}recall_k3_of_probe",
        value=recall_k3 / probe_k3,
        unit="share",
        reference=f"Transformer probe {probe_k3:.3f}",
        target=">=0.97",
    )


def shuffled_row(shuffled_k: float, probe_k: float, *, prefix: str) -> Row:
    """Recall of a probe that was taught and tested on shuffled steps, beside that of the true order."""
    return Row(
        id=f"{prefix}recall_k_shuffled",
        value=shuffled_k,
        unit="share",
        reference=f"probe on the true order {probe_k:.3f}",
        note="probe of steps in random order",
    )


def _rivals(found: Mapping[tuple[str, int], Recall], distance: int) -> str:
    names = ("first-order", "persistence", "static")
    return ", ".join(f"{name} {found[name, distance].at_k3:.3f}" for name in names)


def horizon_rows(recalls: Sequence[Recall], refined: Sequence[Recall], *, prefix: str) -> list[Row]:
    """Recall at k + 3 of the step to come: a step ahead, with its token known, with the next router asked."""
    step = next(each for each in recalls if (each.predictor, each.distance) == ("mamba2", 1))
    return [
        Row(
            id=f"{prefix}horizon_{name}_recall_k3",
            value=recall.at_k3,
            unit="share",
            note=f"{recall.predictor}; at k {recall.at_k:.3f}, at 2k {recall.at_2k:.3f}",
        )
        for name, recall in zip(HORIZONS, (step, *refined), strict=False)
    ]


Teller = Callable[[str], Callable[[TrainingProgress], None]]


def teach(lesson: Lesson, student: Student, tell: Teller) -> Taught:
    """The predictor of one lesson, refined."""
    models = student.teach(lesson, tell("mamba2"))
    return Taught(models, *student.refine(models, lesson))


def probe(lesson: Lesson, student: Student, tell: Callable[[TrainingProgress], None]) -> tuple[float, float]:
    """Recall one step ahead of Transformer probes that are taught for it, at k and at k + 3."""
    trace, split = lesson
    prober = student._replace(options=_for_probe(student.options))
    origins = find_origins(trace, split.test, stride=STRIDE)
    said, truth = one_step_scores(prober.probe(lesson, tell), trace, origins), trace.topk[origins.tokens + 1]
    return recall_at(said, truth, trace.top_k), recall_at(said, truth, trace.top_k + 3)


def write_with_probes(
    rows: Sequence[Row], lesson: Lesson, student: Student, *, prefix: str, name: str, folder: Path
) -> None:
    """The result file `name`: `rows`, and those of the two probes, each as soon as it is taught."""
    ResultFile.of(name, rows).save(folder)
    recall_k3 = next(row.value for row in rows if row.id == f"{prefix}recall_k3")
    at_k, at_k3 = probe(lesson, student, _teller("probe"))
    rows = [*rows, probe_row(recall_k3, at_k3, prefix=prefix)]
    ResultFile.of(name, rows).save(folder)
    mixed = Lesson(shuffled(lesson.trace), lesson.split)
    shuffled_k, _ = probe(mixed, student, _teller("probe, shuffled"))
    ResultFile.write(name, [*rows, shuffled_row(shuffled_k, at_k, prefix=prefix)], folder=folder)


def _for_probe(options: TrainingOptions) -> TrainingOptions:
    """The probe's part of the time: its one stage takes a share that is meant for two."""
    if options.minutes is None:
        return options
    return replace(options, minutes=options.minutes * len(STAGES) * PROBE_SHARE / TAUGHT_SHARE)


def keep(
    path: Path, taught: Taught, lesson: Lesson, info: TraceInfo, *, recalls: Sequence[Recall] = ()
) -> None:
    """Write the predictor, with where it comes from."""
    documents = {use: len(numbers) for use, numbers in asdict(lesson.split).items()}
    notes = {
        "trace": asdict(info) | {"num_tokens": lesson.trace.num_tokens},
        "documents": documents,
        "recall": [asdict(recall) for recall in (*recalls, *taught.refined)],
    }
    fingerprint = RouterFingerprint.of_trace(lesson.trace, info)
    write_predictor(path, taught.models, fingerprint=fingerprint, notes=notes, refinement=taught.refinement)


def _teller(name: str) -> Callable[[TrainingProgress], None]:
    begun = time.monotonic()

    def tell(at: TrainingProgress) -> None:
        if at.epoch == 1 or at.epoch % 10 == 0:
            seconds = time.monotonic() - begun
            print(
                f"{seconds:5.0f} s  {name}, {at.stage}, epoch {at.epoch}: loss {at.train_loss:.3f}, "
                f"validation {at.validation_loss:.3f} (best {at.best_loss:.3f})",
                flush=True,
            )

    return tell


def _tell_refining(at: RefinementProgress) -> None:
    losses = f"validation {at.validation_loss:.3f} (best {at.best_loss:.3f}, not refined {at.first_loss:.3f})"
    print(f"refinement, epoch {at.epoch}: {losses}", flush=True)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path, help="folder that bench.traces.record wrote")
    parser.add_argument("--flavour", choices=FLAVOURS, required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="predictor file to write")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--minutes", type=float, default=2.5, help="of training, in all")
    parser.add_argument("--width", type=int, default=128, help="hidden features; a multiple of 32")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--epochs", type=int, default=400, help="at most, in each stage")
    parser.add_argument("--token-rank", type=int, default=64, help="numbers learned of each token")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Teach, measure, keep."""
    options = make_parser().parse_args(arguments)
    torch.set_float32_matmul_precision("high")
    learning, info = read_trace(options.traces / "learning.safetensors")
    lesson = Lesson.of(learning, read_trace(options.traces / "heldout.safetensors")[0])
    num_groups = len(layer_groups(lesson.trace.num_layers))
    teaching = TrainingOptions(
        epochs=options.epochs,
        minutes=options.minutes * TAUGHT_SHARE / num_groups,
        patience=12,
        batch=options.batch,
        learning_rate=options.rate,
    )
    refining = RefinementOptions(rank=options.token_rank, minutes=options.minutes * REFINED_SHARE)
    student = Student(options.width, teaching, refining, options.device)
    taught = teach(lesson, student, _teller)
    keep(options.out, taught, lesson, info)
    counted, test = lesson.split.train[:COUNTED], lesson.split.test
    recalls = measure_recall(taught.models, lesson.trace, train=counted, test=test, stride=STRIDE)
    keep(options.out, taught, lesson, info, recalls=recalls)
    # rows without a flavour in their id are the matched trace's of the main shape
    prefix = row_prefix(options.flavour, options.shape).replace("matched_", "")
    tested, learned = len(lesson.split.test), len(lesson.split.train)
    note = f"{info.decoding} held-out text, {tested} documents; learned from {learned} of training text"
    rows = recall_rows(recalls, prefix=prefix, note=note)
    rows += horizon_rows(recalls, taught.refined, prefix=prefix)
    write_with_probes(
        rows,
        lesson,
        student,
        prefix=prefix,
        name=f"predictors_{options.shape}_{options.flavour}",
        folder=options.results,
    )


if __name__ == "__main__":
    main()
