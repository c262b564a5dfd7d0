"""What every bench shares: rows, one form of result on disk, and timing.

A bench is a module `bench/NAME.py` with a top-level `DEVICE = "cpu"` or `"cuda"` that, run as
`python -m bench.NAME`, measures and ends with

    ResultFile.write("NAME", [Row(id="main.load_over_disk", value=0.91, unit="ratio", target=">=0.8")])

which prints a table, writes bench/results/NAME.json, and prints one JSON object as the last line.
`python -m bench --device cpu` runs all that need no GPU. A bench compares before it times: a kernel
whose result is wrong is not worth a number.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import operator
import re
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bench.machine import UNKNOWN_COMMIT, command_line, git_commit, machine_facts

T = TypeVar("T")
RESULTS = Path(__file__).resolve().parent / "results"

_RELATIONS = {">=": operator.ge, "<=": operator.le, "==": operator.eq}
_ID = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)+")
_TARGET = re.compile(r"(>=|<=|==)\s*(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)")


@dataclass(frozen=True)
class Target:
    """A bound that a row's value is held to: `>=0.8`, `<=1.1` or `==0`."""

    relation: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read `>=NUMBER`, `<=NUMBER` or `==NUMBER`; anything else is a ValueError that shows the text."""
        match = _TARGET.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"target {text!r} is none of '>=NUMBER', '<=NUMBER', '==NUMBER'")
        return cls(match[1], float(match[2]))

    def is_met(self, value: float) -> bool:
        """Whether `value` keeps to the bound."""
        return bool(_RELATIONS[self.relation](value, self.bound))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured number.

    `id` is `area.name`; `target` a bound (`>=0.8`) or None; `reference` what to read the value against,
    with its source (`"0.745 (SeqMoE, table 3)"`, `"measured disk: 2.1 GB/s"`) or None.
    """

    id: str
    value: float
    unit: str
    target: str | None = None
    reference: str | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise ValueError(f"row id {self.id!r} is not of the form area.name (lower case, digits, _)")
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise ValueError(f"row {self.id}: value {self.value!r} is not a number")
        if self.value - self.value != 0:  # inf and nan
            raise ValueError(f"row {self.id}: value {self.value!r} is not finite")
        for name, may_be_none in (("unit", False), ("target", True), ("reference", True), ("note", False)):
            text = getattr(self, name)
            if not (isinstance(text, str) or (text is None and may_be_none)):
                raise ValueError(f"row {self.id}: {name} {text!r} is not text")
        if self.target is not None:
            Target.parse(self.target)

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        return None if self.target is None else Target.parse(self.target).is_met(self.value)


@dataclass(frozen=True, kw_only=True)
class ResultFile:
    """The rows of one run of one bench, with what is needed to repeat it."""

    bench: str
    commit: str
    command: str
    machine: dict[str, Any]
    date: str
    rows: tuple[Row, ...]

    @classmethod
    def write(cls, bench: str, rows: Sequence[Row], *, folder: Path = RESULTS) -> Path:
        """Print a table, write `folder/bench.json`, print one JSON line; return the path."""
        result = cls.of(bench, rows)
        path = result.save(folder)
        result.tell()
        return path

    @classmethod
    def of(cls, bench: str, rows: Sequence[Row]) -> ResultFile:
        """Those rows, measured here and now. Raises ValueError when two have one id."""
        ids = [row.id for row in rows]
        if len(set(ids)) != len(ids):
            raise ValueError(f"bench {bench}: a row id occurs twice in {ids}")
        return cls(
            bench=bench,
            commit=git_commit(),
            command=command_line(),
            machine=machine_facts(),
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            rows=tuple(rows),
        )

    def save(self, folder: Path) -> Path:
        """Write `folder/bench.json` and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.bench}.json"
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> ResultFile:
        """Read a result file; a ValueError names what in it does not follow the form."""
        content = json.loads(path.read_text(encoding="utf-8"))
        expected = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(content, dict) or set(content) != expected:
            raise ValueError(f"{path.name}: its keys are not exactly {sorted(expected)}")
        if content["bench"] != path.stem:
            raise ValueError(f"{path.name}: bench is {content['bench']!r}, not the name of the file")
        try:
            datetime.date.fromisoformat(content["date"])
            rows = tuple(Row(**row) for row in content["rows"])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path.name}: {error}") from error
        if not rows:
            raise ValueError(f"{path.name}: it has no rows")
        return cls(**{**content, "rows": rows})

    def beside(self, folder: Path) -> ResultFile:
        """With the rows that the file of this bench in `folder` has and this one has not, where they are of
        the same commit; otherwise as it is. Raises ValueError for a file that does not follow the form."""
        path = folder / f"{self.bench}.json"
        if not path.is_file():
            return self
        earlier, ids = self.read(path), {row.id for row in self.rows}
        others = tuple(row for row in earlier.rows if row.id not in ids)
        if earlier.commit != self.commit or self.commit == UNKNOWN_COMMIT or not others:
            return self
        commands = dict.fromkeys([*earlier.command.split("; "), self.command])
        return dataclasses.replace(self, command="; ".join(commands), rows=others + self.rows)

    def tell(self) -> None:
        """Print a table and one JSON line."""
        self.print_table()
        print(json.dumps(dataclasses.asdict(self)))

    def print_table(self) -> None:
        """Print the rows for a reader."""
        from rich.console import Console
        from rich.table import Table

        table = Table("id", "value", "unit", "target", "met", "reference", "note", title=self.bench)
        marks = {True: "yes", False: "NO", None: ""}
        for row in self.rows:
            value, mark = f"{row.value:.4g}", marks[row.is_met]
            table.add_row(row.id, value, row.unit, row.target, mark, row.reference, row.note)
        Console().print(table)


def attempt(what: str, function: Callable[[], T]) -> T | None:
    """Run one part of a bench. If it fails its traceback is printed and None returned: the rows of the other
    parts are worth having."""
    try:
        return function()
    except Exception:
        print(f"FAILED: {what}", flush=True)
        traceback.print_exc()
        return None


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated runs."""

    median: float
    minimum: float
    maximum: float
    num_runs: int


def measure(
    function: Callable[[], object],
    *,
    num_runs: int = 5,
    num_warmups: int = 1,
    synchronize: Callable[[], object] | None = None,
) -> Timing:
    """Time `function` in seconds, one run at a time.

    `synchronize` (for a GPU: `torch.cuda.synchronize`) is called before the clock starts and before it
    stops, so that a run ends when its work has, not when it was launched.
    """
    if num_runs < 1:
        raise ValueError(f"num_runs is {num_runs}; at least one run is needed")
    wait = synchronize or (lambda: None)
    for _ in range(num_warmups):
        function()
    seconds = []
    for _ in range(num_runs):
        wait()
        start = time.perf_counter()
        function()
        wait()
        seconds.append(time.perf_counter() - start)
    return Timing(statistics.median(seconds), min(seconds), max(seconds), num_runs)
