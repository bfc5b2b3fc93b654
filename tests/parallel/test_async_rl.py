"""Batches written by old weights: against one process, against the law of stale gradients, and on simulated links."""

from __future__ import annotations

import math
import time

import pytest
import torch

from labkit.comm.local import run_threads
from labkit.parallel.async_rl import effective_share, policy_gradient, ratios, run
from labkit.plan.machine.topology import Links
from labkit.plan.pocket import stale_gradients
from labkit.plan.pocket.stale_policy import counted_share, period_s, shift_until, staleness_wanted, steps_until
from tests.cases import cases
from tests.simulated import simulate

SIGMA, BEST = 0.5, 2.0


def write(weights, number):
    """Actions in pairs around the mean, whose squares are sigma^2 in the mean: the sampled gradient is the exact one.

    The weights that wrote them come first, so that the trainer can weigh."""
    stream = torch.Generator().manual_seed(number)
    away = torch.randn(8, len(weights), generator=stream, dtype=torch.float64)
    away = away * SIGMA / away.square().mean(0).sqrt()
    return torch.cat([weights[None], weights + away, weights - away])


def as_new(lr):
    """Learn as if the batch were the policy's own."""

    def learn(weights, batch, number):
        old, actions = batch[0], batch[1:]
        rewards = -((actions - BEST) ** 2) / 2
        weights += lr * policy_gradient(actions, rewards, old, SIGMA)

    return learn


def on_rank(group, learn, n_steps, staleness):
    weights = torch.full((3,), BEST + 1.0, dtype=torch.float64)
    group.ledger.clear()
    ages = run(group, weights, write, learn, n_steps, staleness)
    return ages, weights, group.ledger.sent_bytes()


@cases("n", (1, 2, 3, 4))
@cases("staleness", (0, 1, 3))
def test_stale_batches_lead_where_stale_gradients_do(n, staleness):
    """Would catch weights that are newer or older than they should be, batches out of order, and a gradient that is not
    that of the policy that wrote. The reference is the law of w(t+1) = w(t) - lr w(t-s)."""
    for rate in (0.2, 0.6):
        ranks = run_threads(on_rank, n, as_new(rate), 9, staleness)
        ages, weights, _ = ranks[0]
        assert ages == [min(k, staleness) for k in range(9)]
        law = stale_gradients.distances(staleness, rate, 9)[-1]
        assert (weights - BEST).abs().tolist() == pytest.approx([law] * 3, rel=1e-9)
        assert sorted(age for ages, _, _ in ranks[1:] for age in ages) == (sorted(ages) if n > 1 else [])


def test_bytes_are_one_set_of_weights_and_one_batch_a_step():
    """Would catch weights that go to generators that write nothing with them."""
    for staleness in (0, 2, 20):
        ranks = run_threads(on_rank, 3, as_new(0.1), 7, staleness)
        assert [sent for _, _, sent in ranks] == [7 * 3 * 8, 4 * 17 * 3 * 8, 3 * 17 * 3 * 8]


def test_from_the_limit_on_batches_taken_as_new_diverge_and_weighed_ones_do_not():
    """Would catch ratios the wrong way up: with weights 4 steps old, above the limit of the law, the plain run leaves
    the best action and the weighed one comes to it."""
    rate, staleness = 1.15 * stale_gradients.limit(4), 4
    stream = torch.Generator().manual_seed(0)

    def sampled(weights, number):
        away = SIGMA * torch.randn(4000, len(weights), generator=stream, dtype=torch.float64)
        return torch.cat([weights[None], weights + away])

    def weighed(weights, batch, number):
        actions = batch[1:]
        rewards = -((actions - BEST) ** 2) / 2
        weights += rate * policy_gradient(actions, rewards, weights, SIGMA, written_by=batch[0])

    ends = []
    for learn in (as_new(rate), weighed):
        weights = torch.full((3,), BEST + 0.2, dtype=torch.float64)

        def life(group, learn=learn, weights=weights):
            run(group, weights, sampled, learn, 60, staleness)

        run_threads(life, 1)
        ends.append(float((weights - BEST).abs().max()))
    assert ends[0] > 0.5 > 0.1 > ends[1]


