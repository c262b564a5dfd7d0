"""Part 1 of Algorithm 1 on the device: what the pre-gate inserts into the logical caches of a layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_gpu.routing.caches import DeviceCaches
from hetero_gpu.routing.rank import any_of, best_left, least, order_of, step_priority


def steer(
    caches: DeviceCaches, layer: int, guess: torch.Tensor, tokens: torch.Tensor, *, active: torch.Tensor
) -> torch.Tensor:
    """For the coming `select` of `layer`: visit the best of `guess`, insert what the policy allows.

    `guess` float32 `[rows, E]`, `tokens` int64 `[rows]`, `active` bool `[rows]`: contiguous, of the first
    rows of `caches`; rows that are not active stay as they are. Returns what was inserted, int32
    `[rows, insertions]`, best first, -1 where there is less. Asynchronous, capturable.
    """
    num_layers, num_experts, top_k = caches.shape
    state, rows = caches.state, len(guess)
    inserted = torch.empty((rows, caches.rules.insertions), dtype=torch.int32, device=caches.device)
    _steer_kernel[(rows,)](
        guess,
        tokens,
        active,
        inserted,
        caches.prior,
        caches.prior_row,
        state["is_resident"],
        state["priority"],
        state["fast"],
        state["slow"],
        state["last_use"],
        state["is_begun"],
        state["is_guarded"],
        state["is_inserted"],
        state["guess"],
        layer,
        NUM_LAYERS=num_layers,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        EXPERT_BLOCK=triton.next_power_of_2(num_experts),
        NUM_VISITED=max(caches.rules.window, top_k),
        WINDOW=caches.rules.window,
        INSERTIONS=caches.rules.insertions,
        INSERTION_BLOCK=triton.next_power_of_2(max(1, caches.rules.insertions)),
        IS_LRU=caches.rules.is_lru,
        num_warps=1,
    )
    return inserted


@triton.jit(do_not_specialize=["layer"])  # type: ignore[untyped-decorator]
def _steer_kernel(  # type: ignore[no-untyped-def]
    guess,
    tokens,
    active,
    inserted_out,
    prior,
    prior_row,
    is_resident,
    priority,
    fast,
    slow,
    last_use,
    is_begun,
    is_guarded,
    is_inserted,
    guess_out,
    layer,
    NUM_LAYERS: tl.constexpr,  # noqa: N803
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    TOP_K: tl.constexpr,  # noqa: N803
    EXPERT_BLOCK: tl.constexpr,  # noqa: N803
    NUM_VISITED: tl.constexpr,  # noqa: N803
    WINDOW: tl.constexpr,  # noqa: N803
    INSERTIONS: tl.constexpr,  # noqa: N803
    INSERTION_BLOCK: tl.constexpr,  # noqa: N803
    IS_LRU: tl.constexpr,  # noqa: N803
):
    # ---- read, whether the row is active or not: what follows upon a branch would wait for it
    row = tl.program_id(0)
    is_active = tl.load(active + row) != 0
    experts = tl.arange(0, EXPERT_BLOCK)
    is_expert = experts < NUM_EXPERTS
    row_layer = row * NUM_LAYERS + layer
    at = row_layer * NUM_EXPERTS + experts
    scores = tl.load(guess + row * NUM_EXPERTS + experts, mask=is_expert, other=float("-inf"))
    resident = tl.load(is_resident + at, mask=is_expert, other=0) != 0
    if IS_LRU:
        step = tl.load(last_use + at, mask=is_expert, other=0).to(tl.float32)
    else:
        fast_now = tl.load(fast + at, mask=is_expert, other=0.0)
        slow_now = tl.load(slow + at, mask=is_expert, other=0.0)
        share_row = tl.load(prior_row + tl.load(tokens + row))
        share_at = (share_row.to(tl.int64) * NUM_LAYERS + layer) * NUM_EXPERTS + experts
        step = step_priority(fast_now, slow_now, tl.load(prior + share_at, mask=is_expert, other=0))
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
                tl.store(guess_out + row_layer * TOP_K + rank, tl.where(expert < EXPERT_BLOCK, expert, -1))
            if rank < WINDOW:
                guarded = guarded | (is_this & resident)
                if any_of(is_this & (resident == 0)) & (num_new < INSERTIONS):
                    victim = least(order, resident & (guarded == 0), experts, EXPERT_BLOCK)
                    if victim < EXPERT_BLOCK:
                        resident = (resident & (experts != victim)) | is_this
                        guarded = guarded | is_this
                        inserted = inserted | is_this
                        inserted_at = tl.where(places == num_new, expert, inserted_at)
                        num_new += 1
        tl.store(priority + at, step, mask=is_expert)
        tl.store(is_resident + at, resident.to(tl.int8), mask=is_expert)
        tl.store(is_guarded + at, guarded.to(tl.int8), mask=is_expert)
        tl.store(is_inserted + at, inserted.to(tl.int8), mask=is_expert)
        tl.store(is_begun + row_layer, 1)
    tl.store(inserted_out + row * INSERTIONS + places, inserted_at, mask=places < INSERTIONS)
