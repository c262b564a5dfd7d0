"""The device tables step for step against the host's machine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero_gpu import SlabPool
from hetero_gpu.tables import DeviceTables, Landings, MappedBank, Running, TableError, ensure, gather
from hetero_scheduler import EVICTION_POLICIES, EvictionPolicy, ExpertKey, SlotMachine, SlotState
from tests.gpu.sync_debug import syncs_are_errors
from tests.gpu.tables.host_twin import HostTwin

NUM_LAYERS, NUM_EXPERTS = 2, 5


def tables_of(twin: HostTwin, device: torch.device, max_pairs: int = 8) -> DeviceTables:
    return DeviceTables.from_machine(twin.machine, twin.eviction, max_pairs=max_pairs, device=device)


def assert_same(tables: DeviceTables, twin: HostTwin) -> None:
    for name, ours, theirs in zip(
        ("state", "key", "tag", "is_pinned"), tables.export(), twin.machine.export(), strict=False
    ):
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
    assert tables.export().next_tag == twin.machine.export().next_tag
    # the last bit of log2 and exp2 is the library's
    np.testing.assert_allclose(tables.score.cpu().numpy(), twin.eviction.score, rtol=1e-13)
    np.testing.assert_array_equal(tables.clock.cpu().numpy(), twin.eviction.passes)
    tables.check()


def run_layer(
    tables: DeviceTables,
    twin: HostTwin,
    layer: int,
    top_k_index: np.ndarray,
    *,
    landings: Landings | None = None,
    running: Running | None = None,
) -> None:
    before = tables.stats()
    top_k = torch.from_numpy(top_k_index).to(tables.device)
    slots = ensure(tables, layer, top_k, landings=landings, running=running)
    expected, misses = twin.ensure(layer, top_k_index)
    np.testing.assert_array_equal(slots.cpu().numpy(), expected)
    count = int(tables.miss_count.item())
    listed = zip(tables.miss_slot[:count].tolist(), tables.miss_key[:count].tolist(), strict=True)
    assert list(listed) == misses
    assert_same(tables, twin)
    stats = tables.stats() - before
    assert stats.required == len(twin.required) == stats.hits + stats.late + stats.misses
    if landings is None:  # else what landed counts too
        assert stats.loads == len(misses)


def routing(rng: np.random.Generator, num_experts: int, shape: tuple[int, int]) -> np.ndarray:
    """`[T, K]`, each token's experts distinct, the low ones more popular."""
    weights = 1.0 / np.arange(1, num_experts + 1)
    return np.stack(
        [rng.choice(num_experts, shape[1], replace=False, p=weights / weights.sum()) for _ in range(shape[0])]
    )


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
@pytest.mark.parametrize(
    ("num_slots", "layer_slots", "shape"),
    [(2, None, (1, 2)), (5, None, (2, 2)), (7, [3, 4], (1, 3)), (10, None, (3, 2))],
    ids=["2slots-T1-K2", "5slots-T2-K2", "7slots-per-layer-T1-K3", "10slots-all-fit-T3-K2"],
)
def test_random_steps_equal_the_machine(
    device: torch.device, policy: str, num_slots: int, layer_slots: list[int] | None, shape: tuple[int, int]
) -> None:
    twin = HostTwin.of(num_slots, NUM_LAYERS, NUM_EXPERTS, policy=policy, layer_slots=layer_slots)
    tables = tables_of(twin, device)
    rng = np.random.default_rng(num_slots)
    for step in range(12):
        run_layer(tables, twin, step % NUM_LAYERS, routing(rng, NUM_EXPERTS, shape))
    tables.raise_if_failed()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_slots=st.integers(1, 6),
    policy=st.sampled_from(EVICTION_POLICIES),
    pinned=st.integers(0, 2),
    steps=st.lists(
        st.lists(st.integers(-1, NUM_EXPERTS - 1), min_size=4, max_size=4), min_size=1, max_size=6
    ),
)
def test_any_steps_equal_the_machine(
    device: torch.device, num_slots: int, policy: str, pinned: int, steps: list[list[int]]
) -> None:
    """Doubles, pairs to skip, too few slots, pinned slots."""
    twin = HostTwin.of(num_slots, NUM_LAYERS, NUM_EXPERTS, policy=policy)
    for expert in range(min(pinned, num_slots)):
        twin.ensure(0, np.array([[expert]]))
        twin.machine.pin(ExpertKey(0, expert))
    tables = tables_of(twin, device)
    for i, experts in enumerate(steps):
        run_layer(tables, twin, i % NUM_LAYERS, np.array(experts, dtype=np.int32).reshape(2, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("policy", EVICTION_POLICIES)
@pytest.mark.parametrize(
    ("num_slots", "num_experts", "shape"),
    [(700, 128, (1, 8)), (2764, 128, (8, 8)), (8192, 512, (16, 8))],
    ids=["700slots-E128-T1", "2764slots-E128-T8", "8192slots-E512-T16"],
)
def test_real_sizes_equal_the_machine(
    device: torch.device, policy: str, num_slots: int, num_experts: int, shape: tuple[int, int]
) -> None:
    if device.type == "cpu":
        pytest.skip("minutes in the interpreter")
    num_layers = 24
    twin = HostTwin.of(num_slots, num_layers, num_experts, policy=policy)
    tables = tables_of(twin, device, max_pairs=128)
    rng = np.random.default_rng(1)
    for step in range(20 * num_layers):
        run_layer(tables, twin, step % num_layers, routing(rng, num_experts, shape))


def test_what_the_layer_requires_stays_whatever_its_score(device: torch.device) -> None:
    twin = HostTwin.of(2, NUM_LAYERS, NUM_EXPERTS, policy="lfu")
    for _ in range(3):
        twin.ensure(1, np.array([[4]]))  # popular, so expert 0 of layer 0 has the least score
    twin.ensure(0, np.array([[0]]))
    tables = tables_of(twin, device)
    run_layer(tables, twin, 0, np.array([[0, 1]]))
    assert tables.slot_of[0, 0].item() >= 0
    assert tables.slot_of[1, 4].item() == -1


def test_no_slot_is_an_error_word_and_no_slot_number(device: torch.device) -> None:
    twin = HostTwin.of(2, NUM_LAYERS, NUM_EXPERTS, policy="lru")
    tables = tables_of(twin, device)
    slots = ensure(tables, 0, torch.tensor([[0, 1], [2, 3]], device=device))
    assert slots.tolist() == [[0, 1], [-1, -1]]
    assert tables.error.item() == TableError.NO_SLOT
    with pytest.raises(RuntimeError, match="more experts than there are slots"):
        tables.raise_if_failed()
    tables.check()


def test_an_expert_that_does_not_exist_is_an_error_word(device: torch.device) -> None:
    tables = tables_of(HostTwin.of(4, NUM_LAYERS, NUM_EXPERTS, policy="lru"), device)
    assert ensure(tables, 1, torch.tensor([[1, NUM_EXPERTS]], device=device)).tolist() == [[0, -1]]
    with pytest.raises(RuntimeError, match="does not have"):
        tables.raise_if_failed()


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_state_goes_over_and_back_and_over_again(device: torch.device, policy: str) -> None:
    twin = HostTwin.of(5, NUM_LAYERS, NUM_EXPERTS, policy=policy)
    tables = tables_of(twin, device)
    rng = np.random.default_rng(3)
    other = HostTwin.of(5, NUM_LAYERS, NUM_EXPERTS, policy=policy)
    for _ in range(3):
        for layer in range(NUM_LAYERS):  # the device
            run_layer(tables, twin, layer, routing(rng, NUM_EXPERTS, (1, 2)))
        tables.to_machine(other.machine, other.eviction)
        for layer in range(NUM_LAYERS):  # the host, from what the device left
            top = routing(rng, NUM_EXPERTS, (2, 2))
            expected, _ = twin.ensure(layer, top)
            np.testing.assert_array_equal(other.ensure(layer, top)[0], expected)
        tables.adopt(other.machine, other.eviction)
        assert_same(tables, twin)


def test_tables_are_not_handed_over_with_a_fetch_under_way(device: torch.device) -> None:
    twin = HostTwin.of(5, NUM_LAYERS, NUM_EXPERTS, policy="lru")
    tables = tables_of(twin, device)
    twin.machine.reserve(ExpertKey(0, 0), SlotState.FETCH, score=twin.eviction.score)
    with pytest.raises(ValueError, match="1 slots are being fetched by the host: drain"):
        tables.adopt(twin.machine, twin.eviction)
    tables.load(twin.machine.export())
    with pytest.raises(ValueError, match="1 slots await a prefetch"):
        tables.to_machine(twin.machine, twin.eviction)
    tables.drop_prefetches()
    tables.check()
    assert tables.slot_state.unique().tolist() == [SlotState.EMPTY]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_slots": 8193}, "8193 slots: the device tables serve 1 to 8192"),
        ({"num_experts": 513}, "513 experts a layer"),
        ({"max_pairs": 129}, "129 tokens times top-k"),
        ({"num_slots": 0}, "0 slots"),
    ],
    ids=["slots", "experts", "pairs", "none"],
)
def test_sizes_beyond_one_thread_block_are_refused(sizes: dict[str, int], message: str) -> None:
    given = {"num_slots": 4, "num_layers": 2, "num_experts": 4, "max_pairs": 4} | sizes
    with pytest.raises(ValueError, match=message):
        DeviceTables(**given, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("top_k_index", "message"),
    [
        (torch.zeros(5, 2, dtype=torch.int64), "10 pairs of token and expert: the tables were made for 8"),
        (torch.zeros(2, 2), "contiguous integers"),
        (torch.zeros(2, 4, dtype=torch.int64)[:, ::2], "contiguous integers"),
    ],
    ids=["many", "float", "strided"],
)
def test_pairs_that_the_kernel_cannot_read_are_refused(top_k_index: torch.Tensor, message: str) -> None:
    tables = tables_of(HostTwin.of(4, NUM_LAYERS, NUM_EXPERTS, policy="lru"), torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        ensure(tables, 0, top_k_index)


class Told(EvictionPolicy):
    """Its scores come from elsewhere."""

    name = "logical"

    def observe(self, layer: int, tokens_per_expert: np.ndarray) -> None:
        self.passes[layer] += 1


@pytest.mark.parametrize("name", ["logical", "lookahead"])
def test_scores_that_somebody_else_keeps_stay_as_they_are(name: str) -> None:
    policy = Told(1, NUM_EXPERTS)
    policy.name = name  # type: ignore[misc]
    twin = HostTwin(SlotMachine(2, num_layers=1, num_experts=NUM_EXPERTS), policy)
    tables = tables_of(twin, torch.device("cpu"))
    for experts, scores in (([0, 1], [1, 2, 3]), ([2, 1], [1, 9, 4]), ([0, 2], [7, 8, 9])):
        policy.score[0, :3] = scores
        tables.score[0, :3] = torch.tensor(scores)
        run_layer(tables, twin, 0, np.array([experts]))


@pytest.mark.gpu
def test_a_captured_layer_replays_without_the_host() -> None:
    device = torch.device("cuda")
    twin = HostTwin.of(6, NUM_LAYERS, NUM_EXPERTS, policy="lru")
    tables = tables_of(twin, device)
    records = torch.randint(0, 256, (NUM_LAYERS * NUM_EXPERTS, 4096), dtype=torch.uint8).pin_memory()
    bank, slabs = MappedBank.of(records.view(-1), 4096), SlabPool(6, 4096, device)
    top_k_index = torch.zeros((2, 2), dtype=torch.int64, device=device)
    outputs = []

    def step() -> None:
        for layer in range(NUM_LAYERS):
            slots = ensure(tables, layer, top_k_index)
            gather(tables, layer, bank=bank, slabs=slabs)
            outputs.append(slabs.memory[slots.long()])

    step()  # compiles
    twin.ensure(0, np.zeros((2, 2), dtype=np.int64)), twin.ensure(1, np.zeros((2, 2), dtype=np.int64))
    outputs.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    rng = np.random.default_rng(0)
    for _ in range(20):
        routed = routing(rng, NUM_EXPERTS, (2, 2))
        top_k_index.copy_(torch.from_numpy(routed))
        with syncs_are_errors():
            graph.replay()
        for layer in range(NUM_LAYERS):
            twin.ensure(layer, routed)
            expected = records[layer * NUM_EXPERTS + torch.from_numpy(routed)]
            assert torch.equal(outputs[layer].cpu(), expected)
        assert_same(tables, twin)
