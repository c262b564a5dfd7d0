"""The step on the device, decision for decision and bit for bit against the host's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_gpu.routing import DeviceCaches, Following, Said, decide, follow
from hetero_scheduler.routing import LogicalCache, RoutingPolicy, Shape
from tests.scheduler.routing.texts import NUM_TOKENS_KNOWN, POLICIES, Text, make_cache, make_text

VOCAB = NUM_TOKENS_KNOWN + 3
HELD = 2.0**32


class Twin:
    """One row: the same text on the host and on the device."""

    def __init__(self, policy: RoutingPolicy, shape: Shape, *, capacity: int, device: str) -> None:
        self.host = make_cache(policy, shape, capacity=capacity)
        self.caches = DeviceCaches(self.host, rows=1, vocab_size=VOCAB, device=torch.device(device))
        self.caches.adopt(0, self.host)
        self.active = torch.ones(1, dtype=torch.bool, device=device)
        self.counts = np.zeros((shape.num_layers, 3), np.int64)
        score = torch.zeros(shape.num_layers, shape.num_experts, dtype=torch.float64, device=device)
        self.following = Following(score, HELD)

    def run(self, text: Text, t: int) -> None:
        """Token `t` through all layers; every decision and all state compared."""
        token, looks_ahead = text.tokens[t : t + 1], self.host.policy.looks_ahead
        last = self.host.shape.num_layers - 1
        for layer in range(last + 1):
            z, own = text.z[t : t + 1, layer], text.own[t : t + 1, layer]
            said = Said(self._on_device(z), self._on_device(own))
            if looks_ahead and layer < last:
                said = said._replace(guess=self._on_device(text.g[t : t + 1, layer + 1]))
            experts, inserted = decide(
                self.caches,
                layer,
                said,
                tokens=self._on_device(token),
                active=self.active,
                following=self.following,
            )
            decided = self.host.select(
                np.ascontiguousarray(z[:, None]),
                np.ascontiguousarray(own[:, None]),
                token,
                first_layer=layer,
            )
            np.testing.assert_array_equal(experts.cpu().numpy(), decided.experts[:, 0])
            if inserted is not None:
                first_key = (layer + 1) * self.host.shape.num_experts
                ours = sorted(key - first_key for key in inserted[:, 0].tolist() if key >= 0)
                assert ours == self.host.steer(layer + 1, text.g[t, layer + 1], int(token[0])).tolist()
            self.counts[layer] += [int(each[0, 0]) for each in decided[1:]]
        self.check()

    def check(self) -> None:
        state = self.caches.state
        expected = state.priority[0].double() + HELD * state.is_resident[0].bool()
        assert torch.equal(self.following.score, expected)
        for name, array in self.host.state._asdict().items():
            np.testing.assert_array_equal(
                getattr(self.caches.state, name)[0].cpu().numpy(), array, err_msg=name
            )
        np.testing.assert_array_equal(self.caches.counters[0].cpu().numpy(), self.counts)

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.caches.device)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_the_device_decides_as_the_host_does(policy: RoutingPolicy, device: str) -> None:
    """Among equal scores, and with groups of experts that a router excludes."""
    shape = Shape(2, 16, 4)
    twin = Twin(policy, shape, capacity=5, device=device)
    text = make_text(shape, num_tokens=6, seed=7, num_values=6, num_groups=4)
    for t in range(6):
        twin.run(text, t)
    assert twin.counts[:, 1].sum() > 0


@pytest.mark.parametrize("shape", [Shape(2, 1, 1), Shape(2, 63, 8), Shape(2, 256, 8)], ids=str)
def test_sizes(shape: Shape, device: str) -> None:
    twin = Twin(POLICIES[5], shape, capacity=min(shape.num_experts, 2 * shape.top_k), device=device)
    text = make_text(shape, num_tokens=3, seed=1)
    for t in range(3):
        twin.run(text, t)


def test_a_text_changes_sides_between_two_tokens(device: str) -> None:
    shape, policy = Shape(2, 12, 3), POLICIES[4]
    text = make_text(shape, num_tokens=9, seed=3)
    twin = Twin(policy, shape, capacity=5, device=device)
    for t in range(4):
        twin.run(text, t)
    other = make_cache(policy, shape, capacity=5)
    twin.caches.to_host(0, other)
    expected = _rest(twin.host, text)
    np.testing.assert_array_equal(_rest(other, text), expected)


def _rest(cache: LogicalCache, text: Text) -> np.ndarray:
    rest = Text(*(each[4:] for each in text))
    return cache.select(rest.z, rest.own, rest.tokens, first_layer=0, guesses=rest.g).experts


def test_rows_are_apart_and_an_inactive_one_is_left_alone(device: str) -> None:
    shape, policy = Shape(1, 12, 3), POLICIES[3]
    texts = [make_text(shape, num_tokens=4, seed=seed) for seed in (1, 2, 3)]
    hosts = [make_cache(policy, shape, capacity=5) for _ in texts]
    caches = DeviceCaches(hosts[0], rows=3, vocab_size=VOCAB, device=torch.device(device))
    for row, host in enumerate(hosts):
        caches.adopt(row, host)
    active = torch.tensor([True, False, True], device=device)
    following = Following(torch.zeros(1, 12, dtype=torch.float64, device=device), HELD)
    for t in range(4):
        z, own, tokens = (
            torch.from_numpy(np.stack([np.asarray(part[t]) for part in parts])).to(device)
            for parts in (
                [text.z[:, 0] for text in texts],
                [text.own[:, 0] for text in texts],
                [text.tokens for text in texts],
            )
        )
        said = Said(z, own)
        decided_here = decide(caches, 0, said, tokens=tokens, active=active, following=following)
        ours = decided_here.experts.cpu().numpy()
        held = caches.state.is_resident[active].bool().any(dim=0)
        assert torch.equal(following.score, caches.state.priority[active].amax(dim=0).double() + HELD * held)
        np.testing.assert_array_equal(ours[1], texts[1].own[t, 0])
        for row in (0, 2):
            text = texts[row]
            decided = hosts[row].select(
                text.z[t : t + 1], text.own[t : t + 1], text.tokens[t : t + 1], first_layer=0
            )
            np.testing.assert_array_equal(ours[row], decided.experts[0, 0])
    for row, host in enumerate(hosts):
        resident = caches.state.is_resident[row].cpu().numpy()
        np.testing.assert_array_equal(resident.astype(bool), host.state.is_resident)


def test_scores_follow_the_caches_of_active_rows(device: str) -> None:
    shape = Shape(3, 12, 3)
    caches = DeviceCaches(
        make_cache(POLICIES[4], shape, capacity=5), rows=3, vocab_size=VOCAB, device=torch.device(device)
    )
    caches.state.priority.copy_(torch.rand(caches.state.priority.shape))
    caches.state.is_resident.copy_(torch.rand(caches.state.is_resident.shape) < 0.4)
    active = torch.tensor([True, False, True], device=device)
    score = torch.full((3, 12), -1.0, dtype=torch.float64, device=device)
    follow(caches, 1, num_layers=2, active=active, score=score, held=HELD)
    held = caches.state.is_resident[active].bool().any(dim=0)
    expected = caches.state.priority[active].amax(dim=0).double() + HELD * held
    assert torch.equal(score[1:], expected[1:])
    assert (score[0] == -1).all(), "no layer of these"


def test_a_layer_too_large_is_refused() -> None:
    shape = Shape(1, 513, 2)
    with pytest.raises(ValueError, match="513 experts a layer: the kernels serve up to 512"):
        DeviceCaches(
            make_cache(POLICIES[0], shape, capacity=4), rows=1, vocab_size=4, device=torch.device("cpu")
        )
