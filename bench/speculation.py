"""Speculation on the bundled model, beside plain decoding: tokens a pass, copies, time.

`python -m bench.speculation`. Greedy, a quarter of the experts resident, on device `cpu`, where a copy costs
little: what a link would make of it follows from copies and passes. Engines answer in turns, so that whatever
else the machine does falls on all of them. Repetitive prompts begin something that goes on alike; plain ones
do not, though a small model's greedy text repeats itself by and by.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.bundled_decode import PROMPTS
from bench.harness import RESULTS, ResultFile, Row
from hetero_runtime import Engine
from hetero_runtime.generation import Completion

DEVICE = "cpu"

REPETITIVE = (
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    "The cat sat on the mat. The dog sat on the mat. The cow sat on the mat. The",
    "Name: Anna. Age: 31. City: Rome.\nName: Paul. Age: 28. City: Oslo.\nName: Mary. Age:",
    "one two three four five one two three four five one two three",
)
TEXTS = {"plain": PROMPTS, "repetitive": REPETITIVE}
LOOKUP = {"drafter": "prompt_lookup"}
ENGINES: dict[str, dict[str, Any]] = {
    "decoding": {},
    "exact": {"speculation": LOOKUP},
    "blocks": {"speculation": LOOKUP, "routing": {"policy": "block_selection"}},
}
"""Plain decoding, then prompt lookup with the routers' own choice and with one set of experts a draft."""


class Measured(NamedTuple):
    """One engine over one kind of text."""

    texts: list[tuple[int, ...]]
    ms_per_token: float
    tokens_per_pass: float
    copies_per_token: float
    accepted: float


def load(sections: dict[str, Any]) -> Engine:
    """The bundled model, in float32: plain decoding's very tokens, so that all decode the same text."""
    return Engine.load(
        None,
        device="cpu",
        model={"dtype": "float32"},
        memory={"residency": 0.25},
        execution={"max_rows": 1, "max_length": 1024},
        **sections,
    )


def measure(prompts: Sequence[str], num_tokens: int) -> dict[str, Measured]:
    """Every engine's answers to `prompts`, taken in turns."""
    engines = {name: load(sections) for name, sections in ENGINES.items()}
    answers: dict[str, list[Completion]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.generate(prompts[0], max_tokens=8)
    before = {name: engine.stats() for name, engine in engines.items()}
    for prompt in prompts:
        for name, engine in engines.items():
            answers[name].append(engine.generate(prompt, max_tokens=num_tokens, ignore_eos=True))
    measured = {}
    for name, engine in engines.items():
        after, began = engine.stats(), before[name]
        tokens = after.decode.tokens - began.decode.tokens
        drafted = after.drafts.drafted - began.drafts.drafted
        measured[name] = Measured(
            texts=[answer.token_ids for answer in answers[name]],
            ms_per_token=statistics.median(1e3 / answer.timings.tok_s for answer in answers[name]),
            tokens_per_pass=tokens / (after.decode.passes - began.decode.passes),
            copies_per_token=(after.decode.cache.loads - began.decode.cache.loads) / tokens,
            accepted=(after.drafts.accepted - began.drafts.accepted) / drafted if drafted else 0.0,
        )
        engine.close()
    return measured


def rows_of(kind: str, num_tokens: int) -> list[Row]:
    """Everything about one kind of text."""
    measured = measure(TEXTS[kind], num_tokens)
    plain = measured["decoding"]
    rows = []
    for name in ("exact", "blocks"):
        ours = measured[name]
        equal = statistics.mean(a == b for a, b in zip(ours.texts, plain.texts, strict=True))
        note = f"prompt lookup, k=15, {len(ours.texts)} greedy texts of {num_tokens} tokens, float32"
        rows += [
            Row(
                id=f"speculation.{name}_tau_{kind}",
                value=ours.tokens_per_pass,
                unit="tokens a pass",
                note=f"{ours.accepted:.0%} of drafted tokens accepted; {note}",
            ),
            Row(
                id=f"speculation.{name}_copies_{kind}",
                value=ours.copies_per_token,
                unit="copies a token",
                reference=f"plain decoding: {plain.copies_per_token:.2f}",
                note=f"25 % resident, LRU; {note}",
            ),
            Row(
                id=f"speculation.{name}_over_decoding_{kind}",
                value=plain.ms_per_token / ours.ms_per_token,
                unit="ratio",
                reference=f"plain decoding: {plain.ms_per_token:.1f} ms a token",
                note=f"{ours.ms_per_token:.1f} ms; medians, taken in turns",
            ),
            Row(
                id=f"speculation.{name}_equal_{kind}",
                value=equal,
                unit="share of texts",
                target="==1" if name == "exact" else None,
                note="equal to plain decoding's; block selection is another model",
            ),
        ]
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write `speculation.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128, help="decoded for each prompt")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args(arguments)
    rows = [row for kind in TEXTS for row in rows_of(kind, options.tokens)]
    ResultFile.write("speculation", rows, folder=options.results)


if __name__ == "__main__":
    main()
