"""Prompts read by a lookahead predictor beside a captured engine: when it speaks, and what it keeps."""

from __future__ import annotations

import numpy as np
import torch

from hetero_gpu.predict.lookahead import DeviceLookahead
from hetero_runtime.foresight.rolling_prompts import RollingPrompts
from hetero_scheduler.predict.lookahead_features import STRIDE
from hetero_scheduler.predict.lookahead_mlp import LookaheadMlp
from tests.runtime.foresight.predictors import random_lookahead

NUM_LAYERS, NUM_EXPERTS, TOP_K, HIDDEN, NUM_TOKENS = 6, 12, 3, 10, 5


def test_it_speaks_at_every_second_layer_and_keeps_the_shares_of_all() -> None:
    weights, shape = random_lookahead(NUM_LAYERS, NUM_EXPERTS, hidden_size=HIDDEN, visual_size=0, top_k=TOP_K)
    host, alone = LookaheadMlp(weights, shape), LookaheadMlp(weights, shape)
    device = DeviceLookahead(weights, shape, active=torch.ones(1, dtype=torch.bool))
    prompts, rng, spoke = RollingPrompts([host], device=device), np.random.default_rng(0), []
    with prompts.read(0, torch.zeros(NUM_TOKENS, dtype=torch.long), is_first=True):
        for layer in range(NUM_LAYERS):
            chosen = np.stack([rng.permutation(NUM_EXPERTS)[:TOP_K] for _ in range(NUM_TOKENS)])
            hidden = torch.from_numpy(rng.normal(size=(NUM_TOKENS, HIDDEN)).astype(np.float32))
            prompts.hear(layer, torch.zeros(NUM_TOKENS, NUM_EXPERTS), hidden)
            prompts.decided(layer, np.bincount(chosen.ravel(), minlength=NUM_EXPERTS))
            alone.observe_tokens(0, layer, chosen, hidden.mean(dim=0))
            said, expected = prompts.forecast(layer), alone.forecast()
            if said is not None:
                assert expected is not None and said.layers == expected.layers
                np.testing.assert_allclose(said.probabilities, expected.probabilities, rtol=1e-5)
                spoke.append(layer)
    assert spoke == list(range(0, NUM_LAYERS - 1, STRIDE))
    assert prompts.stats().layers == len(spoke)
    np.testing.assert_allclose(host.remembered().history, alone.remembered().history, rtol=1e-6)
    np.testing.assert_allclose(device.history(0), host.remembered().history, rtol=1e-6)
