"""Off-policy evaluation: exact on decision processes small enough to list every answer."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from rein.functional.cross_fitting import cross_fitted_values, scores_of_others
from rein.functional.off_policy_evaluation import (
    Estimate,
    by_prompt,
    clustered,
    importance_sampling,
    log_ratios,
    per_decision,
    scaled,
    self_normalised,
    student,
    trust,
    with_control_variate,
    with_missing,
)

WORDS, LENGTH = 3, 3  # 0 ends an answer


class Listed:
    """Every answer of a process whose policies are tables by what was said before."""

    def __init__(self, seed: int, *, uniform: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        tables: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}

        def of(before: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
            if before not in tables:
                drawn = torch.rand(3, WORDS, generator=generator, dtype=torch.float64)
                chances = (3 * drawn[:2]).softmax(-1)
                tables[before] = (
                    torch.full_like(chances[0], 1 / WORDS) if uniform else chances[0],
                    chances[1],
                    drawn[2],
                )
            return tables[before]

        said = {self._cut(words) for words in product(range(WORDS), repeat=LENGTH)}
        answers = (
            [tuple(words) for words in product(range(WORDS), repeat=LENGTH)] if uniform else sorted(said)
        )
        shape = len(answers), LENGTH
        self.behavior, self.actor = torch.zeros(shape).double(), torch.zeros(shape).double()
        self.rewards, self.mask = torch.zeros(shape).double(), torch.zeros(shape, dtype=torch.bool)
        for row, words in enumerate(answers):
            for t, word in enumerate(words):
                behavior, actor, reward = of(words[:t])
                self.behavior[row, t], self.actor[row, t] = behavior[word].log(), actor[word].log()
                self.rewards[row, t], self.mask[row, t] = reward[word], True
        self.log_w = log_ratios(self.actor, self.behavior, self.mask)
        self.drawn = self.behavior.sum(1).exp()  # how likely the behavior policy is to give each
        self.values = torch.rand(shape, generator=generator, dtype=torch.float64)
        by_prefix: dict[tuple[int, ...], float] = {}
        for row, words in enumerate(answers):  # V may only know what was said before
            for t in range(LENGTH):
                self.values[row, t] = by_prefix.setdefault(words[:t], self.values[row, t].item())

    @staticmethod
    def _cut(words: tuple[int, ...]) -> tuple[int, ...]:
        return words[: words.index(0) + 1] if 0 in words else words

    def truth(self, gamma: float) -> float:
        returns = (self.rewards * gamma ** torch.arange(LENGTH).double()).sum(1)
        return (self.actor.sum(1).exp() * returns).sum().item()

    def mean(self, rows: Tensor) -> float:
        return (self.drawn * rows).sum().item()


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("seed", range(5))
def test_estimators_are_unbiased(seed: int, gamma: float) -> None:
    """The mean over all answers of the behavior policy is the actor's expected score, whatever V is."""
    p = Listed(seed)
    assert p.drawn.sum().item() == pytest.approx(1)
    truth = p.truth(gamma)
    given = p.log_w, p.rewards
    for rows in (
        importance_sampling(*given, p.mask, gamma=gamma),
        per_decision(*given, p.mask, gamma=gamma),
        with_control_variate(*given, p.values, p.mask, gamma=gamma),
        with_control_variate(*given, torch.full_like(p.values, 7.0), p.mask, gamma=gamma),
    ):
        assert p.mean(rows) == pytest.approx(truth, abs=1e-12)


def test_clipping_biases_downwards() -> None:
    p = Listed(0)
    clipped = importance_sampling(p.log_w, p.rewards, p.mask, most=1.0)
    by_hand = (p.drawn.minimum(p.actor.sum(1).exp()) * p.rewards.sum(1)).sum()
    assert p.mean(clipped) == pytest.approx(by_hand.item())
    assert p.mean(clipped) < p.truth(1.0)


