"""Part 2 of Algorithm 1 on the device: which experts a layer executes, and what that does to its caches."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803, N806 (compile-time constants are written in capitals)

from __future__ import annotations

import triton
import triton.language as tl

from hetero_gpu.routing.caches import COUNTERS
from hetero_gpu.routing.rank import best_by_router, first, least, order_of, step_priority
from hetero_scheduler.routing.scan import FAST_DECAY, FAST_GAIN, SLOW_DECAY, SLOW_GAIN

_FAST_GAIN, _FAST_DECAY = tl.constexpr(float(FAST_GAIN)), tl.constexpr(float(FAST_DECAY))
_SLOW_GAIN, _SLOW_DECAY = tl.constexpr(float(SLOW_GAIN)), tl.constexpr(float(SLOW_DECAY))
_COUNTERS = tl.constexpr(len(COUNTERS))


@triton.jit
def select_row(row, layer, scores, own, tokens, active, experts_out, state, tables, FORM: tl.constexpr):
    """`row`'s experts of `layer`; an inactive row's are the router's own, and its cache stays as it is."""
    TOP_K: tl.constexpr = FORM.top_k
    EXPERT_BLOCK: tl.constexpr = FORM.expert_block
    CHOICE_BLOCK: tl.constexpr = triton.next_power_of_2(TOP_K)
    # ---- read, whether the row is active or not: what follows upon a branch would wait for it
    is_active = tl.load(active + row) != 0
    experts, places = tl.arange(0, EXPERT_BLOCK), tl.arange(0, CHOICE_BLOCK)
    is_expert, is_place = experts < FORM.experts, places < TOP_K
    own_of_row, out_of_row = own + row * TOP_K, experts_out + row * TOP_K
    row_layer = row * FORM.layers + layer
    at = row_layer * FORM.experts + experts
    said = tl.load(scores + row * FORM.experts + experts, mask=is_expert, other=float("-inf"))
    z = said.to(tl.float32)
    own_experts = tl.load(own_of_row + places, mask=is_place, other=-1)
    resident = tl.load(state.is_resident + at, mask=is_expert, other=0) != 0
    guarded = tl.load(state.is_guarded + at, mask=is_expert, other=0) != 0
    inserted = tl.load(state.is_inserted + at, mask=is_expert, other=0) != 0
    # the step's priorities as `steer` fixed them: nothing has changed
    if FORM.is_lru:
        used = tl.load(state.last_use + at, mask=is_expert, other=0)
        step = used.to(tl.float32)
    else:
        fast_now = tl.load(state.fast + at, mask=is_expert, other=0.0)
        slow_now = tl.load(state.slow + at, mask=is_expert, other=0.0)
        share_row = tl.load(tables.prior_row + tl.load(tokens + row))
        share_at = (share_row.to(tl.int64) * FORM.layers + layer) * FORM.experts + experts
        step = step_priority(fast_now, slow_now, tl.load(tables.prior + share_at, mask=is_expert, other=0))
    is_guess, is_guessed = experts < 0, False
    if FORM.executes_guess:
        for k in tl.static_range(TOP_K):
            is_guess = is_guess | (experts == tl.load(state.guess + row_layer * TOP_K + k))
        is_guessed = tl.load(state.guess + row_layer * TOP_K + TOP_K - 1) >= 0
    steps = tl.load(state.clock + row_layer) + 1
    range_before = tl.load(state.range_sum + row_layer)
    counted = tables.counters + row_layer * _COUNTERS
    was_inserted, was_demanded = tl.load(counted), tl.load(counted + 1)
    was_foreign = tl.load(counted + 2)
    tl.debug_barrier()
    if is_active == 0:
        tl.store(out_of_row + places, own_experts, mask=is_place)
    else:
        # ---- choose
        is_own, place = experts < 0, tl.full((EXPERT_BLOCK,), TOP_K, tl.int32)
        for k in tl.static_range(TOP_K):
            is_this = experts == tl.load(own_of_row + k).to(tl.int32)
            is_own, place = is_own | is_this, tl.where(is_this, k, place)
        order = order_of(z)
        is_barred = ((z == float("-inf")) & (is_own == 0)) | (is_expert == 0)
        if FORM.is_running:
            most = tl.max(z, axis=0).to(tl.float64)
            lowest = tl.min(tl.where(z == float("-inf"), float("inf"), z), axis=0).to(tl.float64)
            total = range_before + (most - lowest)
            tl.store(state.range_sum + row_layer, total)
            bonus = (tl.full((), FORM.bonus, tl.float64) * (total / steps.to(tl.float64))).to(tl.float32)
        else:
            bonus = tl.load(tables.bonus + layer)
        is_favoured, is_done = resident, is_barred
        for _ in range(FORM.protected):
            is_this = experts == best_by_router(order, order, place, is_done, experts, EXPERT_BLOCK)
            is_favoured, is_done = is_favoured | is_this, is_done | is_this
        biased = order_of(tl.where(is_favoured, z + bonus, z))
        is_chosen, is_done = experts < 0, is_barred
        for _ in range(TOP_K):
            is_this = experts == best_by_router(biased, order, place, is_done, experts, EXPERT_BLOCK)
            is_chosen, is_done = is_chosen | is_this, is_done | is_this
        if FORM.executes_guess:
            is_chosen = tl.where(is_guessed, is_guess, is_own)

        # ---- say: the router's own first, in their order, then the others from the best on
        num_kept = tl.sum((is_own & is_chosen).to(tl.int32), axis=0)
        kept_places = tl.sum(tl.where(is_own & is_chosen, 1 << place, 0), axis=0)  # a bit each
        is_kept = (kept_places >> places) & 1
        tl.store(out_of_row + tl.cumsum(is_kept, axis=0) - is_kept, own_experts, mask=is_kept != 0)
        is_done, num_said = (is_chosen == 0) | is_own, num_kept
        while num_said < TOP_K:
            expert = best_by_router(order, order, place, is_done, experts, EXPERT_BLOCK)
            is_done = is_done | (experts == expert)
            tl.store(out_of_row + num_said, expert)
            num_said += 1

        # ---- demand
        is_pending = is_chosen & (resident == 0)
        num_demanded = tl.sum(is_pending.to(tl.int32), axis=0)
        by_priority, num_left = order_of(step), num_demanded
        while num_left > 0:
            is_this = experts == first(is_pending, experts, EXPERT_BLOCK)
            is_pending = is_pending & (is_this == 0)
            is_spare = resident & (is_chosen == 0)
            victim = least(by_priority, is_spare & (guarded == 0), experts, EXPERT_BLOCK)
            if victim == EXPERT_BLOCK:
                victim = least(by_priority, is_spare, experts, EXPERT_BLOCK)
            resident = (resident & (experts != victim)) | is_this
            num_left -= 1

        # ---- remember
        if FORM.is_lru:
            tl.store(state.last_use + at, tl.where(is_chosen | inserted, steps, used), mask=is_expert)
        else:
            fast_now = tl.where(is_own, fast_now + _FAST_GAIN, fast_now) * _FAST_DECAY
            slow_now = tl.where(is_own, slow_now + _SLOW_GAIN, slow_now) * _SLOW_DECAY
            tl.store(state.fast + at, fast_now, mask=is_expert)
            tl.store(state.slow + at, slow_now, mask=is_expert)
        tl.store(state.priority + at, step, mask=is_expert)
        tl.store(state.is_resident + at, resident.to(tl.int8), mask=is_expert)
        tl.store(state.is_guarded + at, 0, mask=is_expert)
        tl.store(state.is_inserted + at, 0, mask=is_expert)
        tl.store(state.guess + row_layer * TOP_K + places, -1, mask=is_place)
        tl.store(state.is_begun + row_layer, 0)
        tl.store(state.clock + row_layer, steps)
        tl.store(counted, was_inserted + tl.sum(inserted.to(tl.int32), axis=0))
        tl.store(counted + 1, was_demanded + num_demanded)
        tl.store(counted + 2, was_foreign + TOP_K - num_kept)
