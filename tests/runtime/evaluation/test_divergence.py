"""Excess surprise at text of the exact model estimates the divergence from it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from hetero_runtime.cli import app
from hetero_runtime.config import load_config
from hetero_runtime.engine import Engine
from hetero_runtime.errors import RequestError
from hetero_runtime.evaluation import RowScore
from hetero_runtime.evaluation.configuration import exact, for_evaluation
from hetero_runtime.evaluation.divergence import Divergence
from hetero_runtime.evaluation.harness import Harness
from hetero_runtime.evaluation.samples import Sample, Samples, draw
from hetero_runtime.hf.forward import forward_rows
from tests.runtime.evaluation.conftest import PartsOf


def score(*nats: float) -> RowScore:
    return RowScore(np.array(nats), np.zeros(len(nats), np.bool_))


def test_only_what_the_model_wrote_counts() -> None:
    samples = [Sample((1, 2, 3, 4), 2), Sample((1, 2), 1)]
    result = Divergence.of(samples, [score(9.0, 1.0, 2.0), score(3.0)], [score(0.0, 1.5, 2.0), score(4.0)])
    assert (result.nats, result.num_tokens, result.num_windows) == (0.5, 3, 2)
    assert result.exact_nats == 2.0
    assert result.excess_perplexity == pytest.approx(np.exp(0.5) - 1)


def test_a_model_does_not_diverge_from_itself(parts_of: PartsOf) -> None:
    parts = parts_of("Qwen3Moe")
    samples = draw(Engine(parts), [(1,), (1,)], num_tokens=6)
    scores = Harness(parts).score([sample.ids for sample in samples])
    result = Divergence.of(samples, scores, scores)
    assert (result.nats, result.standard_error) == (0.0, 0.0)


def test_the_estimate_is_that_of_the_distributions(parts_of: PartsOf) -> None:
    """At every position of the samples the divergence is known; the estimate is near its mean."""
    one, other = parts_of("Qwen3Moe"), parts_of("Olmoe")
    samples = draw(Engine(one), [(1,)] * 24, num_tokens=8)
    texts = [sample.ids for sample in samples]
    estimate = Divergence.of(samples, Harness(one).score(texts), Harness(other).score(texts))
    ids = torch.tensor(texts)[:, :-1]
    p, q = (torch.log_softmax(forward_rows(parts.model, ids).double(), -1) for parts in (one, other))
    known = float((p.exp() * (p - q)).sum(-1).mean())
    assert known > 0.05
    assert abs(estimate.nats - known) < 4 * estimate.standard_error < 2 * known


def test_windows_have_seeds_of_their_own_and_go_past_the_end_of_a_text(parts_of: PartsOf) -> None:
    engine = Engine(parts_of("Qwen3Moe"))
    told: list[tuple[int, int]] = []
    two = draw(engine, [(1,), (1, 9)], num_tokens=5, seed=3, seen=lambda *at: told.append(at))
    assert [(len(each.ids), each.num_given) for each in two] == [(6, 1), (7, 2)]
    assert told == [(5, 10), (10, 10)]
    assert draw(engine, [(1, 9)], num_tokens=5, seed=4) == two[1:]
    assert draw(engine, [(1, 9)], num_tokens=5, seed=3) != two[1:]


def test_samples_are_kept_and_of_one_model(tmp_path: Path) -> None:
    samples = Samples((Sample((1, 2, 3), 1),), "abc", "float32")
    samples.write(tmp_path / "samples.json")
    assert Samples.read(tmp_path / "samples.json") == samples
    samples.check_model("abc", "float32", tmp_path)
    with pytest.raises(RequestError, match="another model"):
        samples.check_model("abc", "bfloat16", tmp_path)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"format": "other"}', '{"format": "hetero-runtime samples of a model, 1", "windows": []}'],
)
def test_other_files_are_no_samples(content: str, tmp_path: Path) -> None:
    (tmp_path / "samples.json").write_text(content)
    with pytest.raises(RequestError, match="holds no samples"):
        Samples.read(tmp_path / "samples.json")


def test_the_exact_configuration_keeps_all_but_what_changes_outputs() -> None:
    config = load_config({"memory": {"residency": 0.5}, "execution": {"mode": "eager", "max_length": 64}})
    assert exact(config) == config


def test_an_evaluation_is_driven_by_the_host_and_forecasts_nothing() -> None:
    config = for_evaluation(load_config({"preset": "seqmoe"}))
    assert config.execution.mode == "eager"
    assert (config.prefetch.schedule, config.eviction.policy) == ("popularity", "lru")
    plain = load_config({"eviction": {"policy": "lfu"}})
    assert for_evaluation(plain).eviction.policy == "lfu"


def run(*words: object) -> Result:
    cpu = ("--set", "device=cpu", "--set", "execution.max_length=64")
    return CliRunner().invoke(app, ["eval", "kl", *map(str, words), *cpu])


def test_the_command_draws_once_and_finds_no_divergence_of_the_exact_model(tmp_path: Path) -> None:
    file = tmp_path / "samples.json"
    words = ("--samples", file, "--length", 12, "--windows", 2, "--json")
    first = run(*words)
    assert first.exit_code == 0, first.output
    report = json.loads(first.stdout.strip().splitlines()[-1])
    assert (report["nats"], report["num_tokens"], report["num_windows"]) == (0.0, 24, 2)
    assert 0 < report["exact_nats"] < 6
    drawn = file.read_bytes()
    again = run(*words)
    assert json.loads(again.stdout.strip().splitlines()[-1]) == report
    assert file.read_bytes() == drawn


def test_a_policy_of_the_preset_is_compared_with_the_exact_model() -> None:
    words = ("--length", 24, "--windows", 2, "--set", "preset=psr", "--set", "routing.capacity=6", "--json")
    result = run(*words)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.strip().splitlines()[-1])
    assert report["nats"] != 0.0
    assert report["standard_error"] > 0


def test_windows_longer_than_a_row_are_one_line_and_exit_code_2() -> None:
    result = run("--length", 64)
    assert (result.exit_code, result.stderr.startswith("error: ")) == (2, True)
    assert "max_length" in result.stderr
