"""Speculation on the bundled model, beside plain decoding: tokens a pass, copies, time (PSR, Table 9).

`python -m bench.speculation`. Greedy, a quarter of the experts resident, on device `cpu`, where a copy costs
little: what a link would make of it follows from copies and passes. Engines answer in turns, and a speedup is
that of one turn, so that whatever else the machine does falls on all of them. Repetitive prompts begin
something that goes on alike; plain ones do not, though a small model's greedy text repeats itself by and by.
The block drafter is the bundled one, asked where the text does not repeat itself; `network` is it alone.
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
from hetero_runtime.assembly import assemble
from hetero_runtime.generation import Completion
from hetero_runtime.planned import plan_for
from hetero_runtime.source import config_from
from hetero_runtime.speculation.repeats_first import RepeatsFirst

DEVICE = "cpu"

REPETITIVE = (
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    "The cat sat on the mat. The dog sat on the mat. The cow sat on the mat. The",
    "Name: Anna. Age: 31. City: Rome.\nName: Paul. Age: 28. City: Oslo.\nName: Mary. Age:",
    "one two three four five one two three four five one two three",
)
TEXTS = {"plain": PROMPTS, "repetitive": REPETITIVE}
DRAFTERS = {"lookup": "prompt_lookup", "block": "block"}
BLOCKS = {"policy": "block_selection"}
NETWORK = "network_exact"


def engines() -> dict[str, dict[str, Any]]:
    """Sections by name: plain decoding, then each drafter with the routers' own choice, and with one set of
    experts a draft; at last the block drafter's network alone."""
    found: dict[str, dict[str, Any]] = {"decoding": {}}
    for name, drafter in DRAFTERS.items():
        found[f"{name}_exact"] = {"speculation": {"drafter": drafter}}
        found[f"{name}_blocks"] = {"speculation": {"drafter": drafter}, "routing": BLOCKS}
    return {**found, NETWORK: {"speculation": {"drafter": "block"}}}


class Measured(NamedTuple):
    """One engine over one kind of text. `speedups`: over plain decoding, turn by turn."""

    texts: list[tuple[int, ...]]
    ms_per_token: float
    tokens_per_pass: float
    copies_per_token: float
    accepted: float
    speedups: list[float]

    @classmethod
    def of(cls, engine: Engine, before: Any, answers: list[Completion], plain: list[Completion]) -> Measured:
        """What `engine` has done since its statistics were `before`."""
        after = engine.stats()
        tokens = after.decode.tokens - before.decode.tokens
        drafted = after.drafts.drafted - before.drafts.drafted
        pairs = zip(answers, plain, strict=True)
        return cls(
            texts=[answer.token_ids for answer in answers],
            ms_per_token=statistics.median(1e3 / answer.timings.tok_s for answer in answers),
            tokens_per_pass=tokens / (after.decode.passes - before.decode.passes),
            copies_per_token=(after.decode.cache.loads - before.decode.cache.loads) / tokens,
            accepted=(after.drafts.accepted - before.drafts.accepted) / drafted if drafted else 0.0,
            speedups=[ours.timings.tok_s / theirs.timings.tok_s for ours, theirs in pairs],
        )


def load(name: str, sections: dict[str, Any]) -> Engine:
    """The bundled model, in float32: plain decoding's very tokens, so that all decode the same text."""
    settings = {
        "device": DEVICE,
        "model": {"dtype": "float32"},
        "memory": {"residency": 0.25},
        "execution": {"max_rows": 1, "max_length": 1024},
    }
    parts = assemble(plan_for(config_from(None, settings | sections)).config)
    if name == NETWORK:
        assert parts.speculation is not None, "the network drafts"
        assert isinstance(parts.speculation.drafter, RepeatsFirst), "repetitions are asked before the network"
        parts.speculation = parts.speculation._replace(drafter=parts.speculation.drafter.other)
    return Engine(parts)


