"""Job sequencing with deadlines, on the device: what the link carries next (SeqMoE §6.2, Algorithm 1).

    candidates [L, k'] in the order of their deadlines, the running layer's successor first
        │  those that hold no slot
        ▼
    the first deadline whose best candidate t the greedy choice keeps ─► slot ─► task ring, until that is full

`hetero_scheduler.prefetch.jsd` keeps the greedy choice in a heap: it pushes tasks deadline by deadline, and
pops the worst whenever more are held than C(d), the transfers that end before d. One thread block need not
replay that. After deadline d the heap holds the C(d) best of what it held and what was pushed. Let S(d) be
the tasks better than t that are due by d. Those in the heap number A(d) = min(C(d), A(before) + new ones),
that is

    A(d) = S(d) + min(0, min over e <= d of C(e) - S(e))

and t, due at s, is kept to the end if A(before d) + new ones < C(d) for each d from s on. That comes to

    min over d >= s of C(d) - S(d)   >   min(0, min over e < s of C(e) - S(e)).

Of one deadline the best task is kept if any is, so one test for each deadline finds the task that Algorithm 1
selects. Ties are the heap's: more confidence, then the earlier deadline, then the lower expert.

The budget is the host's too: the inverse of a moving average of the positions that a transfer took, which the
worker reports with each landing; here bounded from above as well, by the layers of a step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hetero_gpu.control.region import LANDING_WORDS, TASK_WORDS, ControlRegion, Landed, Word
from hetero_gpu.foresight.candidates import Candidates
from hetero_gpu.tables.prefetch import first_free, num_free, send_tasks, write_task
from hetero_gpu.tables.state import NUM_COUNTERS, DeviceTables
from hetero_scheduler import SlotState
from hetero_scheduler.prefetch.jsd import SHORTEST_TRANSFER, SMOOTHING

_FETCH = tl.constexpr(int(SlotState.FETCH))
_USED = tl.constexpr(int(SlotState.USED))
_ARRIVED = tl.constexpr(int(Landed.ARRIVED))
_TASK, _LANDING = tl.constexpr(TASK_WORDS * 8), tl.constexpr(LANDING_WORDS * 8)
_COUNTERS = tl.constexpr(NUM_COUNTERS)
_SHORTEST, _SMOOTHING = tl.constexpr(SHORTEST_TRANSFER), tl.constexpr(SMOOTHING)
_MOST_TRANSFERS = tl.constexpr(1e9)
_FAR = tl.constexpr(2**31 - 1)


class Room(NamedTuple):
    """What a prefetch must leave. `kept_back`: slots that a layer finds EMPTY or evictable, the more rows the
    more. `is_shared`: whether all layers use the same slots; then tasks wait while there are too few, and
    otherwise a task of such a layer is dropped."""

    kept_back: int
    is_shared: bool


class JsdPrefetch:
    """See the module docstring. `region`: what `tables` are attached to."""

    def __init__(
        self, candidates: Candidates, *, tables: DeviceTables, region: ControlRegion, room: Room
    ) -> None:
        """As long as nothing has landed, one transfer a layer is expected."""
        self._candidates, self._tables, self._region, self._room = candidates, tables, region, room
        self.positions_per_transfer = torch.ones(1, dtype=torch.float64, device=tables.device)
        """The moving average; its inverse is Algorithm 1's B_avg."""
        self.looks_at_next = False
        """Whether forecasts of the very next layer come in, so that tasks for it are worth having."""
        self._num_seen = tables.num_landed.clone()

    def ask(self, layer: int) -> None:
        """Between `ensure(layer)` and the next `ensure`, once each layer: send tasks while the ring has room.
        Experts that `layer` requires are never evicted. Asynchronous, capturable."""
        tables, candidates = self._tables, self._candidates
        num_layers, per_layer = candidates.expert.shape
        _jsd_kernel[(1,)](
            candidates.expert,
            candidates.confidence,
            self.positions_per_transfer,
            self._num_seen,
            tables.for_kernels,
            self._region.tasks_address,
            self._region.landings_address,
            self._region.address(Word.TASK_TAIL),
            self._region.address(Word.POSITION),
            layer,
            RING=self._region.ring_size,
            KEPT_BACK=self._room.kept_back,
            LOOKS_AT_NEXT=self.looks_at_next,
            IS_SHARED=self._room.is_shared,
            NUM_SLOTS=tables.num_slots,
            NUM_LAYERS=num_layers,
            NUM_EXPERTS=tables.num_experts,
            PER_LAYER=per_layer,
            SLOT_BLOCK=triton.next_power_of_2(tables.num_slots),
            LAYER_BLOCK=triton.next_power_of_2(num_layers),
            TASK_BLOCK=triton.next_power_of_2(per_layer),
            num_warps=tables.num_warps,
            enable_fp_fusion=False,  # the average rounds as the host's does: each product, then the sum
        )


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "tasks_address",
        "landings_address",
        "task_tail_address",
        "position_address",
        "layer",
    ]
)
def _jsd_kernel(  # type: ignore[no-untyped-def]
    task_expert,
    task_confidence,
    pace,
    num_seen,
    tables,
    tasks_address,
    landings_address,
    task_tail_address,
    position_address,
    layer,
    RING: tl.constexpr,  # noqa: N803
    KEPT_BACK: tl.constexpr,  # noqa: N803
    LOOKS_AT_NEXT: tl.constexpr,  # noqa: N803
    IS_SHARED: tl.constexpr,  # noqa: N803
    NUM_SLOTS: tl.constexpr,  # noqa: N803
    NUM_LAYERS: tl.constexpr,  # noqa: N803
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    PER_LAYER: tl.constexpr,  # noqa: N803
    SLOT_BLOCK: tl.constexpr,  # noqa: N803
    LAYER_BLOCK: tl.constexpr,  # noqa: N803
    TASK_BLOCK: tl.constexpr,  # noqa: N803
):
    # ---- read
    now, tag, landed = tl.load(tables.position), tl.load(tables.next_tag), tl.load(tables.num_landed)
    first = tl.load(tables.num_emitted)
    positions_per_transfer = _link_pace(
        tl.load(pace), tl.load(num_seen), landed, landings_address, RING, NUM_LAYERS
    )
    slots = tl.arange(0, SLOT_BLOCK)
    is_slot = slots < NUM_SLOTS
    key_in = tl.load(tables.slot_key + slots, mask=is_slot, other=-1)
    state = tl.load(tables.slot_state + slots, mask=is_slot, other=_FETCH)
    last = tl.load(tables.slot_last + slots, mask=is_slot, other=0)
    pinned = tl.load(tables.is_pinned + slots, mask=is_slot, other=1)
    unproven = tl.load(tables.is_unproven + slots, mask=is_slot, other=0).to(tl.int32)
    is_evictable = is_slot & (state == _USED) & (pinned == 0) & (last != now)
    rank = tl.load(tables.score + key_in, mask=is_evictable, other=float("inf"))
    due = tl.arange(0, LAYER_BLOCK)[:, None]  # positions from the next layer's on
    column = tl.arange(0, TASK_BLOCK)[None, :]
    due_layer = (layer + 1 + due) % NUM_LAYERS
    is_task = (due < NUM_LAYERS) & (column < PER_LAYER)
    expert = tl.load(task_expert + due_layer * PER_LAYER + column, mask=is_task, other=-1)
    confidence = tl.load(task_confidence + due_layer * PER_LAYER + column, mask=is_task, other=0.0)
    if not LOOKS_AT_NEXT:
        expert = tl.where(due == 0, -1, expert)  # for the next layer it comes too late
    key = due_layer * NUM_EXPERTS + expert
    held = tl.load(tables.slot_of + key, mask=expert >= 0, other=0)
    is_absent = (expert >= 0) & (held < 0)
    tl.debug_barrier()

    # ---- choose, reserve, send, until there is no more room
    average = 1.0 / positions_per_transfer
    current = average
    least = tl.full((), 1.0, tl.float64)  # a whole transfer, but where late ones may wait for others
    if LOOKS_AT_NEXT:
        least = tl.where(average >= 1.0, 0.0, least)
    emitted = first
    is_asking = emitted < landed + RING
    while is_asking:
        chosen_due, chosen_expert = _select(
            expert,
            tl.where(is_absent, confidence, -1.0),
            tl.maximum(current, least),
            average,
            NUM_LAYERS,
            NUM_EXPERTS,
            LAYER_BLOCK,
        )
        is_found = chosen_due < LAYER_BLOCK
        if IS_SHARED:
            is_found = is_found & (num_free(slots, state, pinned, tables.pools) > KEPT_BACK)
        is_asking = is_found
        if is_found:
            current -= 1.0
            is_chosen_task = (due == chosen_due) & (expert == chosen_expert)
            expert = tl.where(is_chosen_task, -1, expert)
            is_absent = is_absent & (expert >= 0)
            key_layer = (layer + 1 + chosen_due) % NUM_LAYERS
            pool = tables.pools + 2 * key_layer
            slot = first_free(slots, state, rank, pool, SLOT_BLOCK)
            if num_free(slots, state, pinned, pool) <= KEPT_BACK:
                slot = slot * 0 - 1
            if slot >= 0:
                is_chosen = slots == slot
                evicted = tl.max(tl.where(is_chosen, key_in, -1), axis=0)
                is_wasted = tl.max(tl.where(is_chosen, unproven, 0), axis=0)
                is_absent = is_absent | ((expert >= 0) & (key == evicted))
                chosen_key = key_layer * NUM_EXPERTS + chosen_expert
                rank = tl.where(is_chosen, float("inf"), rank)
                state = tl.where(is_chosen, _FETCH, state)
                key_in = tl.where(is_chosen, chosen_key, key_in)
                write_task(
                    chosen_key, slot, tag, now + 1 + chosen_due, evicted, is_wasted, key_layer, tables,
                    tasks_address + (emitted % RING) * _TASK,
                )  # fmt: skip
                tag += 1
                emitted += 1
                is_asking = emitted < landed + RING

    # ---- write
    tl.debug_barrier()
    expert = tl.where(due == 0, -1, expert)  # its layer begins before anybody asks again
    tl.store(task_expert + due_layer * PER_LAYER + column, expert, mask=is_task)
    tl.store(pace, positions_per_transfer)
    tl.store(num_seen, landed)
    if emitted > first:
        tl.store(tables.slot_key + slots, key_in, mask=is_slot)
        tl.store(tables.slot_state + slots, state, mask=is_slot)
        tl.store(tables.next_tag, tag)
        tl.store(tables.num_emitted, emitted)
        send_tasks(emitted, now, task_tail_address, position_address)


