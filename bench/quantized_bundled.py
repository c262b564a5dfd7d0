"""What quantised experts cost the bundled model: error of their weights, nats a token of held-out text.

    python -m bench.quantized_bundled CORPUS

CORPUS holds the sources that the model was trained on; text is of their held-out split. The same on an idle
and on a busy machine. The model's experts are narrow (64 columns), which is hard on scales of 128.

No `DEVICE`: it needs the corpus, so `python -m bench` does not run it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bench.harness import ResultFile, Row
from bench.psr_frontier import held_out
from hetero_runtime.assembly import assemble
from hetero_runtime.bundled import model_path
from hetero_runtime.config import load_config
from hetero_runtime.evaluation import TokenIds
from hetero_runtime.evaluation.configuration import for_evaluation
from hetero_runtime.evaluation.harness import Harness
from hetero_runtime.evaluation.perplexity import Perplexity
from hetero_runtime.hf.tokens import load_tokenizer
from hetero_runtime.planned import plan_for

FORMATS = ("checkpoint", "int8", "fp8", "int4")
NUM_WINDOWS = 48
"""Of 256 tokens."""
ROWS_AT_ONCE = 16


def main(corpus: Path) -> None:
    """Score every format and write the result file."""
    windows = held_out(corpus, load_tokenizer(model_path()), NUM_WINDOWS)
    plain = measure("checkpoint", windows)
    rows = [*plain]
    for experts in FORMATS[1:]:
        rows += measure(experts, windows, plain_nats=plain[0].value)
    ResultFile.write("quantized_bundled", rows)


def measure(experts: str, windows: Sequence[TokenIds], plain_nats: float | None = None) -> list[Row]:
    """Nats a token, how many more than without quantising, bytes of the bank, error of the weights."""
    settings = {
        "device": "cpu",
        "model": {"experts": experts},
        "memory": {"residency": 1.0},
        "execution": {"max_length": 1024},
    }
    parts = assemble(plan_for(for_evaluation(load_config(settings))).config)
    try:
        found = Perplexity.of(Harness(parts, rows_at_once=ROWS_AT_ONCE).score(windows))
        errors, bank_bytes = parts.store.errors, parts.store.bank_bytes
    finally:
        parts.close()
    note = f"{found.num_tokens:,} tokens of held-out text, standard error {found.standard_error:.4f}"
    rows = [Row(id=f"quantized.{experts}.nats", value=found.nats, unit="nats/token", note=note)]
    if plain_nats is not None:
        rows.append(Row(id=f"quantized.{experts}.excess", value=found.nats - plain_nats, unit="nats/token"))
    rows.append(Row(id=f"quantized.{experts}.bank", value=bank_bytes / 1e6, unit="MB"))
    if errors is not None:
        most = f"at most {max(errors):.4f}, layer {errors.index(max(errors))}"
        mean = sum(errors) / len(errors)
        rows.append(Row(id=f"quantized.{experts}.weight_error", value=mean, unit="ratio", note=most))
    return rows


if __name__ == "__main__":
    main(Path(sys.argv[1]))
