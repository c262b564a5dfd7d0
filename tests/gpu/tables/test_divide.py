"""The device's division of misses against the host's policies, table by table and score by score."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_gpu.control import ControlRegion
from hetero_gpu.in_place import Calls, Mailbox
from hetero_gpu.tables import TURNS, DeviceTables, Dividing, Division, ensure
from hetero_scheduler import EvictionPolicy, SlotState, make_eviction
from tests.gpu.tables.host_twin import HostTwin

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter stands in where there is no GPU"
)

NUM_LAYERS, NUM_EXPERTS, HIDDEN = 3, 9, 5
CPU = torch.device("cpu")


def division_of(tables: DeviceTables, top_k: int) -> Division:
    """Whose calls nobody answers."""
    region = ControlRegion(CPU)
    tables.attach(region)
    mailbox = Mailbox(CPU, rows=tables.max_pairs // top_k, hidden=HIDDEN, top_k=top_k)
    return Division(tables, Calls(mailbox, region, CPU))


def divided(
    division: Division, tables: DeviceTables, layer: int, index: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of what the device brings, and that, `[rows, top_k]`."""
    dividing = Dividing(division, torch.ones(len(index), HIDDEN), weights)
    slots = ensure(tables, layer, index, dividing=dividing)
    return slots, division.kept[: index.numel()].view(index.shape)


def chosen_by_host(
    shadow: EvictionPolicy,
    twin: HostTwin,
    layer: int,
    index: np.ndarray,
    weights: np.ndarray,
    numbers: list[int],
) -> list[int]:
    """The experts that go to the CPU. `shadow` observes this use of all of them."""
    before = shadow.score[layer].copy()
    shadow.observe(layer, np.bincount(index[index >= 0], minlength=NUM_EXPERTS))
    table = twin.machine.export()
    held = set(table.key.tolist())
    misses = [e for e in np.unique(index[index >= 0]).tolist() if layer * NUM_EXPERTS + e not in held]
    pool = twin.machine.pool_range(layer)
    num_empty = int(np.count_nonzero(table.state[pool.start : pool.stop] == SlotState.EMPTY))
    number = min(numbers[len(misses)], max(0, len(misses) - num_empty))
    by_router = {e: float(weights[index == e].sum()) for e in misses}
    return sorted(misses, key=lambda e: (shadow.score[layer, e], before[e], by_router[e], e))[:number]


@pytest.mark.parametrize("policy", ["lru", "lfu", "lfru"])
@pytest.mark.parametrize(
    ("rows", "top_k", "slots", "pools"), [(1, 4, 6, None), (2, 2, 12, [4, 4, 4]), (3, 1, 4, None)]
)
def test_every_pair_goes_where_the_host_would_send_it(
    policy: str, rows: int, top_k: int, slots: int, pools: list[int] | None
) -> None:
    rng, num_pairs = np.random.default_rng(3), rows * top_k
    numbers = [0, *(int(rng.integers(0, n + 1)) for n in range(1, num_pairs + 1))]
    twin = HostTwin.of(slots, NUM_LAYERS, NUM_EXPERTS, policy=policy, layer_slots=pools)
    shadow = make_eviction(policy, num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS)
    tables = DeviceTables.from_machine(twin.machine, twin.eviction, max_pairs=num_pairs, device=CPU)
    division = division_of(tables, top_k)
    division.number_of.copy_(torch.tensor(numbers, dtype=torch.int32)[:, None])
    num_calls, in_place_in_all = 0, 0
    for step in range(12 * NUM_LAYERS):
        layer = step % NUM_LAYERS
        index = np.stack([rng.permutation(NUM_EXPERTS)[:top_k] for _ in range(rows)])
        index[rng.random(rows) < 0.2] = -1  # rows that are not active
        weights = rng.uniform(0.1, 1.0, (rows, top_k)).astype(np.float32)
        goes = np.isin(index, chosen_by_host(shadow, twin, layer, index, weights, numbers))

        slots, kept = divided(division, tables, layer, torch.from_numpy(index), torch.from_numpy(weights))
        assert kept.tolist() == np.where(goes, -1, index).tolist()
        assert division.calls.experts.view(rows, top_k).tolist() == np.where(goes, index, -1).tolist()
        expected_slots, misses = twin.ensure(layer, kept.numpy())
        assert slots.tolist() == expected_slots.tolist()
        assert int(tables.miss_count) == len(misses)

        twin.eviction.restore(shadow.score, shadow.passes)
        np.testing.assert_allclose(tables.score.numpy(), shadow.score, rtol=1e-12)
        number = len(np.unique(index[goes]))
        assert int(division.calls.number) == number
        num_calls, in_place_in_all = num_calls + (number > 0), in_place_in_all + number
        assert int(division.calls.num_calls) == num_calls
        tables.check()
    stats = tables.stats()
    assert in_place_in_all > 0
    assert stats.required == stats.hits + stats.misses
    assert stats.misses == stats.loads + in_place_in_all