@triton.jit  # type: ignore[untyped-decorator]
def _link_pace(average, seen, landed, landings_address, RING: tl.constexpr, NUM_LAYERS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The moving average of positions a transfer, after the landings since `seen`: their entries stay in the
    ring until tasks are emitted anew."""
    longest = tl.full((), NUM_LAYERS, tl.float64)
    smoothing = tl.full((), _SMOOTHING, tl.float64)
    while seen < landed:
        entry = (landings_address + (seen % RING) * _LANDING).to(tl.pointer_type(tl.int64))
        status = tl.load(entry + 2, volatile=True)
        taken = tl.load(entry + 4, volatile=True).to(tl.float64)
        taken = tl.minimum(tl.maximum(taken, tl.full((), _SHORTEST, tl.float64)), longest)
        average = tl.where(status == _ARRIVED, average + smoothing * (taken - average), average)
        seen += 1
    return average


@triton.jit  # type: ignore[untyped-decorator]
def _select(  # type: ignore[no-untyped-def]
    expert,
    confidence,
    current,
    average,
    NUM_LAYERS: tl.constexpr,  # noqa: N803
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    LAYER_BLOCK: tl.constexpr,  # noqa: N803
):
    """Algorithm 1: (positions until it is due, expert) of the task to transfer; LAYER_BLOCK for none.

    `expert`, `confidence` `[LAYER_BLOCK, TASK_BLOCK]`, rows by deadline; confidence below 0: no task.
    """
    due = tl.arange(0, LAYER_BLOCK)
    capacity = current + average * due.to(tl.float64)
    capacity = tl.minimum(tl.floor(capacity), tl.full((), _MOST_TRANSFERS, tl.float64)).to(tl.int32)
    best = tl.max(confidence, axis=1)
    best_expert = tl.min(tl.where(confidence == best[:, None], expert, NUM_EXPERTS), axis=1)
    chosen = tl.min(tl.where(best >= 0, due, LAYER_BLOCK), axis=0)
    is_kept = chosen < 0
    while (chosen < LAYER_BLOCK) & (is_kept == 0):
        worth = tl.max(tl.where(due == chosen, best, -1.0), axis=0)
        is_better = (confidence > worth) | ((confidence == worth) & (due < chosen)[:, None])
        num_better = tl.cumsum(tl.sum(is_better.to(tl.int32), axis=1), axis=0)
        left = tl.where(due < NUM_LAYERS, capacity - num_better, _FAR)
        before = tl.minimum(tl.min(tl.where(due < chosen, left, _FAR), axis=0), 0)
        is_kept = tl.min(tl.where(due >= chosen, left, _FAR), axis=0) > before
        following = tl.min(tl.where((best >= 0) & (due > chosen), due, LAYER_BLOCK), axis=0)
        chosen = tl.where(is_kept, chosen, following)
    return chosen, tl.max(tl.where(due == chosen, best_expert, -1), axis=0)
