"""A step on the device decides like the eager engine, row by row; kernels run in the interpreter."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_runtime.generation import SamplingParams
from hetero_runtime.hf.forward import EagerSequences
from hetero_runtime.hf.graph_sequences import GraphSequences, StepPlan
from hetero_runtime.hf.router_choice import let_choose
from hetero_runtime.hf.router_hooks import routed_layers, router_top_k
from hetero_runtime.hf.sequences import StaticSequences
from hetero_runtime.hf.small_choice import small_choosers
from hetero_runtime.routing import RoutedSequences, Routing, RoutingStats
from hetero_runtime.routing.captured import CapturedRouting
from hetero_scheduler.routing import Shape, make_routing_policy
from tests.architectures import build_checkpoint, prompt_ids, reference_model
from tests.runtime.calibration.calibrations import random_calibration

PROMPTS = [prompt_ids(n, seed=n)[0] for n in (9, 5)]
STEPS = 4
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module", params=["Qwen3Moe", "DeepseekV3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def _routing(model: Any) -> Routing:
    layers = routed_layers(model)
    shape = Shape(len(layers), layers[0].num_experts, router_top_k(model))
    calibration = random_calibration(shape.num_layers, shape.num_experts)
    policy = make_routing_policy("psr", bonus=0.3)
    return Routing(policy, shape, capacity=6, calibration=calibration)


def _eagerly(folder: Path, prompt: torch.Tensor) -> tuple[list[int], RoutingStats]:
    """Greedy tokens, and what their steps counted."""
    model = reference_model(folder)
    routing = _routing(model)
    let_choose(model, routing.choose, looks_ahead=True)
    with RoutedSequences(EagerSequences(model), routing).open() as sequence:
        said = [int(sequence.extend(prompt).argmax())]
        before = routing.stats()
        while len(said) <= STEPS:
            said.append(int(sequence.extend(torch.tensor(said[-1:])).argmax()))
    return said, routing.stats() - before


def test_steps_say_what_the_eager_engine_says(folder: Path) -> None:
    expected = [_eagerly(folder, prompt) for prompt in PROMPTS]
    model = reference_model(folder)
    routing, active = _routing(model), torch.ones(2, dtype=torch.bool)
    score = torch.zeros(routing.shape[:2], dtype=torch.float64)
    captured = CapturedRouting(routing, active=active, vocab_size=model.config.vocab_size, score=score)
    sequences = GraphSequences(model, active=active, max_length=32, capture=lambda work: work, texts=captured)
    captured.attach(model, sequences.tokens, routers=small_choosers(model))
    sequences.capture(prefill=nullcontext, decode=nullcontext)
    said = [
        [sequences.first_token(sequences.take_row(), prompt, {}, params=GREEDY, uniform=0.0)]
        for prompt in PROMPTS
    ]
    for step in range(2 * STEPS):  # one row a step: the other stays as it is
        alone = [row == step % 2 for row in range(2)]
        submitted = sequences.submit(StepPlan([alone], None)).wait()
        said[step % 2].append(submitted[0][step % 2])
    assert said == [text for text, _ in expected]
    assert routing.device_stats() == expected[0][1] + expected[1][1]
    held = {int(key) for key in np.flatnonzero(score.numpy().flatten() > 2**31)}
    assert 6 * routing.shape.num_layers <= len(held) <= 12 * routing.shape.num_layers


def test_a_prompt_in_two_passes_is_one_text(folder: Path) -> None:
    said = []
    for parts in ([9], [3, 6]):
        model = reference_model(folder)
        routing, active = _routing(model), torch.ones(1, dtype=torch.bool)
        captured = CapturedRouting(routing, active=active, vocab_size=model.config.vocab_size)
        sequences = GraphSequences(model, active=active, max_length=32, texts=captured)
        captured.attach(model, sequences.tokens)
        with sequences.open() as sequence:
            logits = [sequence.extend(ids) for ids in PROMPTS[0].split(parts)][-1]
        said.append((int(logits.argmax()), routing.stats()))
    assert said[0] == said[1]


def test_what_is_inserted_is_named_for_the_worker(folder: Path) -> None:
    model = reference_model(folder)
    routing, active = _routing(model), torch.ones(2, dtype=torch.bool)
    captured = CapturedRouting(routing, active=active, vocab_size=model.config.vocab_size)
    captured.attach(model, torch.zeros(2, dtype=torch.long))
    sequences = StaticSequences(model, rows=2, max_length=32, active=active)
    for row, prompt in enumerate(PROMPTS):
        with captured.read(row, prompt, is_first=True):
            sequences.prefill(row, prompt)
    keys: dict[int, torch.Tensor | None] = {}
    num_experts = routing.shape.num_experts
    for layer, each in enumerate(routed_layers(model)):
        each.experts.register_forward_pre_hook(
            lambda _module, arguments, layer=layer: keys.__setitem__(layer, captured(layer, arguments[0]))
        )
    sequences.decode(torch.zeros(2, dtype=torch.long))
    assert keys.pop(routing.shape.num_layers - 1) is None
    for layer, found in keys.items():
        assert found is not None
        assert found.dtype == torch.int32
        assert found.shape == (2,), "one insertion a row"
        named = found[found >= 0]
        assert ((named // num_experts) == layer + 1).all()
    assert captured.stats().inserted == sum(
        int((each >= 0).sum()) for each in keys.values() if each is not None
    )
