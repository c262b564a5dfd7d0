"""What the tests of serving ask, and of which engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetero_runtime.engine import Engine
from hetero_runtime.generation import Completion
from tests.architectures import prompt_ids

PROMPTS = [prompt_ids(5 + 7 * seed, seed=seed)[0].tolist() for seed in range(8)]
OPTIONS: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}

Said = tuple[tuple[int, ...], ...]
Alone = Callable[..., Completion]
Serve = Callable[..., Engine]


def load(folder: Path, device: str, *, max_rows: int = 2, **memory: Any) -> Engine:
    """Driven by the host on every device, so that both serve alike."""
    execution = {"mode": "eager", "max_rows": max_rows}
    return Engine.load(folder, device=device, memory=memory or {"residency": 0.25}, execution=execution)


def say(engine: Engine) -> Said:
    """Answers to the first three prompts."""
    return tuple(engine.generate(prompt, **OPTIONS).token_ids for prompt in PROMPTS[:3])
