"""Shares tried in turn, by made-up times of steps."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from hetero_scheduler.misses import SHARES
from hetero_scheduler.trials import BLOCK_STEPS, COST, MOST_REST, REST_STEPS, SETTLE_STEPS, Trials

Machine = Callable[[float, int], float]
"""Seconds of a step, by share and number of the step."""
ENOUGH = 1200


def run(
    trials: Trials[float], machine: Machine, num_steps: int, *, first: int = 0, a_visit: int = 4
) -> float:
    """So many steps, in visits of a few; their seconds together."""
    total = 0.0
    for step in range(first, first + num_steps, a_visit):
        seconds = sum(machine(trials.choice, step + i) for i in range(a_visit))
        trials.observe(a_visit, seconds)
        total += seconds
    return total


def both_help(best: float, *, gain: float = 0.3) -> Machine:
    """A step of 1 s without help, `1 - gain` with the best share, and more again beyond it."""
    return lambda share, _step: 1 - gain + gain * abs(share - best) / max(best, 1 - best)


def noisy(machine: Machine, *, spread: float, seed: int) -> Machine:
    rng = random.Random(seed)
    return lambda share, step: machine(share, step) * max(0.2, rng.gauss(1, spread))


def cpu_loses(share: float, _step: int) -> float:
    return 1 + 2 * share


@pytest.mark.parametrize("best", SHARES[1:])
def test_the_fastest_share_is_found_and_kept(best: float) -> None:
    trials = Trials(SHARES)
    assert trials.choice == 0
    run(trials, both_help(best), ENOUGH)
    assert not trials.is_racing
    assert trials.choice == best
    assert min(trials.step_s, key=trials.step_s.__getitem__) == best


def hiccuping(machine: Machine, *, every: int, seed: int) -> Machine:
    """One step in so many takes as long as 60 others."""
    rng = random.Random(seed)
    return lambda share, step: machine(share, step) * (60 if rng.random() < 1 / every else 1)


@pytest.mark.parametrize("a_visit", [1, 4])
def test_noise_and_hiccups_cost_little(a_visit: int) -> None:
    """The steps of the shares that are taken are within 1 % of the best one's, in the mean of many races; and
    whatever happened, the CPU is not given up."""
    machine, taken = both_help(0.5), []
    for seed in range(40):
        trials = Trials(SHARES)
        noise = noisy(machine, spread=0.33 if seed % 2 else 0.15, seed=seed)
        run(trials, noise if seed % 2 else hiccuping(noise, every=100, seed=seed), ENOUGH, a_visit=a_visit)
        assert not trials.is_lost
        taken.append(machine(trials.choice, 0))
    assert sum(taken) / len(taken) < 1.01 * machine(0.5, 0)


def test_a_share_that_was_interrupted_stays_in_the_race() -> None:
    """A block of the best share had something else of the machine's in it."""
    trials, machine, is_interrupted = Trials(SHARES), both_help(0.5), False
    for step in range(0, ENOUGH, 4):
        seconds = 4 * machine(trials.choice, step)
        if trials.choice == 0.5 and not is_interrupted and trials._times[3].steps >= 8:
            seconds, is_interrupted = seconds + 60.0, True
        trials.observe(4, seconds)
    assert is_interrupted
    assert trials.choice == 0.5
    assert trials.step_s[0.5] == pytest.approx(machine(0.5, 0))


def test_a_cpu_that_loses_is_given_up_for_good() -> None:
    trials = Trials(SHARES)
    run(trials, noisy(cpu_loses, spread=0.1, seed=0), ENOUGH)
    assert trials.is_lost
    assert trials.choice == 0
    run(trials, lambda share, _step: 1 - share, 10 * MOST_REST)
    assert trials.is_lost
    assert trials.choice == 0


def test_a_cpu_that_saves_hardly_anything_is_given_up() -> None:
    """What is left in the step to ask for it costs as much."""
    trials = Trials(SHARES)
    run(trials, both_help(0.5, gain=0.03), ENOUGH)
    assert trials.is_lost


