"""What is measured, against the same counted from recorded routing; and the command around it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from hetero_runtime.assembly import assemble
from hetero_runtime.calibration import read_calibration
from hetero_runtime.calibration.measure import measure
from hetero_runtime.calibration.tally import frequent_tokens
from hetero_runtime.cli.calibrate.routing import calibrate_routing_command
from hetero_runtime.engine import Engine
from hetero_runtime.errors import RequestError
from hetero_runtime.evaluation.configuration import exactly_routed
from hetero_runtime.hf.router_choice import RouterScores, let_choose
from hetero_runtime.planned import plan_for
from hetero_runtime.source import config_from
from tests.architectures import build_checkpoint, prompt_ids, reference_model

ROWS = [tuple(prompt_ids(n, seed=n)[0].tolist()) for n in (30, 7, 21)]


@pytest.fixture(scope="module", params=["Qwen2Moe", "DeepseekV3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(request.param, tmp_path_factory.mktemp(request.param) / "model")


def _plainly(folder: Path) -> list[tuple[int, list[RouterScores]]]:
    """Of each token, its id and what each layer's router says, by transformers alone."""
    model, said = reference_model(folder), []

    def listen(_layer: int, router_said: RouterScores, _guess: torch.Tensor | None) -> torch.Tensor:
        layers.append(router_said)
        return router_said.own

    let_choose(model, listen, looks_ahead=False)
    for row in ROWS:
        layers: list[RouterScores] = []
        with torch.no_grad():
            model(input_ids=torch.tensor([row]))
        said += [
            (token, [RouterScores(each.scores[t], each.own[t]) for each in layers])
            for t, token in enumerate(row)
        ]
    return said


def test_ranges_uses_and_priors(checkpoint: Path) -> None:
    config = config_from(checkpoint, {"device": "cpu", "memory": {"residency": 0.5}})
    parts = assemble(plan_for(exactly_routed(config)).config)
    measured = measure(parts, ROWS, num_priors=8)
    parts.close()
    said, found = _plainly(checkpoint), measured.calibration
    assert measured.num_tokens == len(said) == 58
    tokens = frequent_tokens(ROWS, 8)
    assert found.prior.tokens.tolist() == tokens.tolist()
    assert measured.known == pytest.approx(np.mean([token in tokens for token, _ in said]))
    for layer in range(len(found.score_range)):
        scores = [layers[layer].scores for _, layers in said]
        finite = [each[each != -torch.inf] for each in scores]
        mean = np.mean([float(each.max() - each.min()) for each in finite])
        assert found.score_range[layer] == pytest.approx(mean, rel=1e-5)
        own = torch.stack([layers[layer].own for _, layers in said])
        assert found.uses[layer].tolist() == torch.bincount(own.flatten(), minlength=16).tolist()
        for row, token in enumerate(tokens):
            of_token = own[[each == token for each, _ in said]]
            share = torch.bincount(of_token.flatten(), minlength=16) / len(of_token)
            np.testing.assert_allclose(found.prior.share[row, layer] / 256, share, atol=1 / 256)
    assert not found.prior.share[-1].any()


def test_the_most_frequent_tokens_are_kept() -> None:
    assert frequent_tokens([(5, 5, 3), (3, 9, 1, 9, 9)], 2).tolist() == [3, 9]
    assert frequent_tokens([(5, 3)], 9).tolist() == [3, 5]


def test_nothing_to_read_is_refused(checkpoint: Path) -> None:
    parts = assemble(plan_for(config_from(checkpoint, {"device": "cpu"})).config)
    with pytest.raises(RequestError, match="no text to calibrate on"):
        measure(parts, [], num_priors=8)
    parts.close()


def test_the_command_writes_what_the_engine_then_finds(checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"the {i} quick brown foxes"}) for i in range(12)))
    app = typer.Typer()
    app.command()(calibrate_routing_command)
    words = [str(checkpoint), "--text", str(text), "--windows", "6", "--priors", "5", "--json"]
    done = CliRunner().invoke(app, [*words, "--set", "device=cpu"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.output.strip().splitlines()[-1])
    stored = read_calibration(Path(report["written_to"]))
    assert stored.notes == {"text": "text.jsonl", "num_tokens": report["tokens_read"]}
    assert len(stored.calibration.prior.tokens) == report["tokens_with_a_prior"] <= 5
    with Engine.load(checkpoint, device="cpu", preset="psr", memory={"residency": 0.5}) as engine:
        engine.generate(list(ROWS[1]), max_tokens=4, ignore_eos=True)
        assert engine.stats().to_json()["decode"]["routing"]["copies_per_token"] > 0
