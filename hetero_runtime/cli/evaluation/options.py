"""Options that the evaluations share, and the harness that they run on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hetero_runtime.assembly import Parts
    from hetero_runtime.config import Config, ResolvedConfig
    from hetero_runtime.evaluation import TokensSeen
    from hetero_runtime.evaluation.frontier.contenders import Grid
    from hetero_runtime.evaluation.samples import Sample
    from hetero_runtime.planned import Planned

TextOption = Annotated[
    Path,
    typer.Option("--text", help='A text file, a .jsonl with "text" a line, or a folder of them.'),
]
LengthOption = Annotated[int, typer.Option("--length", min=1, help="Tokens predicted in each window.")]
WindowsOption = Annotated[
    int | None, typer.Option("--windows", min=1, help="This many windows, evenly over the text. None: all.")
]
RowsOption = Annotated[
    int,
    typer.Option("--rows", min=1, help="Most rows of a pass; fewer where their logits take too much memory."),
]
SamplesOption = Annotated[
    Path | None,
    typer.Option(
        "--samples", help="File of the exact model's text: read where it exists, else drawn into it."
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Window i of new samples is drawn with seed + i.")]
LabelOption = Annotated[
    str | None, typer.Option("--label", help="What tables call it. None: the routing policy.")
]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="File of results, question by question, for `eval compare`.")
]
PoliciesOption = Annotated[
    str,
    typer.Option(
        "--policies",
        help="exact, exact_a, cache_prior, cache_prior_a, cache_prior_2, psr, speculative_experts",
    ),
]
BonusOption = Annotated[str, typer.Option("--bonus", help="Lambda.")]
InsertionsOption = Annotated[
    str, typer.Option("--insertions", help="Experts inserted a layer and token (n).")
]
WindowOption = Annotated[str, typer.Option("--window", help="Candidates of the next layer's router.")]
ResidencyOption = Annotated[str, typer.Option("--residency", help="Shares of a layer's experts.")]


def grid_of(policies: str, bonus: str, *, insertions: str, window: str) -> Grid:
    """What the options of a sweep mean; each may name several, with commas between. Raises ConfigError."""
    from hetero_runtime.cli.listed import numbers, whole_numbers, words
    from hetero_runtime.evaluation.frontier.contenders import Grid

    return Grid(
        families=words(policies),
        bonuses=numbers(bonus, "--bonus"),
        insertions=whole_numbers(insertions, "--insertions"),
        windows=whole_numbers(window, "--window"),
    )


def plan_of(config: Config) -> Planned:
    """What `loaded` will load; without torch, so that what is wrong is told before anything begins."""
    from hetero_runtime.cli.loading import plan_to_load
    from hetero_runtime.evaluation.configuration import for_evaluation

    return plan_to_load(for_evaluation(config))


@contextmanager
def loaded(config: Config) -> Iterator[Parts]:
    """The parts of an engine for `config`, driven as evaluations need, until the context is left."""
    parts = _assemble(plan_of(config).config)
    try:
        yield parts
    finally:
        parts.close()


def _assemble(config: ResolvedConfig) -> Parts:
    from hetero_runtime.assembly import assemble
    from hetero_runtime.cli.progress import BytesProgress
    from hetero_runtime.hf.console import keep_quiet

    keep_quiet()
    with BytesProgress("reading experts") as progress:
        return assemble(config, progress=progress)


def check_samples(file: Path | None) -> None:
    """Raise RequestError where `file` exists and holds no samples, DeviceError where it cannot be written."""
    from hetero_runtime.evaluation.samples import Samples
    from hetero_runtime.whole_file import check_folder

    if file is None:
        return
    if file.exists():
        Samples.read(file)
    else:
        check_folder(file)


def samples_of(
    parts: Parts, file: Path | None, *, length: int, windows: int, seed: int, seen: TokensSeen
) -> tuple[Sample, ...]:
    """Text of the model of `parts`, which is the exact one: from `file` where it exists; else drawn, from the
    beginning of a text on, and kept there."""
    from hetero_runtime.engine import Engine
    from hetero_runtime.errors import RequestError
    from hetero_runtime.evaluation.samples import Samples, draw
    from hetero_runtime.evaluation.tasks.spans import begin_token
    from hetero_runtime.prediction.fingerprint import config_sha256

    model, dtype = config_sha256(parts.config.model.path), parts.config.model.dtype
    if file is not None and file.exists():
        kept = Samples.read(file)
        kept.check_model(model, dtype, file)
        return kept.windows
    if windows < 1:
        raise RequestError(f"windows is {windows}; draw 1 or more")
    start = (begin_token(parts.tokenizer),)
    drawn = Samples(
        draw(Engine(parts), [start] * windows, num_tokens=length, seed=seed, seen=seen), model, dtype
    )
    if file is not None:
        drawn.write(file)
    return drawn.windows