def test_on_policy_all_are_the_mean_return() -> None:
    p = Listed(1)
    same, groups = torch.zeros_like(p.log_w), torch.arange(len(p.log_w)) % 4
    returns = p.rewards.sum(1)
    torch.testing.assert_close(importance_sampling(same, p.rewards, p.mask), returns)
    torch.testing.assert_close(per_decision(same, p.rewards, p.mask), returns)
    torch.testing.assert_close(with_control_variate(same, p.rewards, p.values, p.mask), returns)
    ratio = self_normalised(same, p.rewards, p.mask, groups)
    torch.testing.assert_close(by_prompt(ratio, groups), by_prompt(returns, groups))


def test_the_sum_written_out() -> None:
    """w = 2, 1/2 (not counted: 5), 3; V = 1, 2, 4; r = 0, 1, 10; gamma = 1/2."""
    mask = torch.tensor([[True, True, False, True]])
    log_w = torch.tensor([[2.0, 0.5, 1.0, 3.0]]).log()
    rewards = torch.tensor([[0.0, 1.0, math.nan, 10.0]])
    values = torch.tensor([[1.0, 2.0, math.nan, 4.0]])
    assert per_decision(log_w, rewards, mask, gamma=0.5).item() == pytest.approx(1 * 0.5 + 3 * 10 * 0.25)
    assert importance_sampling(log_w, rewards, mask, gamma=0.5).item() == pytest.approx(3 * (0.5 + 2.5))
    last = 4 + 3 * (10 - 4)
    middle = 2 + 0.5 * (1 + 0.5 * last - 2)
    first = 1 + 2 * (0 + 0.5 * middle - 1)
    found = with_control_variate(log_w, rewards, values, mask, gamma=0.5)
    assert found.item() == pytest.approx(first)


def test_a_score_that_v_knows_has_no_spread() -> None:
    """All answers score 0.7 and V says so: every row is 0.7, where the products spread over e^-3 to e^3."""
    p = Listed(2)
    rewards = torch.zeros_like(p.rewards)
    rewards[torch.arange(len(rewards)), p.mask.sum(1) - 1] = 0.7
    values = torch.full_like(p.values, 0.7)
    found = with_control_variate(p.log_w, rewards, values, p.mask)
    torch.testing.assert_close(found, torch.full_like(found, 0.7))
    assert importance_sampling(p.log_w, rewards, p.mask).std() > 0.3


def test_self_normalised_is_the_ratio() -> None:
    """Each answer of a uniform behavior policy once: the sample is the distribution, the ratio is exact."""
    p = Listed(3, uniform=True)
    groups = torch.zeros(len(p.log_w), dtype=torch.long)
    found = self_normalised(p.log_w, p.rewards, p.mask, groups)
    assert found.mean().item() == pytest.approx(p.truth(1.0))
    w = p.log_w.sum(1).exp()
    shifted = self_normalised(p.log_w - 400.0, p.rewards, p.mask, groups)
    torch.testing.assert_close(shifted, found)  # and it cannot see that all products are far below 1
    assert (w * p.rewards.sum(1)).mean().item() == pytest.approx(p.truth(1.0))


def test_the_interval_is_of_prompts() -> None:
    """Ten equal answers to each of 20 prompts are 20 numbers, not 200."""
    means = torch.randn(20, generator=torch.Generator().manual_seed(0)).double()
    rows, groups = means.repeat_interleave(10), torch.arange(20).repeat_interleave(10)
    value, low, high = clustered(rows, groups)
    half = 2.093 * means.std().item() / math.sqrt(20)
    assert (value, high - value) == pytest.approx((means.mean().item(), half), rel=1e-3)
    assert value - low == pytest.approx(high - value)
    assert clustered(rows[:10], groups[:10]).high == math.inf


@pytest.mark.parametrize(("freedom", "quantile"), [(5, 2.571), (10, 2.228), (30, 2.042), (499, 1.965)])
def test_students_quantiles(freedom: int, quantile: float) -> None:
    assert student(freedom) == pytest.approx(quantile, abs=2e-3)


