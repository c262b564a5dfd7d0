"""The harness evaluates the function that serves: full forwards and decoding decide alike, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from hetero_runtime.assembly import Parts, assemble
from hetero_runtime.calibration import write_calibration
from hetero_runtime.config import load_config
from hetero_runtime.evaluation.configuration import for_evaluation
from hetero_runtime.evaluation.harness import Harness
from hetero_runtime.orchestrator import Phase
from hetero_runtime.plan import read_geometry
from hetero_runtime.planned import plan_for
from hetero_runtime.prediction import RouterFingerprint
from hetero_runtime.routing import RoutingStats
from hetero_scheduler.routing import Calibration, TokenPrior
from tests.architectures import build_checkpoint, prompt_ids

ROWS = [tuple(prompt_ids(n, seed=n).flatten().tolist()) for n in (17, 5, 24)]
POLICIES = ("cache_prior", "psr", "speculative_experts")


def calibration(folder: Path) -> None:
    """Ranges near those of the tiny routers, some tokens with priors."""
    geometry = read_geometry(folder)
    random = np.random.default_rng(3)
    shape = (geometry.num_moe_layers, geometry.num_experts)
    share = random.integers(0, 255, (9, *shape)).astype(np.uint8)
    share[-1] = 0
    write_calibration(
        folder.with_name(folder.name + ".calibration.safetensors"),
        Calibration(np.full(shape[0], 3.0), random.random(shape), TokenPrior(np.arange(0, 160, 20), share)),
        fingerprint=RouterFingerprint.of_model(geometry),
        notes={},
    )


@pytest.fixture(params=[("Qwen3Moe", policy) for policy in POLICIES] + [("DeepseekV3", "psr")], ids="-".join)
def parts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Parts]:
    name, policy = request.param
    folder = build_checkpoint(name, tmp_path / "tiny")
    calibration(folder)
    tree = {
        "model": {"path": str(folder)},
        "device": "cpu",
        "memory": {"residency": 0.5},
        "routing": {"policy": policy},
        "execution": {"max_length": 64},
    }
    parts = assemble(plan_for(for_evaluation(load_config(tree))).config)
    yield parts
    parts.close()


def decoded(parts: Parts, row: tuple[int, ...]) -> list[float]:
    """Nats of `row[1:]`, the engine's way: one token a pass."""
    nats = []
    with parts.sequences.open() as sequence:
        for token, following in pairwise(row):
            with parts.orchestrator.pass_(Phase.DECODE, checkpoint=lambda: None):
                logits = sequence.extend(torch.tensor([token]))
            nats.append(-float(torch.log_softmax(logits, -1)[following]))
    return nats


def counted(parts: Parts, before: RoutingStats) -> RoutingStats:
    assert parts.routing is not None
    return parts.routing.stats() - before


def test_rows_of_a_batch_are_what_decoding_each_alone_gives(parts: Parts) -> None:
    assert parts.routing is not None
    scores = Harness(parts).score([*ROWS, *[row[:-1] for row in ROWS]])[: len(ROWS)]
    together = [score.nats for score in scores]
    alone = [decoded(parts, row) for row in ROWS]
    for a, b in zip(together, alone, strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    parts.orchestrator.check()


def test_copies_are_counted_alike_and_padding_counts_nothing(parts: Parts) -> None:
    assert parts.routing is not None
    before = parts.routing.stats()
    Harness(parts).score([row[:-1] for row in ROWS])
    by_harness, before = counted(parts, before), parts.routing.stats()
    for row in ROWS:
        decoded(parts, row)
    assert by_harness == counted(parts, before)
    assert by_harness.demanded > 0
    assert by_harness.deviating > 0


def test_another_policy_gives_other_numbers(parts: Parts) -> None:
    config = parts.config
    plain = replace(config, routing=replace(config.routing, policy="exact"))
    other = assemble(plain)
    try:
        exact = Harness(other).score(ROWS)
    finally:
        other.close()
    routed = Harness(parts).score(ROWS)
    assert any(not np.array_equal(a.nats, b.nats) for a, b in zip(exact, routed, strict=True))
