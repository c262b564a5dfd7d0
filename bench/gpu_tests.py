"""The tests marked `gpu` as a result: `python -m bench.gpu_tests [--out DIR]`.

What pytest prints goes to DIR/gpu_tests.txt. The exit code is pytest's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

from bench.harness import RESULTS, ResultFile, Row

DEVICE = "cuda"

PYTEST = (sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark")


def rows_of(junit: Path) -> list[Row]:
    """Counts from pytest's JUnit report."""
    suite = next(ET.parse(junit).iter("testsuite"))
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    return [
        Row(id="gpu_tests.passed", value=passed, unit="tests"),
        Row(id="gpu_tests.failed", value=counts["failures"] + counts["errors"], unit="tests", target="<=0"),
        Row(id="gpu_tests.skipped", value=counts["skipped"], unit="tests"),
        Row(id="gpu_tests.seconds", value=float(suite.get("time", "0")), unit="s"),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the tests and write the result, whatever they say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("words", nargs="*", default=["tests"], help="what pytest gets besides")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, (options.out / "gpu_tests.txt").open("w") as text:
        junit = Path(folder) / "junit.xml"
        words = [*PYTEST, f"--junitxml={junit}", *options.words]
        done = subprocess.run(words, stdout=text, stderr=subprocess.STDOUT, check=False)
        ResultFile.write("gpu_tests", rows_of(junit), folder=options.out)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