@cases("shift", (0.0, 0.2, 0.5, 0.8))
def test_ratios_give_the_gradient_of_the_new_policy_and_leave_the_share_of_the_law(shift):
    """Would catch an exponent without its half, and an effective sample size of other weights."""
    stream = torch.Generator().manual_seed(1)
    old, new = torch.zeros(4, dtype=torch.float64), torch.full((4,), shift, dtype=torch.float64)
    actions = old + SIGMA * torch.randn(400_000, 4, generator=stream, dtype=torch.float64)
    weight = ratios(actions, new, old, SIGMA)
    density = torch.distributions.Normal(new, SIGMA).log_prob(actions) - torch.distributions.Normal(
        old, SIGMA
    ).log_prob(actions)
    torch.testing.assert_close(weight.log(), density, rtol=0, atol=1e-9)
    assert effective_share(weight).mean().item() == pytest.approx(counted_share(shift, SIGMA), rel=0.1)
    rewards = -((actions - BEST) ** 2) / 2
    found = policy_gradient(actions, rewards, new, SIGMA, written_by=old)
    assert found.tolist() == pytest.approx([BEST - shift] * 4, abs=0.2)


def timed(group, generate_s, train_s, staleness, n_steps):
    def slow_write(weights, number):
        time.sleep(generate_s)
        return weights

    def slow_learn(weights, batch, number):
        time.sleep(train_s)

    weights = torch.zeros(1000, dtype=torch.float64)
    group.barrier()
    started = time.perf_counter()
    run(group, weights, slow_write, slow_learn, n_steps, staleness)
    return time.perf_counter() - started


@cases(("generate_s", "train_s", "n"), [(0.1, 0.1, 2), (0.3, 0.1, 3), (0.1, 0.3, 2), (0.3, 0.1, 4)])
@cases("staleness", (0, 1, 2, 5))
def test_seconds_a_step_are_those_of_the_law(generate_s, train_s, n, staleness):
    """Would catch a batch that waits for newer weights than it needs, and generators that do not take turns. Two runs
    of different lengths, so that filling and draining cancel out."""
    message_s = 0.01
    links = Links.uniform(n, alpha_s=0.0, bytes_per_s=8000 / message_s)
    short, long = (
        simulate(timed, links, generate_s, train_s, staleness, steps)[0]
        for steps in (24, 24 + 12 * (n - 1) * (staleness + 1))
    )
    law = period_s(generate_s, train_s, message_s, n - 1, staleness)
    assert (long - short) / (12 * (n - 1) * (staleness + 1)) == pytest.approx(law, rel=1e-3)


def test_the_least_staleness_that_keeps_everybody_busy():
    """Would catch one step too many or too few."""
    for sizes in ((0.1, 0.1, 0.0, 1), (0.3, 0.1, 0.01, 3), (1.0, 0.1, 0.0, 2), (0.0, 0.0, 0.0, 1)):
        least = staleness_wanted(*sizes)
        periods = [period_s(*sizes, s) for s in range(least + 3)]
        assert periods[least] == pytest.approx(min(periods))
        assert least == 0 or periods[least - 1] > periods[least] * (1 + 1e-9)
    assert steps_until(math.exp(-1), SIGMA, 0.1) == 5
    assert counted_share(shift_until(0.3, SIGMA), SIGMA) == pytest.approx(0.3)


def test_what_cannot_be_is_refused_with_the_numbers():
    """Would catch a run without steps, a policy without spread, and negative seconds."""
    for call, words in (
        (lambda: run_threads(on_rank, 1, as_new(0.1), 0, 0), "at least 1 step.*got 0 and 0"),
        (lambda: run_threads(on_rank, 1, as_new(0.1), 1, -1), "got 1 and -1"),
        (lambda: period_s(0.1, -0.1, 0.0, 1, 0), "0 or more, got"),
        (lambda: period_s(0.1, 0.1, 0.0, 0, 0), "at least 1 generator"),
        (lambda: counted_share(0.1, 0.0), "above 0, got 0.0"),
        (lambda: shift_until(0.0, 1.0), "at most 1, got 0.0"),
        (lambda: steps_until(0.5, 1.0, 0.0), "above 0, got 0.0"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
