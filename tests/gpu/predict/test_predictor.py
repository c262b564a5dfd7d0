"""The device's predictor says what the host's says, step for step and row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
import hetero_runtime
from hetero_gpu.control import ControlRegion, TableError
from hetero_gpu.control.region import Word
from hetero_gpu.predict import DevicePredictor
from hetero_runtime.prediction import read_predictor
from hetero_scheduler.predict.mamba2 import Mamba2Predictor
from hetero_scheduler.predict.mamba2_block import Mamba2Sizes
from hetero_scheduler.predict.mamba2_compiled import CompiledState
from hetero_scheduler.predict.mamba2_model import GroupModel, GroupShape
from hetero_scheduler.trace import Trace
from tests.gpu.sync_debug import syncs_are_errors

BUNDLED = Path(hetero_runtime.__file__).parent / "bundled" / "model.predictor.safetensors"
SMALL = Mamba2Sizes(d_model=8, state_size=4, head_dim=8)
EXPERTS, TOP_K, TOLERANCE = 7, 3, 1e-4


def make_models(
    lengths: Sequence[int], sizes: Mamba2Sizes = SMALL, *, experts: int = EXPERTS, num_blocks: int = 2
) -> list[GroupModel]:
    """One model a group of so many layers, none of whose parameters is a plain one or zero."""
    models = [GroupModel(GroupShape(n, experts, TOP_K, num_blocks, sizes=sizes)).eval() for n in lengths]
    with torch.no_grad():
        for parameter in (parameter for model in models for parameter in model.parameters()):
            parameter.add_(0.3 * torch.randn_like(parameter))
    return models


def everyone(rows: int, device: torch.device) -> torch.Tensor:
    return torch.ones(rows, dtype=torch.bool, device=device)


def routing(predictor: DevicePredictor, steps: int, rows: int) -> Iterator[torch.Tensor]:
    """Router logits `[layers, rows, experts]` of each step, on the predictor's device."""
    layers, _, experts = predictor.router_logits.shape
    for _ in range(steps):
        yield 2 * torch.randn(layers, rows, experts, device=predictor.device)


def observe_step(predictor: DevicePredictor, logits: torch.Tensor) -> None:
    for layer, said in enumerate(logits):
        predictor.observe(layer, said)


def host_step(host: Mamba2Predictor, logits: torch.Tensor) -> np.ndarray:
    """`[horizon, layers, experts]`: what `host` expects after a step with `logits` `[layers, experts]`."""
    found = []
    for layer, said in enumerate(logits.float().cpu().numpy()):
        host.observe(0, layer, said)
        if (forecast := host.forecast()) is not None:
            found.append(forecast.probabilities)
    return np.concatenate(found, axis=1)


def assert_equal(predictor: DevicePredictor, row: int, expected: np.ndarray) -> None:
    np.testing.assert_allclose(predictor.probabilities[row].cpu().numpy(), expected, atol=TOLERANCE)


def assert_remembers(predictor: DevicePredictor, row: int, expected: Sequence[CompiledState]) -> None:
    for group, wanted in zip(predictor.export(row), expected, strict=True):
        for ours, theirs in zip(group, wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)