def test_trust_and_its_reasons() -> None:
    generator = torch.Generator().manual_seed(0)
    groups = torch.arange(4000) // 8
    mild = 0.3 * torch.randn(4000, 1, generator=generator).double()
    mild -= 0.3**2 / 2  # of mean 1
    assert trust(mild, mild[:, 0].exp(), groups).trusted
    heavy = 4 * torch.randn(4000, 1, generator=generator).double() - 8
    found = trust(heavy, heavy[:, 0].exp(), groups)
    assert not found.trusted
    assert found.ess < 50
    assert found.pareto_k > 0.7
    assert [reason.split()[0] for reason in found.reasons] == ["the", "Pareto"]
    gone = trust(
        mild + math.log(0.7), mild[:, 0].exp(), groups
    )  # 30 % of the answers are where nothing is stored
    assert gone.ess > 3000
    assert gone.pareto_k < 0.7
    assert [reason[:16] for reason in gone.reasons] == ["the mean product"]


def test_a_cross_fitted_critic_has_not_seen_the_prompt() -> None:
    """Changing a prompt's returns changes no value of its own rows, and those of the other folds only."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(40, 3, 2, generator=generator).double()
    returns = features.sum(-1) + 0.1 * torch.randn(40, 3, generator=generator).double()
    mask, groups = torch.ones(40, 3, dtype=torch.bool), torch.arange(40) // 2
    mask[:, 2] = torch.arange(40) % 3 > 0
    before = cross_fitted_values(features, returns, mask, groups)
    returns[groups == 7] += 100
    after = cross_fitted_values(features, returns, mask, groups)
    own = groups % 5 == 7 % 5
    torch.testing.assert_close(after[own], before[own], rtol=0, atol=0)
    assert not torch.equal(after[~own], before[~own])
    inside = mask & (features.sum(-1).abs() < 1)  # values are kept within the returns
    assert (before - features.sum(-1))[inside].abs().max() < 0.1


def test_the_others_of_a_prompt() -> None:
    scores, groups = torch.tensor([1.0, 2.0, 6.0, 5.0]).double(), torch.tensor([3, 3, 3, 9])
    assert scores_of_others(scores, groups).tolist() == [4, 3.5, 1.5, 3]


def test_what_the_sample_lacks_may_score_least() -> None:
    """Half of the actor's answers are never stored: V vouches for them, the low end does not."""
    half = torch.full((40, 1), 0.5).double().log()
    ones, mask = torch.ones(40, 1).double(), torch.ones(40, 1, dtype=torch.bool)
    groups = torch.arange(40)
    assert importance_sampling(half, ones, mask).mean().item() == pytest.approx(0.5)
    found = clustered(with_control_variate(half, ones, ones, mask), groups)
    assert found.value == pytest.approx(1)
    assert with_missing(found, 0.5, 0.0).low == pytest.approx(0.5)
    assert with_missing(found, 1.2, 0.0) == found
    assert with_missing(Estimate(0.4, 0.3, 0.5), 0.9, 0.2).low == pytest.approx(0.3 - 0.1 * 0.2)


def test_heavy_weights_of_what_scores_nothing_are_no_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    groups, score = torch.arange(4000) // 8, torch.arange(4000) % 20 > 0
    log_w = torch.where(score, 0.0, 2 * torch.randn(4000, generator=generator) - 2).double()[:, None]
    found = trust(log_w, log_w[:, 0].exp() * score, groups)
    assert found.products_k > 0.7
    assert found.trusted
    rounding = 1e-6 * torch.randn(4000, generator=generator).double().pow(3)
    assert trust(rounding[:, None], score * rounding.exp(), groups).pareto_k == 0


def test_v_is_scaled_to_the_least_variance() -> None:
    """b = 1 where the control takes all variance away, 0 where it only adds some, 1/2 for one as noisy."""
    first, second = torch.randn(2, 4000, generator=torch.Generator().manual_seed(0)).double()
    assert scaled(first, torch.zeros(4000).double()).abs().max() < 0.05
    assert (scaled(first, first + second) - first).abs().max() < 0.2
    assert scaled(first, second).var().item() == pytest.approx(0.5, rel=0.05)
    assert torch.equal(scaled(first, first), first)
    outlier = second.clone()
    outlier[0] = 1e4
    assert scaled(first, first + outlier).var() <= first.var()