def test_a_share_far_behind_is_left_early() -> None:
    trials, slow_steps = Trials(SHARES), 0
    for _ in range(ENOUGH):
        slow_steps += trials.choice == 1
        trials.observe(1, 100.0 if trials.choice == 1 else 1.0 - trials.choice / 2)
    assert 0 < slow_steps < SETTLE_STEPS + BLOCK_STEPS
    assert trials.choice == 0.7


def test_what_a_share_does_to_the_cache_shows_late_and_counts() -> None:
    """A share of 1 is fast at first, with what was resident, and slow for good."""
    since = 0

    def machine(share: float, _step: int) -> float:
        nonlocal since
        since = since + 1 if share == 1 else 0
        return (
            2.0 if share == 1 and since > SETTLE_STEPS else 0.5 if share == 1 else both_help(0.35)(share, 0)
        )

    trials = Trials(SHARES)
    run(trials, machine, ENOUGH, a_visit=1)
    assert trials.choice == 0.35


def test_a_promise_that_is_broken_later_is_raced_for_again() -> None:
    """What a share of 1 does to the cache shows only when the race is long over."""
    since = 0

    def machine(share: float, _step: int) -> float:
        nonlocal since
        since = since + 1 if share == 1 else 0
        return 2.0 if since > 100 else 0.5 if share == 1 else both_help(0.35)(share, 0)

    trials = Trials(SHARES)
    run(trials, machine, ENOUGH, a_visit=1)
    slow = run(trials, machine, 20 * ENOUGH, first=ENOUGH, a_visit=1)
    assert trials.choice == 0.35
    assert slow < 1.05 * 0.7 * 20 * ENOUGH


def test_a_machine_that_slows_down_for_all_is_not_raced_on_for_ever() -> None:
    trials = Trials(SHARES)
    run(trials, both_help(0.5), ENOUGH)
    slower = noisy(lambda share, step: 1.5 * both_help(0.5)(share, step), spread=0.15, seed=1)
    racing = 0
    for step in range(REST_STEPS):
        racing += trials.is_racing
        trials.observe(1, slower(trials.choice, step))
    assert trials.choice == 0.5
    assert racing < 0.5 * REST_STEPS


def test_drift_is_followed_and_looked_for_ever_more_seldom() -> None:
    trials = Trials(SHARES)
    run(trials, both_help(0.2), ENOUGH)
    assert trials.choice == 0.2
    run(trials, both_help(1.0), 8 * REST_STEPS, first=ENOUGH)
    assert trials.choice == 1.0
    racing = 0
    for _ in range(2 * MOST_REST):
        racing += trials.is_racing
        trials.observe(1, 1.0 - trials.choice / 2)
    assert racing < 0.02 * 2 * MOST_REST


@pytest.mark.parametrize("slower", [1.03, 1.3, 3.0])
def test_racing_again_loses_a_hundredth_of_the_time(slower: float) -> None:
    trials = Trials(SHARES)

    def machine(share: float, _step: int) -> float:
        return 1.0 if share == 0.5 else 2.0 if share == 0 else slower

    run(trials, machine, ENOUGH)
    assert not trials.is_racing
    num_steps = 8 * MOST_REST
    lost = run(trials, machine, num_steps, first=ENOUGH) - num_steps
    assert 0 < lost < COST * num_steps
    assert trials.choice == 0.5


def test_a_neighbour_that_is_hardly_faster_does_not_take_over() -> None:
    trials = Trials(SHARES)
    run(trials, both_help(0.35), ENOUGH)
    run(trials, lambda share, _step: 0.69 if share == 0.5 else 0.7, 2 * REST_STEPS, first=ENOUGH)
    assert trials.choice == 0.35


def test_two_choices_of_any_kind() -> None:
    trials = Trials((False, True))
    assert trials.choice is False
    while trials.is_racing:
        trials.observe(4, 4 * (0.8 if trials.choice else 1.0))
    assert trials.choice is True and not trials.is_lost
    assert (trials.plain_s, trials.helped_s) == pytest.approx((1.0, 0.8))
    while not trials.is_lost:
        trials.observe(4, 4 * (1.3 if trials.choice else 1.0))
    assert trials.choice is False


@pytest.mark.parametrize("choices", [(), (0.0,), (0.0, 0.5, 0.5)])
def test_choices_that_say_nothing_are_refused(choices: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="no two equal"):
        Trials(choices)
