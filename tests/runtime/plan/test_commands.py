"""`plan` and `config` as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from hetero_runtime.cli.config import config_command
from hetero_runtime.cli.plan import plan_command
from tests.sparse_checkpoint import QWEN3_30B, write_qwen3

app = typer.Typer()
app.command("plan")(plan_command)
app.command("config")(config_command)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("model"))


def _run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.stdout, result.stderr


def test_plan_prints_a_table(model: Path) -> None:
    code, out, _ = _run("plan", str(model), "--set", "device=cpu")
    assert code == 0
    assert "slabs" in out
    assert "host bank" in out


def test_plan_json_is_the_last_line(model: Path) -> None:
    code, out, _ = _run("plan", str(model), "--set", "device=cpu", "--set", "memory.slabs=4", "--json")
    assert code == 0
    assert json.loads(out.splitlines()[-1])["slabs"] == 4


def test_config_prints_what_loads_again(model: Path, tmp_path: Path) -> None:
    words = ("--set", f"model.path={model}", "--set", "device=cpu", "--set", "memory.residency=0.5")
    code, out, _ = _run("config", *words)
    assert code == 0
    assert yaml.safe_load(out)["memory"]["slabs"] == 16
    (tmp_path / "resolved.yaml").write_text(out)
    code, again, _ = _run("config", str(tmp_path / "resolved.yaml"), "--json")
    assert code == 0
    assert json.loads(again.splitlines()[-1])["memory"]["slabs"] == 16


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--set", "memory.slab=4"], "did you mean memory.slabs?"),
        (["--set", "device=cpu", "--set", "memory.host=1MiB"], "does not fit"),
        (["--set", "execution.compile=true"], "is not in this version"),
    ],
)
def test_an_error_is_one_message_and_exit_code_2(model: Path, words: list[str], part: str) -> None:
    code, out, err = _run("plan", str(model), *words)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert part in err


def test_a_60_gb_checkpoint_is_planned_at_once_and_without_torch(tmp_path: Path) -> None:
    write_qwen3(tmp_path, QWEN3_30B, shards=16)
    script = (
        "import sys; from hetero_runtime.cli.plan import plan_command; "
        "plan_command(sys.argv[1], overrides=['device=cpu', 'memory.host=1TiB'], as_json=True); "
        "print('torch' in sys.modules)"
    )
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True)
    assert time.perf_counter() - begin < 5
    # The machine of the test may be too small for 60 GB: that, too, is said before anything is loaded.
    assert done.stdout.endswith("False\n") or "host bank 54.0 GiB" in done.stderr