def test_while_slots_are_empty_misses_are_loaded() -> None:
    twin = HostTwin.of(4, 1, NUM_EXPERTS, policy="lru")
    tables = DeviceTables.from_machine(twin.machine, twin.eviction, max_pairs=3, device=CPU)
    division = division_of(tables, 3)
    division.number_of.copy_(torch.arange(4, dtype=torch.int32)[:, None])
    weights = torch.tensor([[0.5, 0.2, 0.3]])
    for experts, in_place in (([0, 1, 2], [-1, -1, -1]), ([3, 4, 5], [-1, 4, 5])):
        divided(division, tables, 0, torch.tensor([experts]), weights)
        assert division.calls.experts.tolist() == in_place


def test_columns_take_turns_and_each_step_has_as_many_layers_at_one_as_at_another() -> None:
    twin = HostTwin.of(2, TURNS, NUM_EXPERTS, policy="lru", layer_slots=None)
    tables = DeviceTables.from_machine(twin.machine, twin.eviction, max_pairs=2, device=CPU)
    division, weights = division_of(tables, 2), torch.ones(1, 2)
    ensure(tables, 0, torch.tensor([[7, 8]]))  # no slot is empty: layer 0 is one pass ahead
    division.number_of[2, 0] = 2
    goes = []
    for step in range(2 * TURNS):
        for layer in range(TURNS):
            index = torch.tensor([[step % 7, (step + 1) % 7]])
            slots, kept = divided(division, tables, layer, index, weights)
            assert torch.equal(slots < 0, kept < 0)
            goes.append((step, layer, bool((kept < 0).all())))
    of_layer = [[step for step, layer, gone in goes if gone and layer == each] for each in range(TURNS)]
    assert [len(steps) for steps in of_layer] == [2] * TURNS
    assert all(second - first == TURNS for first, second in of_layer)
    assert sorted(first for first, _ in of_layer[1:]) == [0, 1, 2]


def test_nothing_is_in_place_until_the_host_says_so_and_sizes_are_checked() -> None:
    twin = HostTwin.of(2, 1, NUM_EXPERTS, policy="lru")
    tables = DeviceTables.from_machine(twin.machine, twin.eviction, max_pairs=2, device=CPU)
    division = division_of(tables, 2)
    index, weights = torch.tensor([[3, 4]]), torch.ones(1, 2)
    for _ in range(2):
        slots, kept = divided(division, tables, 0, index, weights)
        assert kept.tolist() == [[3, 4]]
        assert slots.min() >= 0
    assert int(division.calls.num_calls) == 0
    with pytest.raises(ValueError, match="4 pairs of token and expert: the tables were made for 2"):
        divided(division, tables, 0, torch.zeros(2, 2, dtype=torch.long), torch.ones(2, 2))
    with pytest.raises(ValueError, match="contiguous"):
        divided(division, tables, 0, index, torch.ones(2, 2).T[:1])
