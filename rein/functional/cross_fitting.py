"""A cheap critic for off-policy evaluation: ridge regression of the stored returns, cross-fitted by prompt.

B rows by T positions by F features. Whatever it says, the estimator that adds it whole stays
unbiased: it is fitted to the rows of other prompts, and what it reads of a row's own prompt is the other
answers' scores. Knows nothing of models.
"""

import torch
from torch import Tensor

FOLDS = 5
RIDGE = 1e-3  # times the mean square of the features
WEIGHT_MOST = 10.0


@torch.no_grad()
def token_features(
    scores: Tensor,  # [B]
    mask: Tensor,  # [B, T]
    groups: Tensor,  # [B]  number of the row's prompt
    values: Tensor | None = None,  # [B, T]  what a critic says that was trained on other prompts
) -> Tensor:
    """What is known before token t is chosen, [B, T, F], float64.

    1, the position, the mean score of the prompt's other answers, `values`, and both times the position.
    """
    others = scores_of_others(scores.double(), groups)[:, None].expand(mask.shape)
    position = (mask.double().cumsum(1) - mask.double()) / mask.shape[1]
    found = [torch.ones_like(position), position, others, others * position]
    if values is not None:
        known = values.double().where(mask, 0)
        found += [known, known * position]
    return torch.stack(found, -1)


def scores_of_others(scores: Tensor, groups: Tensor) -> Tensor:
    """Mean score of the other rows of a row's prompt, [B]; of the rows of all others where it is alone."""
    index = torch.unique(groups, return_inverse=True)[1]
    zeros = torch.zeros(int(index.max()) + 1, dtype=torch.float64, device=scores.device)
    sums, counts = (
        zeros.clone().index_add_(0, index, scores),
        zeros.index_add_(0, index, torch.ones_like(scores)),
    )
    sums, counts = sums[index] - scores, counts[index] - 1
    alone = (scores.sum() - scores) / max(len(scores) - 1, 1)
    return torch.where(counts > 0, sums / counts.clamp(min=1), alone)


@torch.no_grad()
def cross_fitted_values(
    features: Tensor,  # [B, T, F]
    returns: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    groups: Tensor,  # [B]
    weights: Tensor | None = None,  # [B, T]  of the squared errors
    *,
    folds: int = FOLDS,
    ridge: float = RIDGE,
) -> Tensor:
    """V of each token from a regression on the prompts of the other folds, [B, T], float64.

    b = (X' W X + ridge mean(diag X' W X) I)^-1 X' W y; V = x b, kept within the returns it was fitted to. A
    single prompt has no others: its values are 0, and the estimator is plain importance sampling.
    """
    fold = torch.unique(groups, return_inverse=True)[1] % folds
    x, y = features.double().where(mask[:, :, None], 0), returns.double().where(mask, 0)
    weighted = (x if weights is None else x * weights.double().where(mask, 0)[:, :, None]).transpose(1, 2)
    width = x.shape[2]
    # All that a fit needs of a row, F x F and F numbers, is made once and summed over the other folds.
    needed = torch.cat([(weighted @ x).flatten(1), (weighted @ y[:, :, None]).flatten(1)], 1)
    others = 1 - torch.eye(folds, dtype=torch.float64, device=x.device)
    summed = others @ needed.new_zeros(folds, needed.shape[1]).index_add_(0, fold, needed)
    values = torch.zeros(mask.shape, dtype=torch.float64, device=x.device)
    for number in range(folds):
        seen = y[fold != number][mask[fold != number]]
        if not len(seen):
            continue
        gram, moment = summed[number, :-width].view(width, width), summed[number, -width:]
        gram = gram + ridge * gram.diagonal().mean() * torch.eye(width, dtype=gram.dtype, device=gram.device)
        own = fold == number
        values[own] = (x[own] @ torch.linalg.solve(gram, moment)).clamp(seen.min(), seen.max())
    return values.where(mask, 0)


def remaining_weights(log_w: Tensor, *, most: float = WEIGHT_MOST) -> Tensor:
    """min(w_{t:T}, most), [B, T]: weighed by these, the stored returns of a state have the actor's value as
    mean.
    """
    return log_w.flip(1).cumsum(1).flip(1).exp().clamp(max=most)
