"""A frozen reward model whose scores are kept: what one stage has paid for, a later stage or run reads from
the cache.

Rows in, one fp32 number each out. The key of the cache is the content of the model's folder.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rein.config import paths
from rein.config.recipe import Recipe
from rein.data.cache import ScoreCache
from rein.models.identity import model_key
from rein.models.place import place_of
from rein.models.reward_model import load_reward_model
from rein.protocols import Scorer
from rein.types import Floats, TokenRow

KIND, DTYPE = "score", "float32"
SHARD_ROWS = 4096  # new scores held in memory before they are written


class CachedScorer:
    """Implements protocols.Scorer: asks the model only about rows that the cache does not know."""

    def __init__(self, load: Callable[[], Scorer], cache: ScoreCache) -> None:
        self.cache = cache
        self._load = load
        self._scorer: Scorer | None = None
        self._new: dict[str, Floats] = {}

    def scores(self, rows: Sequence[TokenRow]) -> Tensor:
        """[B], fp32"""
        keys = [row_key(row) for row in rows]
        known = {key: self._known(key) for key in keys}
        missing = {key: row for key, row in zip(keys, rows, strict=True) if known[key] is None}
        if missing:
            if self._scorer is None:
                self._scorer = self._load()
            with torch.no_grad():
                found = self._scorer.scores(list(missing.values())).float().cpu().numpy()
            fresh = {
                key: np.array([score], dtype=np.float32) for key, score in zip(missing, found, strict=True)
            }
            self._new |= fresh
            known |= fresh
            if len(self._new) >= SHARD_ROWS:
                self.keep()
        return torch.tensor([float(scores[0]) for key in keys if (scores := known[key]) is not None])

    def known(self, keys: Iterable[str]) -> dict[str, float]:
        """What the cache knows under these keys of rows; counts each."""
        found = {key: self.cache.get(key) for key in keys}
        return {key: float(scores[0]) for key, scores in found.items() if scores is not None}

    def learn(self, scores: Mapping[str, float]) -> None:
        """Take what was computed elsewhere."""
        self._new |= {key: np.array([score], dtype=np.float32) for key, score in scores.items()}
        if len(self._new) >= SHARD_ROWS:
            self.keep()

    def keep(self) -> None:
        """Write what is new since the last call."""
        self.cache.add(self._new)
        self._new = {}

    def _known(self, key: str) -> Floats | None:
        new = self._new.get(key)
        return self.cache.get(key) if new is None else new


class Told:
    """Implements protocols.Scorer: says what is known, by row_key."""

    def __init__(self, known: Mapping[str, float]) -> None:
        self.known = known

    def scores(self, rows: Sequence[TokenRow]) -> Tensor:
        """[B], fp32"""
        return torch.tensor([self.known[row_key(row)] for row in rows])


class Asked:
    """Implements protocols.Scorer: asks the model about the rows of these keys only, each once.

    Others score 0: what is asked for is `found`, and rows stand in the same batches whoever scores the rest.
    """

    def __init__(self, scorer: Scorer, keys: Collection[str]) -> None:
        self.scorer, self.keys = scorer, keys
        self.found: dict[str, float] = {}

    def scores(self, rows: Sequence[TokenRow]) -> Tensor:
        """[B], fp32"""
        keys = [row_key(row) for row in rows]
        missing = {
            key: row
            for key, row in zip(keys, rows, strict=True)
            if key in self.keys and key not in self.found
        }
        if missing:
            with torch.no_grad():
                scores = self.scorer.scores(list(missing.values())).float().cpu().tolist()
            self.found |= dict(zip(missing, scores, strict=True))
        return torch.tensor([self.found.get(key, 0.0) for key in keys])


def open_scorer(recipe: Recipe) -> CachedScorer:
    """The recipe's reward model, in fp32, with the cache that runs share."""
    path, place = paths.reward_model(recipe), place_of(recipe.model)
    key = model_key(path, dtype=DTYPE, device=place.numbers, where="score.path")
    cache = ScoreCache(paths.cache_dir(recipe), KIND, key, {"model": path})
    return CachedScorer(lambda: load_reward_model(path, dtype=DTYPE, place=place), cache)


def row_key(row: TokenRow) -> str:
    """Content hash of what a reward model sees of a row."""
    digest = hashlib.blake2b(digest_size=16)
    for ids in (row.prompt_ids, row.response_ids):
        digest.update(len(ids).to_bytes(8, "little") + np.ascontiguousarray(ids, dtype=np.int64).tobytes())
    return digest.hexdigest()