def same_memory(one: DevicePredictor, other: DevicePredictor, row: int) -> bool:
    pairs = zip(one.export(row), other.export(row), strict=True)
    return all(np.array_equal(a, b) for pair in pairs for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize(
    ("lengths", "sizes", "experts", "num_blocks", "rows", "horizon"),
    [
        ((2, 1), SMALL, 7, 2, 2, 3),
        ((1,), Mamba2Sizes(d_model=12, state_size=5, head_dim=12, expand=3, conv_kernel=2), 5, 1, 1, 8),
        ((3,), Mamba2Sizes(d_model=17, state_size=1, head_dim=17, conv_kernel=1), 33, 3, 1, 1),
        ((1, 1, 1), Mamba2Sizes(d_model=5, state_size=3, head_dim=5, expand=1), 4, 1, 4, 2),
    ],
    ids=["plain", "far", "narrow-window", "many-groups"],
)
def test_equal_to_the_host_step_for_step(
    lengths: tuple[int, ...],
    sizes: Mamba2Sizes,
    experts: int,
    num_blocks: int,
    rows: int,
    horizon: int,
    device: torch.device,
) -> None:
    models = make_models(lengths, sizes, experts=experts, num_blocks=num_blocks)
    predictor = DevicePredictor(models, everyone(rows, device), horizon=horizon)
    hosts = [Mamba2Predictor(models, horizon) for _ in range(rows)]
    for logits in routing(predictor, 3, rows):
        observe_step(predictor, logits)
        for row, host in enumerate(hosts):
            assert_equal(predictor, row, host_step(host, logits[:, row]))
    for row, host in enumerate(hosts):
        assert_remembers(predictor, row, host.states())
    predictor.raise_if_failed()


def test_equal_to_the_host_with_trained_weights(device: torch.device) -> None:
    models = read_predictor(BUNDLED).models
    horizon, steps = (2, 1) if device.type == "cpu" else (8, 20)  # interpreted, a step takes seconds
    predictor = DevicePredictor(models, everyone(1, device), horizon=horizon)
    host = Mamba2Predictor(models, horizon)
    for logits in routing(predictor, steps, 1):
        observe_step(predictor, logits)
        assert_equal(predictor, 0, host_step(host, logits[:, 0]))


def test_a_group_speaks_at_its_last_layer_of_its_layers_only(device: torch.device) -> None:
    predictor = DevicePredictor(make_models((2, 1)), everyone(1, device), horizon=1)
    logits = next(routing(predictor, 1, 1))
    seen = []
    for layer in range(3):
        predictor.observe(layer, logits[layer])
        said = predictor.probabilities[0, 0].sum(-1)
        seen.append([round(total, 4) for total in said.tolist()])
    assert seen == [[0, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_the_state_is_restored_after_looking_ahead(device: torch.device) -> None:
    models = make_models((1,))
    near, far = (DevicePredictor(models, everyone(1, device), horizon=horizon) for horizon in (1, 3))
    for logits in routing(near, 2, 1):
        observe_step(near, logits)
        observe_step(far, logits)
        assert same_memory(near, far, 0)
        assert torch.equal(near.probabilities[0, 0], far.probabilities[0, 0])


def test_a_row_that_is_not_active_expects_nothing_and_keeps_its_state(device: torch.device) -> None:
    models, active = make_models((1,)), torch.tensor([True, True], device=device)
    predictor = DevicePredictor(models, active, horizon=2)
    hosts = [Mamba2Predictor(models, 2) for _ in range(2)]
    for who, logits in zip([(0, 1), (1,), (0,), ()], routing(predictor, 4, 2), strict=True):
        active.copy_(torch.tensor([row in who for row in range(2)]))
        observe_step(predictor, logits)
        for row, host in enumerate(hosts):
            expected = host_step(host, logits[:, row]) if row in who else np.zeros((2, 1, EXPERTS))
            assert_equal(predictor, row, expected)
            assert_remembers(predictor, row, host.states())


def test_a_step_of_fewer_rows_leaves_the_others_alone(device: torch.device) -> None:
    models = make_models((1,))
    predictor = DevicePredictor(models, everyone(3, device), horizon=2)
    host = Mamba2Predictor(models, 2)
    first, second = routing(predictor, 2, 3)
    observe_step(predictor, first)
    host_step(host, first[:, 0])
    others, kept = predictor.probabilities[1:].clone(), [predictor.export(row) for row in (1, 2)]
    observe_step(predictor, second[:, :1].contiguous())
    assert_equal(predictor, 0, host_step(host, second[:, 0]))
    assert torch.equal(predictor.probabilities[1:], others)
    for row, state in zip((1, 2), kept, strict=True):
        assert_remembers(predictor, row, state)
    assert_remembers(predictor, 0, host.states())


def test_it_goes_on_from_a_prompt_and_gives_the_state_back(device: torch.device) -> None:
    models, active = make_models((2, 1)), torch.tensor([False, True], device=device)
    host, predictor = Mamba2Predictor(models, 2), DevicePredictor(models, active, horizon=2)
    logits = np.random.default_rng(0).normal(size=(6, 3, EXPERTS)).astype(np.float16)
    chosen = np.argsort(-logits, axis=-1)[..., :TOP_K]
    forecasts = host.prefill(Trace(logits, chosen, np.zeros(6, np.int32), np.array([0, 6])))
    predictor.load(1, host.states(), forecasts=forecasts)
    assert_equal(predictor, 1, np.concatenate([forecast.probabilities for forecast in forecasts], axis=1))
    said = next(routing(predictor, 1, 2))
    observe_step(predictor, said)
    assert_equal(predictor, 1, host_step(host, said[:, 1]))
    host.restore(predictor.export(1))
    said = next(routing(predictor, 1, 2))
    observe_step(predictor, said)
    assert_equal(predictor, 1, host_step(host, said[:, 1]))


def test_a_row_taken_anew_expects_what_it_is_told(device: torch.device) -> None:
    models = make_models((1,))
    predictor = DevicePredictor(models, everyone(1, device), horizon=2)
    observe_step(predictor, next(routing(predictor, 1, 1)))
    predictor.load(0, Mamba2Predictor(models, 2).states())
    assert not predictor.probabilities.any()
    assert not any(array.any() for state in predictor.export(0) for array in state)


def test_the_number_of_programs_changes_no_bit(device: torch.device) -> None:
    """One program goes through all phases in one launch; several do so on a GPU."""
    models, active = make_models((2,)), everyone(2, device)
    usual, *others = (
        DevicePredictor(models, active, horizon=2, num_programs=number) for number in (None, 1, 9)
    )
    logits = next(routing(usual, 1, 2))
    observe_step(usual, logits)
    for other in others:
        observe_step(other, logits)
        assert torch.equal(other.probabilities, usual.probabilities)
        assert all(same_memory(other, usual, row) for row in range(2))


def test_matrices_may_be_kept_in_bf16(device: torch.device) -> None:
    models = make_models((2,))
    predictor = DevicePredictor(models, everyone(1, device), horizon=2, weight_dtype=torch.bfloat16)
    for name, parameter in models[0].named_parameters():
        if name.endswith(("project.weight", "_proj.weight", "head.weight")):
            parameter.copy_(parameter.bfloat16())
    host = Mamba2Predictor(models, 2)
    for logits in routing(predictor, 2, 1):
        observe_step(predictor, logits)
        assert_equal(predictor, 0, host_step(host, logits[:, 0]))


def test_routers_may_write_their_logits_into_place(device: torch.device) -> None:
    models = make_models((2,))
    predictor = DevicePredictor(models, everyone(2, device), horizon=2, logits_dtype=torch.bfloat16)
    host = Mamba2Predictor(models, 2)
    logits = next(routing(predictor, 1, 2)).bfloat16()
    predictor.router_logits.copy_(logits)
    observe_step(predictor, predictor.router_logits)
    assert_equal(predictor, 1, host_step(host, logits[:, 1]))


def test_a_stalled_forecast_is_reported_once(device: torch.device) -> None:
    predictor = DevicePredictor(make_models((1,)), everyone(1, device), horizon=1)
    region = ControlRegion(device)
    predictor.attach(region)
    region.write(Word.ERROR, TableError.FORECAST_STALLED)
    with pytest.raises(RuntimeError, match="waited in vain"):
        predictor.raise_if_failed()
    predictor.raise_if_failed()


def test_what_cannot_predict_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="a horizon of 0"):
        DevicePredictor(make_models((1,)), everyone(1, device), horizon=0)
    with pytest.raises(ValueError, match="8193 experts"):
        DevicePredictor(make_models((1,), experts=8193), everyone(1, device))


@pytest.mark.gpu
def test_captured_in_a_graph_it_asks_the_host_nothing() -> None:
    device = torch.device("cuda")
    models = read_predictor(BUNDLED).models
    active = torch.tensor([True, True, False, True], device=device)
    predictor = DevicePredictor(models, active)
    hosts = [Mamba2Predictor(models) for _ in range(4)]
    logits = torch.zeros_like(predictor.router_logits)
    observe_step(predictor, logits)  # compiles
    for row, host in enumerate(hosts):
        predictor.load(row, host.states())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        observe_step(predictor, logits)
    for step, said in enumerate(routing(predictor, 50, 4)):
        logits.copy_(said)
        active[2] = step % 2 == 1
        with syncs_are_errors():
            graph.replay()
        for row, host in enumerate(hosts):
            if row != 2 or step % 2:
                assert_equal(predictor, row, host_step(host, said[:, row]))
    predictor.raise_if_failed()


def test_what_lies_further_ahead_may_be_said_later(device: torch.device) -> None:
    """The same to the last bit, for the rows that have stepped since and were not given another text."""
    torch.manual_seed(5)
    models, rows, horizon, near = make_models((2, 3)), 2, 5, 2
    whole, split = (DevicePredictor(models, everyone(rows, device), horizon=horizon) for _ in range(2))
    split.defer(near)
    for step, logits in enumerate(routing(whole, 4, rows)):
        stepping = 1 if step == 1 else rows
        before = split.probabilities.clone()
        for predictor in (whole, split):
            observe_step(predictor, logits[:, :stepping])
        said = split.probabilities.clone()
        assert torch.equal(said[:, :near], whole.probabilities[:, :near])
        assert torch.equal(said[:, near:], before[:, near:])
        if step == 2:  # row 0 begins another text, of which nothing is owed
            for predictor in (whole, split):
                predictor.load(0, whole.export(1))
        for g in range(len(models)):
            split.look_further(g, stepping)
            split.take_further(g, stepping)
            if step == 1:
                split.look_further(g, stepping)  # nothing is owed any more
                split.take_further(g, stepping)
        if step == 2:
            assert not split.probabilities[0].any()
        assert torch.equal(split.probabilities, whole.probabilities)
        assert all(same_memory(whole, split, row) for row in range(rows))
    whole.raise_if_failed()
    split.raise_if_failed()


def test_nothing_is_left_for_later_where_all_is_near(device: torch.device) -> None:
    predictor = DevicePredictor(make_models((2,)), everyone(1, device), horizon=3)
    with pytest.raises(AssertionError, match="3 of 3 steps leave nothing"):
        predictor.defer(3)
    with pytest.raises(AssertionError, match="nothing was deferred"):
        predictor.look_further(0, 1)
