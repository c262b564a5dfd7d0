"""What popularity adds to prompts of the bundled model: experts that are there before their layer asks.

    python -m bench.prefill_bundled CORPUS

CORPUS holds the sources that the model was trained on; prompts are of their held-out split, and frequencies
of the calibration that comes with the model, which is of other text. After each prompt a short answer leaves
the cache as answers do. All of it are counts, the same on an idle and on a busy machine; on device `cpu` a
copy is over at once, so none is late.

No `DEVICE`: it needs the corpus, so `python -m bench` does not run it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.harness import ResultFile, Row
from bench.psr_frontier import held_out
from hetero_gpu import CacheStats
from hetero_runtime.bundled import model_path
from hetero_runtime.engine import Engine
from hetero_runtime.evaluation import TokenIds
from hetero_runtime.hf.tokens import load_tokenizer

VARIANTS = {
    "none": {"schedule": "none"},
    "counted": {"schedule": "popularity", "popularity": "none"},
    "profiled": {"schedule": "popularity"},
}
"""Nothing is fetched ahead; by what the engine counted itself; by what the calibration says as well."""
RESIDENCIES = (0.25, 0.45)
LENGTHS = (16, 64, 256)
"""Tokens of a prompt."""
NUM_PROMPTS = 16
NUM_FIRST = 6
"""Prompts that are each the first of a new engine."""
FIRST_LENGTH = 16
ANSWER = 16


def measure(prefetch: dict[str, str], residency: float, prompts: Sequence[TokenIds]) -> CacheStats:
    """Counters of the prompts' passes, all together."""
    with Engine.load(
        device="cpu", memory={"residency": residency}, prefetch=prefetch, execution={"max_length": 1024}
    ) as engine:
        for seed, ids in enumerate(prompts):
            engine.generate(list(ids), max_tokens=ANSWER, temperature=0.8, seed=seed, ignore_eos=True)
        return engine.stats().prefill.cache


def rows_of(residency: float, length: int, windows: Sequence[TokenIds]) -> list[Row]:
    """Hits of every variant on the first `length` tokens of `windows`, one after the other."""
    prompts = [ids[:length] for ids in windows]
    found = {name: measure(prefetch, residency, prompts) for name, prefetch in VARIANTS.items()}
    where = f"{round(100 * residency)}_of_{length}"
    return _rows(found, where, len(prompts))


def first_rows(residency: float, windows: Sequence[TokenIds]) -> list[Row]:
    """The same where each prompt is the first thing that an engine sees."""
    prompts = [ids[:FIRST_LENGTH] for ids in windows]
    found = {
        name: sum((measure(prefetch, residency, [ids]) for ids in prompts), CacheStats())
        for name, prefetch in VARIANTS.items()
    }
    return _rows(found, f"{round(100 * residency)}_of_{FIRST_LENGTH}_first", len(prompts))


def _rows(found: Mapping[str, CacheStats], where: str, num_prompts: int) -> list[Row]:
    plain = found["none"]
    return [
        Row(
            id=f"prefill.bundled_{name}_hit_{where}",
            value=100 * stats.hit_rate,
            unit="%",
            reference=None if name == "none" else f"nothing fetched ahead {100 * plain.hit_rate:.1f}",
            note=(
                f"{num_prompts} prompts; each requires {stats.required / num_prompts:.0f} experts and moves "
                f"{stats.loads / num_prompts:.0f}, {stats.prefetches / num_prompts:.0f} of them ahead, "
                f"{stats.prefetches_wasted / num_prompts:.1f} for nothing"
            ),
        )
        for name, stats in found.items()
    ]


def main(corpus: Path) -> None:
    """Measure, print, write `prefill_bundled.json`."""
    windows = held_out(corpus, load_tokenizer(model_path()), NUM_PROMPTS)
    rows = [row for share in RESIDENCIES for length in LENGTHS for row in rows_of(share, length, windows)]
    rows += [row for share in RESIDENCIES for row in first_rows(share, windows[:NUM_FIRST])]
    ResultFile.write("prefill_bundled", rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
