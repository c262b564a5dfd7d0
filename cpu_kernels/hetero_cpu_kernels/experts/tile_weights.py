"""Where tiles of weights come from: up to 32 rows, a turn of columns at a time.

    panel     decoded before, by `panel`: for the tokens of every call
    record    the record's own bfloat16, row after row: a tile is 16 lines of 16 rows
    bytes     its own int8, the same way
    decoded   on the way, a turn ahead of the products, into two slots that stay in the first cache

    slot      |step 0, rows 0-15 |step 0, rows 16-31 |step 1, rows 0-15 |step 1, rows 16-31|

A core that multiplies asks memory for nothing, and rows are read a line each, from as many pages. So the rows
that come next are asked for meanwhile, line after line as they lie in memory, into the second cache: as many
in a turn as the turn reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from hetero_cpu_kernels.experts.activations import BYTE_COLUMNS, PANEL_TILE_BYTES, TILE, TILE_COLUMNS, Layout
from hetero_cpu_kernels.experts.emitter import I64, LINE_BYTES, Emitter
from hetero_cpu_kernels.experts.panel import in_units
from hetero_cpu_kernels.experts.row_factors import RowFactors
from hetero_cpu_kernels.experts.rows import PackedRows, Rows
from hetero_cpu_kernels.experts.tile_registers import ROW_BYTES

MOST_GROUPS = 2
"""Groups of 16 rows that are multiplied together."""
_STEPS = 2
"""Products of tiles in a turn of decoding: lines of int8 and fp8 are 64 columns."""
_SLOT_BYTES = _STEPS * MOST_GROUPS * PANEL_TILE_BYTES


class Weights(ABC):
    """Of one kernel. `begin` for some rows, then `advance` to turn 1, 2 ..., each before products of the one
    before it; turn 0 is ready after `begin`."""

    steps = 1
    """Products of tiles in a turn."""
    turn_columns = TILE_COLUMNS
    """Columns of a turn."""

    def __init__(self, emit: Emitter, rows: Rows, layout: Layout) -> None:
        self._emit, self._rows, self._layout = emit, rows, layout
        self.turns = layout.padded // self.turn_columns
        row_bytes = rows.matrix.cols * LINE_BYTES // rows.line_columns  # of packed rows, mantissas
        self._turn_bytes = max(1, row_bytes // self.turns)
        self._source, self._first = emit.argument(0), emit.argument(8)
        self._next, self._next_bytes = emit.argument(6), emit.argument(7)
        self._group, self._num_groups = I64(0), 1

    def begin(self, group: Any, num_groups: int) -> None:
        """Groups of 16 rows from number `group` on."""
        self._group, self._num_groups = group, num_groups
        self.advance(I64(0))

    @abstractmethod
    def advance(self, turn: Any) -> None:
        """Make a turn's tiles ready, and ask for a part of what comes next."""

    @abstractmethod
    def tile(self, number: int, turn: Any, *, step: int) -> tuple[Any, int]:
        """Address of a group's tile and bytes from one of its rows to the next."""

    def _ask(self, part: Any, parts: int) -> None:
        """One of so many parts of a turn's share of the next rows; at their end the last ones again.

        One group asks for as much as two: it is the rest of some rows, and two come after it.
        """
        emit, build = self._emit, self._emit.build
        num_bytes = MOST_GROUPS * TILE * self._turn_bytes // parts
        begin = emit.mul(part, num_bytes)
        is_inside = build.icmp_signed("<", begin, self._next_bytes)
        place = emit.add(self._next, build.select(is_inside, begin, self._next_bytes))
        for line in range(0, num_bytes, LINE_BYTES):
            emit.prefetch(emit.add(place, line), level=2)


class PanelWeights(Weights):
    """Argument 0 is a panel."""

    def advance(self, turn: Any) -> None:
        self._ask(turn, 1)

    def tile(self, number: int, turn: Any, *, step: int) -> tuple[Any, int]:
        emit = self._emit
        group = emit.mul(emit.add(self._group, number), self.turns * PANEL_TILE_BYTES)
        return emit.add(emit.add(self._source, group), emit.mul(turn, PANEL_TILE_BYTES)), ROW_BYTES


class RecordWeights(Weights):
    """Argument 0 is a record whose rows of bfloat16 are whole tiles; 8 is the first row."""

    def advance(self, turn: Any) -> None:
        self._ask(turn, 1)

    def tile(self, number: int, turn: Any, *, step: int) -> tuple[Any, int]:
        emit = self._emit
        row = emit.add(self._first, emit.mul(emit.add(self._group, number), TILE))
        place = self._rows.begin(emit, self._source, row)
        return emit.add(place, emit.mul(turn, ROW_BYTES)), self._rows.matrix.row_bytes


