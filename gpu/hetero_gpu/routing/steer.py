"""Part 1 of Algorithm 1 on the device: what the pre-gate inserts into the logical caches of a layer."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803, N806 (compile-time constants are written in capitals)

from __future__ import annotations

import triton
import triton.language as tl

from hetero_gpu.routing.rank import any_of, best_left, least, order_of, step_priority


@triton.jit
def steer_row(row, layer, guess, tokens, active, inserted_out, state, tables, FORM: tl.constexpr):
    """Keys of what `row` inserts for `layer`, best first, -1 where there is less; an inactive row nothing."""
    TOP_K: tl.constexpr = FORM.top_k
    EXPERT_BLOCK: tl.constexpr = FORM.expert_block
    INSERTION_BLOCK: tl.constexpr = triton.next_power_of_2(max(1, FORM.insertions))
    NUM_VISITED: tl.constexpr = max(FORM.window, TOP_K)
    # ---- read, whether the row is active or not: what follows upon a branch would wait for it
    is_active = tl.load(active + row) != 0
    experts = tl.arange(0, EXPERT_BLOCK)
    is_expert = experts < FORM.experts
    row_layer = row * FORM.layers + layer
    at = row_layer * FORM.experts + experts
    said = tl.load(guess + row * FORM.experts + experts, mask=is_expert, other=float("-inf"))
    scores = said.to(tl.float32)
    resident = tl.load(state.is_resident + at, mask=is_expert, other=0) != 0
    if FORM.is_lru:
        step = tl.load(state.last_use + at, mask=is_expert, other=0).to(tl.float32)
    else:
        fast_now = tl.load(state.fast + at, mask=is_expert, other=0.0)
        slow_now = tl.load(state.slow + at, mask=is_expert, other=0.0)
        share_row = tl.load(tables.prior_row + tl.load(tokens + row))
        share_at = (share_row.to(tl.int64) * FORM.layers + layer) * FORM.experts + experts
        step = step_priority(fast_now, slow_now, tl.load(tables.prior + share_at, mask=is_expert, other=0))
    places = tl.arange(0, INSERTION_BLOCK)
    inserted_at = tl.full((INSERTION_BLOCK,), -1, tl.int32)
    tl.debug_barrier()

    # ---- visit
    if is_active:
        order, visit_order = order_of(step), order_of(scores)
        guarded, inserted = experts < 0, experts < 0
        is_visited = scores == float("-inf")
        num_new = 0
        for rank in range(NUM_VISITED):
            expert = best_left(visit_order, is_visited, experts, EXPERT_BLOCK)
            is_this = experts == expert
            is_visited = is_visited | is_this
            if rank < TOP_K:
                tl.store(
                    state.guess + row_layer * TOP_K + rank,
                    tl.where(expert < EXPERT_BLOCK, expert, -1),
                )
            if rank < FORM.window:
                guarded = guarded | (is_this & resident)
                if any_of(is_this & (resident == 0)) & (num_new < FORM.insertions):
                    victim = least(order, resident & (guarded == 0), experts, EXPERT_BLOCK)
                    if victim < EXPERT_BLOCK:
                        resident = (resident & (experts != victim)) | is_this
                        guarded = guarded | is_this
                        inserted = inserted | is_this
                        inserted_at = tl.where(places == num_new, layer * FORM.experts + expert, inserted_at)
                        num_new += 1
        tl.store(state.priority + at, step, mask=is_expert)
        tl.store(state.is_resident + at, resident.to(tl.int8), mask=is_expert)
        tl.store(state.is_guarded + at, guarded.to(tl.int8), mask=is_expert)
        tl.store(state.is_inserted + at, inserted.to(tl.int8), mask=is_expert)
        tl.store(state.is_begun + row_layer, 1)
    tl.store(inserted_out + places * tl.num_programs(0) + row, inserted_at, mask=places < FORM.insertions)
