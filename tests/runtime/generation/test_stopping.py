"""Stop strings over token borders, held text, and the order of reasons."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_runtime.generation.params import SamplingParams
from hetero_runtime.generation.stopping import Emission, StopChecker


def checker(*stop: str, max_tokens: int = 99, ignore_eos: bool = False) -> StopChecker:
    params = SamplingParams(stop=stop, max_tokens=max_tokens, ignore_eos=ignore_eos)
    return StopChecker(params, eos_token_ids={7, 8}, stop_token_ids={9})


def run(pieces: Sequence[str], stop: Sequence[str]) -> tuple[list[str], bool]:
    """All emissions of a text given in pieces, and whether a stop string ended it."""
    check, emitted = checker(*stop), []
    for piece in pieces:
        emission = check.feed(piece)
        emitted.append(emission.text)
        if emission.is_stopped:
            return emitted, True
    return [*emitted, check.release()], False


def reference(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Read letter by letter; end where the first stop string is complete, cut the longest one off."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def test_half_a_stop_string_is_held_back() -> None:
    check = checker("END")
    assert check.feed("The EN") == Emission("The ", is_stopped=False)
    assert check.feed("T") == Emission("ENT", is_stopped=False)
    assert check.feed(" E") == Emission(" ", is_stopped=False)
    assert check.feed("N") == Emission("", is_stopped=False)
    assert check.feed("D and more") == Emission("", is_stopped=True)


@pytest.mark.parametrize(
    ("pieces", "stop", "emitted", "is_stopped"),
    [
        (["abc"], [], ["abc", ""], False),
        (["aXb"], ["X"], ["a"], True),
        (["X"], ["X"], [""], True),
        (["aab", "aac"], ["aabaac"], ["", ""], True),
        (["aabaa", "bX"], ["aabX"], ["aab", ""], True),
        (["stop", "p"], ["stopped"], ["", "", "stopp"], False),
        (["ab", "cd"], ["abcd", "c"], ["", "ab"], True),
        (["\n", "\n"], ["\n\n"], ["", ""], True),
        (["a", "", "b"], ["ab"], ["", "", ""], True),
    ],
)
def test_emissions(pieces: list[str], stop: list[str], emitted: list[str], is_stopped: bool) -> None:
    assert run(pieces, stop) == (emitted, is_stopped)


@given(
    pieces=st.lists(st.text("abc", max_size=5), max_size=10),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_result_does_not_depend_on_where_tokens_end(pieces: list[str], stop: list[str]) -> None:
    emitted, is_stopped = run(pieces, stop)
    assert ("".join(emitted), is_stopped) == reference("".join(pieces), stop)


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_no_emitted_text_is_ever_taken_back(pieces: list[str], stop: list[str]) -> None:
    text = "".join(pieces)
    result, _ = reference(text, stop)
    emitted, _ = run(pieces, stop)
    for end in range(len(emitted)):
        assert result.startswith("".join(emitted[: end + 1]))


def test_reasons_of_tokens() -> None:
    check = checker(max_tokens=3)
    assert [check.check_token(token) for token in (1, 2, 3)] == [None, None, "length"]
    assert checker().check_token(7) == "stop"
    assert checker(max_tokens=1).check_token(8) == "stop"


def test_ignore_eos_goes_on_but_obeys_stop_tokens() -> None:
    check = checker(ignore_eos=True)
    assert [check.check_token(token) for token in (7, 8, 9)] == [None, None, "stop"]
    assert not check.is_last_token(7)
    assert check.is_last_token(9)
