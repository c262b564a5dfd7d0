"""A sequence that went back is as if it had never gone on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_runtime.errors import CheckpointError
from hetero_runtime.hf.rewind import RewindableSequences, RewindableState
from tests.architectures import build_checkpoint, prompt_ids, reference_model

TOLERANCE = 1e-4
"""Of logits around 10 in float32: a pass over several tokens sums in another order than several passes."""
TEXT, OTHER = prompt_ids(40, seed=1)[0], prompt_ids(40, seed=2)[0]

CUT = ("Qwen3Moe", "GptOss", "DeepseekV3")
REPLAYED = ("Qwen3Next", "Qwen3_5Moe")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """A tiny model by name."""

    @cache
    def build(name: str) -> Any:
        return reference_model(build_checkpoint(name, Path(tmp_path_factory.mktemp(name))))

    return build


def read(model: Any, *parts: torch.Tensor) -> torch.Tensor:
    """Logits of the last token of `parts`, each read in a pass of its own."""
    state = RewindableState(model)
    return [state.extend(part) for part in parts][-1]


@pytest.mark.parametrize("num_kept", [0, 1, 3, 5])
@pytest.mark.parametrize("length", [3, 12], ids=["short", "past the window of 8"])
@pytest.mark.parametrize("name", CUT + REPLAYED)
def test_what_was_dropped_leaves_no_trace(
    name: str, length: int, num_kept: int, model: Callable[[str], Any]
) -> None:
    state = RewindableState(model(name))
    state.extend(TEXT[:length])
    state.mark()
    state.extend_all(torch.cat([TEXT[length : length + num_kept], OTHER[num_kept:5]]))
    state.rewind(num_kept)
    assert state.length == length + num_kept
    ours = state.extend(TEXT[length + num_kept : length + num_kept + 2])
    theirs = read(model(name), TEXT[:length], TEXT[length : length + num_kept + 2])
    assert torch.allclose(ours, theirs, atol=TOLERANCE), (ours - theirs).abs().max()


def test_a_draft_longer_than_the_window_runs_again(model: Callable[[str], Any]) -> None:
    state = RewindableState(model("GptOss"))
    state.extend(TEXT[:12])
    state.mark()
    state.extend_all(torch.cat([TEXT[12:16], OTHER[:6]]))
    state.rewind(4)
    ours, theirs = state.extend(TEXT[16:18]), read(model("GptOss"), TEXT[:12], TEXT[12:18])
    assert torch.allclose(ours, theirs, atol=TOLERANCE)


@pytest.mark.parametrize("name", CUT + REPLAYED)
def test_many_marks_one_after_another(name: str, model: Callable[[str], Any]) -> None:
    state, length = RewindableState(model(name)), 10
    state.extend(TEXT[:length])
    for num_kept in (1, 3, 2, 4, 1, 3, 0, 2):
        state.mark()
        state.extend_all(torch.cat([TEXT[length : length + num_kept], OTHER[num_kept:4]]))
        state.rewind(num_kept)
        length += num_kept
    ours, theirs = state.extend(TEXT[length : length + 1]), read(model(name), TEXT[: length + 1])
    assert torch.allclose(ours, theirs, atol=TOLERANCE)


@pytest.mark.parametrize("name", CUT + REPLAYED)
def test_all_positions_have_logits(name: str, model: Callable[[str], Any]) -> None:
    state = RewindableState(model(name))
    state.extend(TEXT[:9])
    ours = state.extend_all(TEXT[9:14])
    theirs = torch.stack([read(model(name), TEXT[: end + 1]) for end in range(9, 14)])
    assert torch.allclose(ours, theirs, atol=TOLERANCE)


def test_a_model_that_cannot_go_back_is_refused_by_name(model: Callable[[str], Any]) -> None:
    with pytest.raises(CheckpointError, match=r"deepseek_v4 .*DeepseekV4CSACache.*drafter: none"):
        RewindableSequences(model("DeepseekV4"))
