"""What fewer image tokens cost in right answers, by kind of question (VisMMOE, Table 3).

The small vision-language model is asked held-out questions once for each method and keep ratio. An answer is
right when it is the one right answer, letter for letter, as greedy decoding gives it.

    python -m bench.vl_accuracy --num 800

Many questions about one picture are read in one pass, in float32: the tokens that the engine would keep, the
answers that it would give (`tests/bench/vl/test_compressed.py` compares them).
"""

from __future__ import annotations

from collections.abc import Mapping

from bench.harness import ResultFile, Row
from bench.vl.arguments import parser_of
from bench.vl.comparison import Outcome, compare, load_reader
from bench.vl.held_out import ask_rows
from bench.vl_working_set import CASES, KEEP_RATIOS, Case
from hetero_scheduler.compression import TokenSelector, make_selector

DEVICE = "cpu"


def selector_of(case: Case) -> TokenSelector | None:
    """As the engine's, with its defaults; None where all tokens are kept."""
    return None if case.method == "none" else make_selector(case.method, keep_ratio=case.keep_ratio)


def rows_of(outcomes: Mapping[Case, Outcome], *, about: str) -> list[Row]:
    """Accuracy of all cases, and what Algorithm 1 loses against saliency alone."""
    rows = []
    for case, outcome in outcomes.items():
        name = f"vl.accuracy_{round(100 * case.keep_ratio)}_{case.method}"
        rows.append(Row(id=name, value=outcome.mean, unit="share", note=f"mean over kinds; {about}"))
        rows += [
            Row(id=f"{name}_{kind}", value=outcome.accuracy(kind), unit="share", note=f"{asked} questions")
            for kind, asked in outcome.asked.items()
            if asked
        ]
    for keep in KEEP_RATIOS:
        affinity, saliency = outcomes[Case("affinity", keep)], outcomes[Case("saliency", keep)]
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
    parser = parser_of("vl_accuracy", num=800, num_of="pictures, up to ten questions each")
    parser.add_argument("--prefix", type=int, default=4, help="MoE layers before the cut")
    arguments = parser.parse_args()
    reader = load_reader(arguments.model, arguments.device)
    held_out = ask_rows(arguments.num, reader.tokenizer)
    ways = {case: selector_of(case) for case in CASES}
    outcomes = compare(reader, held_out, ways, pinned=arguments.prefix)
    about = f"{arguments.num} held-out pictures, {arguments.prefix} layers before the cut"
    ResultFile.write("vl_accuracy", rows_of(outcomes, about=about), folder=arguments.out)


if __name__ == "__main__":
    main()
