"""A call to the CPU and its answer: a thread answers while a kernel in the interpreter waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from hetero_gpu.control import ControlRegion, Word
from hetero_gpu.control.copy_engine import sleep_address
from hetero_gpu.in_place import Calls, Mailbox, answer, await_call, call_cpu
from hetero_gpu.tables import DeviceTables

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter stands in where there is no GPU"
)

ROWS, TOP_K, HIDDEN = 3, 2, 700
CPU = torch.device("cpu")


@triton.jit  # type: ignore[untyped-decorator]
def _call_kernel(hidden, weights, calls, layer, NUM_PAIRS: tl.constexpr, PAIR_BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    call_cpu(layer, hidden, weights, calls, NUM_PAIRS, PAIR_BLOCK)


class Line:
    """Tables, a mailbox and a region; `hand_over` puts pairs where `ensure` leaves them, and calls."""

    def __init__(self) -> None:
        self.tables = DeviceTables(
            num_slots=4, num_layers=2, num_experts=8, max_pairs=ROWS * TOP_K, device=CPU
        )
        self.region = ControlRegion(CPU)
        self.tables.attach(self.region)
        self.mailbox = Mailbox(CPU, rows=ROWS, hidden=HIDDEN, top_k=TOP_K)
        self.calls = Calls(self.mailbox, self.region, CPU)

    def hand_over(
        self, layer: int, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> None:
        number = len(set(experts[experts >= 0].tolist()))
        self.calls.experts[: experts.numel()] = experts.flatten()
        self.calls.number.fill_(number)
        self.calls.num_calls += number > 0
        pairs = experts.numel()
        block = triton.next_power_of_2(pairs)
        _call_kernel[(1,)](hidden, weights, self.calls.for_kernels(hidden), layer, pairs, block)

    def add_answer(self, out: torch.Tensor) -> None:
        self.calls.add_answer(out, error_address=self.tables.error_address)

    def serve(self, num_calls: int, compute: Callable[[Mailbox], np.ndarray]) -> threading.Thread:
        """A thread that answers so many calls."""

        def run() -> None:
            for answered in range(num_calls):
                number = await_call(self.region.host_address, answered, sleep_address())
                assert number == answered + 1
                self.mailbox.total[:] = compute(self.mailbox)
                answer(self.region.host_address, number)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_what_is_handed_over_arrives_and_the_sum_is_added(rows: int, dtype: torch.dtype) -> None:
    line, torch_rng = Line(), torch.Generator().manual_seed(rows)
    seen: list[tuple[int, int, list[list[int]], np.ndarray, np.ndarray]] = []

    def compute(mailbox: Mailbox) -> np.ndarray:
        layer, num_rows = mailbox.head.tolist()
        arrays = mailbox.weights[:num_rows].copy(), mailbox.hidden[:num_rows].copy()
        seen.append((layer, num_rows, mailbox.experts[:num_rows].tolist(), *arrays))
        return mailbox.hidden * 2 + layer

    thread = line.serve(3, compute)
    for turn in range(3):
        hidden = torch.randn(rows, HIDDEN, generator=torch_rng).to(dtype)
        weights = torch.rand(rows, TOP_K, generator=torch_rng).to(dtype)
        experts = torch.randint(-1, 8, (rows, TOP_K), generator=torch_rng).to(torch.int32)
        experts[0, 0] = 5
        line.hand_over(turn % 2, hidden, experts, weights)
        before = torch.randn(rows, HIDDEN, generator=torch_rng).to(dtype)
        out = before.clone()
        line.add_answer(out)
        expected = (before.float() + (hidden.float() * 2 + turn % 2)).to(dtype)
        # the interpreter rounds to bfloat16 towards zero
        torch.testing.assert_close(out, expected, rtol=0.0 if dtype == torch.float32 else 2**-7, atol=0.0)
        layer, num_rows, said, heard_weights, heard_hidden = seen[-1]
        assert (layer, num_rows, said) == (turn % 2, rows, experts.tolist())
        assert np.array_equal(heard_weights, weights.float().numpy())
        assert np.array_equal(heard_hidden, hidden.float().numpy())
    thread.join()
    line.region.raise_if_failed()


def test_where_nothing_is_in_place_nobody_is_called_and_nothing_added() -> None:
    line, out = Line(), torch.ones(1, HIDDEN)
    line.hand_over(
        0, torch.zeros(1, HIDDEN), torch.full((1, TOP_K), -1, dtype=torch.int32), torch.ones(1, TOP_K)
    )
    line.mailbox.total[:] = np.nan
    line.add_answer(out)
    assert line.region.read(Word.CALLS) == 0
    assert torch.equal(out, torch.ones(1, HIDDEN))


def test_a_layer_waits_within_bounds_and_the_layers_after_it_hardly_at_all() -> None:
    line, out = Line(), torch.ones(1, HIDDEN)
    line.calls.patience.fill_(3)
    for _ in range(2):
        line.hand_over(
            0, torch.zeros(1, HIDDEN), torch.zeros(1, TOP_K, dtype=torch.int32), torch.ones(1, TOP_K)
        )
        line.add_answer(out)
        assert int(line.calls.patience) == 0
        with pytest.raises(RuntimeError, match="waited in vain for the experts that the CPU was to compute"):
            line.tables.raise_if_failed()
    assert torch.equal(out, torch.ones(1, HIDDEN))
    line.tables.raise_if_failed()  # told once


def test_listening_ends_when_it_is_told_to() -> None:
    line, answers = Line(), []
    thread = threading.Thread(
        target=lambda: answers.append(await_call(line.region.host_address, 0, sleep_address())), daemon=True
    )
    thread.start()
    line.region.write(Word.STOP, 1)
    thread.join(10)
    assert answers == [-1]
