"""Perplexity: the mean over tokens, its spread over windows, and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from hetero_runtime.cli import app
from hetero_runtime.errors import RequestError
from hetero_runtime.evaluation import Perplexity, RowScore, clustered_mean
from hetero_runtime.evaluation.comparison import compare
from hetero_runtime.evaluation.results import read_results

CPU = ("--set", "device=cpu", "--set", "memory.residency=0.25", "--set", "execution.max_length=256")


def score(*nats: float) -> RowScore:
    return RowScore(np.array(nats), np.zeros(len(nats), np.bool_))


def test_tokens_weigh_alike_whatever_their_window() -> None:
    result = Perplexity.of([score(1.0, 2.0, 3.0), score(6.0)])
    assert (result.nats, result.num_tokens, result.num_windows) == (3.0, 4, 2)
    assert result.perplexity == pytest.approx(math.exp(3.0))
    assert result.to_json()["perplexity"] == result.perplexity


def test_units_of_one_value_have_the_usual_standard_error() -> None:
    values = np.array([1.0, 4.0, 2.0, 7.0])
    estimate = clustered_mean(values, np.ones(4))
    assert estimate.mean == pytest.approx(values.mean())
    assert estimate.standard_error == pytest.approx(values.std(ddof=1) / 2)


def test_values_inside_a_unit_are_not_taken_for_independent() -> None:
    alone = clustered_mean([1, 1, 0, 0], [1, 1, 1, 1]).standard_error
    repeated = clustered_mean([10, 10, 0, 0], [10, 10, 10, 10]).standard_error
    assert repeated == pytest.approx(alone)


def test_one_unit_says_nothing_of_its_spread_and_none_nothing_at_all() -> None:
    assert clustered_mean([6.0], [3]) == (2.0, 0.0)
    with pytest.raises(RequestError, match="nothing to average"):
        Perplexity.of([])


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["eval", "perplexity", *map(str, words), *CPU])


def test_the_command_on_the_bundled_model(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("Once upon a time there was a girl. She liked to play in the park with her friends.")
    result = run("--text", file, "--length", 8, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.strip().splitlines()[-1])
    assert report["perplexity"] == pytest.approx(math.exp(report["nats"]))
    assert 0.5 < report["nats"] < 5  # chance is 9.7
    assert report["num_windows"] == math.ceil(report["num_tokens"] / 8)
    assert "perplexity" in result.stderr
    fewer = run("--text", file, "--length", 8, "--windows", 1, "--json")
    assert json.loads(fewer.stdout.strip().splitlines()[-1])["num_tokens"] == 8


def test_windows_of_two_configurations_can_be_compared(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a girl. She liked to play in the park with her friends.")
    for policy in ("exact", "psr"):
        words = (
            "--text",
            text,
            "--length",
            8,
            "--out",
            tmp_path / policy,
            "--set",
            f"routing.policy={policy}",
        )
        assert run(*words).exit_code == 0
    exact, psr = read_results(tmp_path / "exact"), read_results(tmp_path / "psr")
    (one,) = compare(exact, [psr])
    assert (one.label, one.reference, one.task, one.metric) == ("psr", "exact", "text", "token.nats")
    assert one.num_questions == len(exact.tasks["text"]["token.nats"]) > 1
    assert one.difference != 0.0


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--text", "/nowhere.txt"), "/nowhere.txt"), (("--length", 300), "execution.max_length, 256")],
    ids=["file", "length"],
)
def test_bad_input_is_one_line_and_exit_code_2(words: tuple[object, ...], said: str, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("word " * 400)
    result = run("--text", file, *words)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
