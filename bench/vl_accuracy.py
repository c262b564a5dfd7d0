"""What fewer image tokens cost in right answers, by kind of question (VisMMOE, Table 3).

The small vision-language model (`bench.vl.train`) answers held-out questions greedily through the engine,
once for each method and keep ratio. An answer is right when it is the one right answer, letter for letter.

    python -m bench.vl_accuracy MODEL --num 100

Answers are the same on every machine and at every residency, up to rounding of its matrix products.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.harness import RESULTS, ResultFile, Row
from bench.vl.held_out import MEASURED, Asked, ask_each
from bench.vl_working_set import CASES, KEEP_RATIOS, Case, vision_of
from hetero_runtime import Engine

_MOST_TOKENS = 16
"""The longest answer of a measured kind is shorter."""


class Answers(NamedTuple):
    """One case: of each kind which questions were answered rightly."""

    case: Case
    right: dict[str, list[bool]]

    def accuracy(self, kind: str) -> float:
        """Share of the questions of `kind`."""
        return sum(self.right[kind]) / len(self.right[kind])

    @property
    def mean(self) -> float:
        """Mean over kinds."""
        return sum(map(self.accuracy, self.right)) / len(self.right)


def answer(
    folder: Path, asked: dict[str, list[Asked]], case: Case, *, prefix: int, device: str = "cpu"
) -> Answers:
    """All questions, by kind, in the conditions of `case`."""
    memory = {"slabs": "all", "pinned_prefix": prefix}
    settings = {"device": device, "execution": {"max_rows": 1}, "vision": vision_of(case)}
    with Engine.load(folder, memory=memory, **settings) as engine:
        right = {kind: [_is_right(engine, each) for each in questions] for kind, questions in asked.items()}
    return Answers(case, right)


def _is_right(engine: Engine, asked: Asked) -> bool:
    parts = [{"type": "image", "image": asked.image}, {"type": "text", "text": asked.question.text}]
    said = engine.generate(
        [{"role": "user", "content": parts}], max_tokens=_MOST_TOKENS, temperature=0.0
    ).text
    return said.strip() == asked.question.answer


def rows_of(all_answers: Sequence[Answers], *, about: str) -> list[Row]:
    """Accuracy of all cases, and what Algorithm 1 loses against saliency alone."""
    rows = []
    for each in all_answers:
        name = f"vl.accuracy_{round(100 * each.case.keep_ratio)}_{each.case.method}"
        rows.append(Row(id=name, value=each.mean, unit="share", note=f"mean over kinds; {about}"))
        rows += [
            Row(id=f"{name}_{kind}", value=each.accuracy(kind), unit="share", note=f"{len(right)} questions")
            for kind, right in each.right.items()
        ]
    by_case = {each.case: each for each in all_answers}
    for keep in KEEP_RATIOS:
        affinity, saliency = by_case[Case("affinity", keep)], by_case[Case("saliency", keep)]
        rows.append(
            Row(
                id=f"vl.accuracy_lost_{round(100 * keep)}",
                value=saliency.mean - affinity.mean,
                unit="share",
                target="<=0.02",
                note=f"saliency alone less affinity, mean over kinds; {about}",
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.vl_accuracy")
    parser.add_argument("model", type=Path)
    parser.add_argument("--num", type=int, default=100, help="questions a kind")
    parser.add_argument("--prefix", type=int, default=2, help="MoE layers before the cut")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    asked = {kind: ask_each(kind, arguments.num) for kind in MEASURED}
    all_answers = []
    for case in CASES:
        given = answer(arguments.model, asked, case, prefix=arguments.prefix, device=arguments.device)
        all_answers.append(given)
        print(f"{case.name}: {given.mean:.1%}", flush=True)
    about = f"{arguments.model.name}, {arguments.prefix} layers before the cut"
    ResultFile.write("vl_accuracy", rows_of(all_answers, about=about), folder=arguments.out)


if __name__ == "__main__":
    main()
