"""Work beside the compute stream: in order behind `begin`, before what follows `join`, captured or not."""

import pytest
import torch

from hetero_gpu.beside import Beside, used_here

SIZE = 1 << 22


def test_without_streams_work_is_done_where_it_is_submitted() -> None:
    beside, seen = Beside(torch.device("cpu")), []
    with beside.begin():
        seen.append("beside")
    seen.append("after")
    beside.join()
    beside.join()
    used_here(torch.zeros(1))
    assert seen == ["beside", "after"]


@pytest.mark.gpu
@pytest.mark.parametrize("is_captured", [False, True])
def test_beside_sees_what_came_before_and_join_what_is_beside(is_captured: bool) -> None:
    device = torch.device("cuda")
    beside, x = Beside(device), torch.zeros(SIZE, device=device)
    twice, after = torch.zeros_like(x), torch.zeros_like(x)

    def step() -> None:
        for _ in range(3):
            x.add_(1)
            made = x * 2  # freed while the other stream may still read it
            with beside.begin():
                used_here(made)
                twice.copy_(made)
            del made
            torch.full_like(x, -1)  # would take its memory
            beside.join()
            after.copy_(twice)

    if is_captured:
        graph = torch.cuda.CUDAGraph()
        step()
        x.zero_()
        with torch.cuda.graph(graph):
            step()
        x.zero_()
        graph.replay()
    else:
        step()
    torch.cuda.synchronize()
    assert x.unique().tolist() == [3]
    assert after.unique().tolist() == [6]


@pytest.mark.gpu
def test_two_begins_need_a_join_between() -> None:
    beside = Beside(torch.device("cuda"))
    with beside.begin():
        pass
    with pytest.raises(AssertionError, match="not joined"), beside.begin():
        pass
    beside.join()