class ByteWeights(RecordWeights):
    """Argument 0 is a record whose rows of int8 are whole tiles; 8 is the first row; 10 and 11: record and
    row of the next rows. The rows are passed for 16 tokens, then for the next 16, and each pass asks for a
    part of what comes next."""

    turn_columns = BYTE_COLUMNS

    def __init__(self, emit: Emitter, rows: Rows, layout: Layout) -> None:
        super().__init__(emit, rows, layout)
        self._next_record, self._next_row = emit.argument(10), emit.argument(11)
        self.factors = RowFactors(emit, rows, most=MOST_GROUPS * TILE)
        lines, passes = MOST_GROUPS * TILE * self._turn_bytes // LINE_BYTES, emit.argument(3)
        self._lines = emit.build.udiv(emit.add(passes, lines - 1), passes)
        self._pass = I64(0)

    def begin_pass(self, number: Any) -> None:
        """Over all columns."""
        self._pass = number

    def begin(self, group: Any, num_groups: int) -> None:
        first = self._emit.add(self._first, self._emit.mul(group, TILE))
        self.factors.find(self._source, first, num_rows=num_groups * TILE)
        super().begin(group, num_groups)

    def advance(self, turn: Any) -> None:
        emit, build = self._emit, self._emit.build
        part = emit.add(emit.mul(self._pass, self.turns), turn)
        self.factors.ask(self._next_record, self._next_row, part=part, parts=self.turns)
        begin = emit.mul(emit.mul(part, self._lines), LINE_BYTES)
        is_inside = build.icmp_signed("<", begin, self._next_bytes)
        with build.if_then(is_inside), emit.loop(0, self._lines) as line:
            place = emit.add(emit.add(self._next, begin), emit.mul(line.index, LINE_BYTES))
            emit.prefetch(place, level=2)


class DecodedWeights(Weights):
    """Argument 0 is a record, 8 the first row, 9 memory for two slots; 10 and 11: record and row of the next
    rows. Rows are whole turns."""

    steps = _STEPS
    turn_columns = _STEPS * TILE_COLUMNS

    def __init__(self, emit: Emitter, rows: Rows, layout: Layout) -> None:
        super().__init__(emit, rows, layout)
        self._slots = emit.argument(9)
        self._next_record, self._next_row = emit.argument(10), emit.argument(11)
        self._factors = RowFactors(emit, rows, most=MOST_GROUPS * TILE)

    def begin(self, group: Any, num_groups: int) -> None:
        first = self._emit.add(self._first, self._emit.mul(group, TILE))
        self._factors.find(self._source, first, num_rows=num_groups * TILE)
        super().begin(group, num_groups)

    def advance(self, turn: Any) -> None:
        emit, num_rows = self._emit, self._num_groups * TILE
        slot = self._slot(turn)
        self._factors.ask(self._next_record, self._next_row, part=turn, parts=self.turns)
        first = emit.add(self._first, emit.mul(self._group, TILE))
        with emit.loop(0, num_rows) as inner:
            place = self._rows.begin(emit, self._source, emit.add(first, inner.index))
            lines = self._decoded(place, inner.index, turn)
            out = emit.add(slot, self._place_of(inner.index))
            for step, line in enumerate(lines):
                emit.store(line, emit.add(out, step * MOST_GROUPS * PANEL_TILE_BYTES))
            self._ask(emit.add(emit.mul(turn, num_rows), inner.index), num_rows)

    def tile(self, number: int, turn: Any, *, step: int) -> tuple[Any, int]:
        place = (step * MOST_GROUPS + number) * PANEL_TILE_BYTES
        return self._emit.add(self._slot(turn), place), ROW_BYTES

    def _slot(self, turn: Any) -> Any:
        emit = self._emit
        return emit.add(self._slots, emit.mul(emit.build.and_(turn, I64(1)), _SLOT_BYTES))

    def _place_of(self, row: Any) -> Any:
        """Where a row of the slot's first step begins in it."""
        emit, build = self._emit, self._emit.build
        within = build.and_(row, I64(TILE - 1))
        group = emit.mul(build.lshr(row, I64(TILE.bit_length() - 1)), PANEL_TILE_BYTES)
        return emit.add(group, emit.mul(within, LINE_BYTES))

    def _decoded(self, place: Any, number: Any, turn: Any) -> list[Any]:
        """A turn's columns of one row, a line for each step. `number`: of the row, from the first one."""
        emit, rows = self._emit, self._rows
        width, block = self.turn_columns, rows.order(emit.lanes).size
        lines: list[Any] = []
        for begin in range(0, width, block):
            column = emit.add(emit.mul(turn, width), begin)
            factor = self._factors.at(number, column)
            vectors = rows.vectors(emit, place, column)
            lines += in_units(emit, rows, layout=self._layout, vectors=vectors, factor=factor)
        return lines


def on_the_way(rows: Rows, lanes: int) -> type[Weights] | None:
    """How tiles are made of a record without a panel; None where they cannot be."""
    columns, turn = rows.matrix.cols, DecodedWeights.turn_columns
    if rows.is_in_pairs:
        return RecordWeights
    is_whole = columns % turn == 0 and turn % rows.order(lanes).size == 0
    return DecodedWeights if is_whole and not isinstance(rows, PackedRows) else None