def measure(prompts: Sequence[str], *, num_tokens: int, rounds: int) -> dict[str, Measured]:
    """Every engine's answers to `prompts`, taken in turns, `rounds` times."""
    loaded = {name: load(name, sections) for name, sections in engines().items()}
    answers: dict[str, list[Completion]] = {name: [] for name in loaded}
    for engine in loaded.values():
        engine.generate(prompts[0], max_tokens=8)
    before = {name: engine.stats() for name, engine in loaded.items()}
    for prompt in [*prompts] * rounds:
        for name, engine in loaded.items():
            answers[name].append(engine.generate(prompt, max_tokens=num_tokens, ignore_eos=True))
    measured = {
        name: Measured.of(engine, before[name], answers[name], answers["decoding"])
        for name, engine in loaded.items()
    }
    for engine in loaded.values():
        engine.close()
    return measured


def rows_of(kind: str, measured: dict[str, Measured]) -> list[Row]:
    """Everything about one kind of text."""
    plain = measured["decoding"]
    note = (
        f"{len(set(plain.texts))} greedy texts of {len(plain.texts[0])} tokens, float32, 25 % resident, LRU"
    )
    rows = []
    for name in measured:
        if name != "decoding":
            rows += _engine_rows(name, kind, measured[name], plain=plain, note=note)
    return rows


def _engine_rows(name: str, kind: str, ours: Measured, *, plain: Measured, note: str) -> list[Row]:
    pairs = zip(ours.texts, plain.texts, strict=True)
    return [
        Row(
            id=f"speculation.{name}_tau_{kind}",
            value=ours.tokens_per_pass,
            unit="tokens a pass",
            note=f"k=15, {ours.accepted:.0%} of drafted tokens accepted; {note}",
        ),
        Row(
            id=f"speculation.{name}_copies_{kind}",
            value=ours.copies_per_token,
            unit="copies a token",
            reference=f"plain decoding: {plain.copies_per_token:.2f}",
            note=note,
        ),
        Row(
            id=f"speculation.{name}_ms_{kind}",
            value=ours.ms_per_token,
            unit="ms a token",
            reference=f"plain decoding: {plain.ms_per_token:.1f} ms",
            note=f"speedup {statistics.median(ours.speedups):.2f}, the median of {len(ours.speedups)} turns",
        ),
        Row(
            id=f"speculation.{name}_equal_{kind}",
            value=statistics.mean(a == b for a, b in pairs),
            unit="share of texts",
            target="==1" if name.endswith("exact") else None,
            note="equal to plain decoding's; block selection is another model",
        ),
    ]


def speedup_row(measured: dict[str, Measured]) -> Row:
    """What the block drafter, exactly verified, gains on repetitive text."""
    ours, plain = measured["block_exact"], measured["decoding"]
    low, high = min(ours.speedups), max(ours.speedups)
    return Row(
        id="psr.spec_speedup",
        value=statistics.median(ours.speedups),
        unit="ratio",
        target=">=1.5",
        reference=f"plain decoding: {plain.ms_per_token:.1f} ms a token",
        note="block drafter where the text does not repeat itself, plain decoding's tokens, repetitive text; "
        f"tau {ours.tokens_per_pass:.2f}, "
        f"{ours.copies_per_token:.1f} copies a token beside {plain.copies_per_token:.1f}; median of "
        f"{len(ours.speedups)} turns, from {low:.2f} to {high:.2f}; the text's repetitions alone "
        f"{statistics.median(measured['lookup_exact'].speedups):.2f}, the network alone "
        f"{statistics.median(measured[NETWORK].speedups):.2f}",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write `speculation.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128, help="decoded for each prompt")
    parser.add_argument("--rounds", type=int, default=3, help="turns over all prompts")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args(arguments)
    by_kind = {
        kind: measure(prompts, num_tokens=options.tokens, rounds=options.rounds)
        for kind, prompts in TEXTS.items()
    }
    rows = [row for kind, measured in by_kind.items() for row in rows_of(kind, measured)]
    ResultFile.write("speculation", [speedup_row(by_kind["repetitive"]), *rows], folder=options.results)


if __name__ == "__main__":
    main()
