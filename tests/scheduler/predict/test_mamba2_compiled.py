"""The compiled loops do what torch's modules do, step by step and recursively."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
import torch

from hetero_scheduler.predict.activation import activation_state
from hetero_scheduler.predict.mamba2_block import Mamba2Sizes
from hetero_scheduler.predict.mamba2_compiled import CompiledState, Weights, _compiled, advance, roll_out
from hetero_scheduler.predict.mamba2_model import GroupModel, GroupShape, State

EXPERTS, TOP_K, HORIZON = 7, 3, 5


def by_torch(model: GroupModel, routed: np.ndarray, state: State) -> tuple[np.ndarray, State]:
    """Shares `[horizon, n, E]` after one step, and the state after it."""
    logits = torch.from_numpy(routed)
    activation = activation_state(logits, logits.topk(TOP_K, dim=-1).indices)
    first, state = model.step(activation[None], state)
    later = model.rollout(first, state, HORIZON - 1)
    return torch.softmax(torch.cat([first[None], later])[:, 0], dim=-1).numpy(), state


@pytest.mark.parametrize(
    "sizes",
    [
        Mamba2Sizes(d_model=16, state_size=8, head_dim=8),
        Mamba2Sizes(d_model=12, state_size=5, head_dim=4, expand=3, conv_kernel=2),
    ],
)
@pytest.mark.parametrize(("num_layers", "num_blocks"), [(1, 1), (3, 2)])
@torch.no_grad()
def test_equal_to_torch_step_by_step(sizes: Mamba2Sizes, num_layers: int, num_blocks: int) -> None:
    torch.manual_seed(0)
    model = GroupModel(GroupShape(num_layers, EXPERTS, TOP_K, num_blocks, sizes=sizes)).eval()
    for parameter in model.parameters():  # norms of ones and small biases would hide a mistake
        parameter.add_(0.3 * torch.randn_like(parameter))
    state = model.initial_state(1)
    weights, compiled = Weights.of(model), CompiledState.of(state)
    rng = np.random.default_rng(0)
    for _ in range(12):
        routed = 2 * rng.normal(size=(num_layers, EXPERTS)).astype(np.float32)
        expected, state = by_torch(model, routed, state)
        found = advance(weights, compiled, routed, top_k=TOP_K, horizon=HORIZON)
        np.testing.assert_allclose(found, expected, atol=2e-5)
    for ours, theirs in zip(compiled, CompiledState.of(state), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_a_roll_out_leaves_state_and_logits_alone() -> None:
    torch.manual_seed(1)
    model = GroupModel(GroupShape(2, EXPERTS, TOP_K, sizes=Mamba2Sizes(16, 8, 8)))
    weights, state = Weights.of(model), CompiledState.of(model.initial_state(1))
    logits = np.random.default_rng(0).normal(size=(2, EXPERTS)).astype(np.float32)
    before = [array.copy() for array in (*state, logits)]
    first = roll_out(weights, state, logits, top_k=TOP_K, horizon=HORIZON)
    assert np.array_equal(roll_out(weights, state, logits, top_k=TOP_K, horizon=HORIZON), first)
    for array, kept in zip((*state, logits), before, strict=True):
        assert np.array_equal(array, kept)
    np.testing.assert_allclose(first[0], torch.softmax(torch.from_numpy(logits), -1).numpy(), atol=1e-6)


def test_large_inputs_overflow_nowhere() -> None:
    model = GroupModel(GroupShape(1, EXPERTS, TOP_K, sizes=Mamba2Sizes(16, 8, 8)))
    with torch.no_grad():
        model.project.weight.mul_(1e3)
        for mixer in (block.mixer for block in model._blocks()):
            mixer.in_proj.weight.mul_(1e2)
    weights, state = Weights.of(model), CompiledState.of(model.initial_state(1))
    logits = np.full((1, EXPERTS), 6e4, np.float32)
    for _ in range(3):
        shares = advance(weights, state, logits, top_k=TOP_K, horizon=HORIZON)
        assert np.isfinite(shares).all()


def test_it_compiles_where_compiled_code_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    njit = numba.njit

    def nowhere_to_write(**options: Any) -> Callable[[Any], Any]:
        def compile_it(function: Any) -> Any:
            if options.pop("cache", False):
                raise RuntimeError("cannot cache function: no locator available")
            return njit(**options)(function)

        return compile_it

    monkeypatch.setattr(numba, "njit", nowhere_to_write)
    assert _compiled(lambda value: value + value)(3) == 6
