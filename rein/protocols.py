"""What can be replaced, on one page: each protocol says what the loop needs and nothing more.

B rows, T right-padded response positions. Models read packed rows inside and answer with `[B, T]` tensors
outside.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rein.types import Completion, Metrics, Prompt, TokenRow, Trajectory, Verdict

if TYPE_CHECKING:
    from torch import Tensor, nn

Piece = TypeVar("Piece", bound=Sized)  # of work; as long as it has steps of progress
Found = TypeVar("Found")
Tell = Callable[[int], None]  # told of steps done


class Tokenizer(Protocol):
    """What Rein uses of a Hugging Face tokenizer."""

    chat_template: Any
    eos_token_id: int | None
    bos_token_id: int | None
    pad_token_id: int | None

    def __len__(self) -> int: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Any, *, skip_special_tokens: bool = False) -> str: ...
    def apply_chat_template(self, messages: Any, **options: Any) -> Any: ...
    def save_pretrained(self, path: str) -> Any: ...


class Actor(Protocol):
    """The policy: log-probs of stored responses, with gradient where the caller's context allows."""

    model: nn.Module
    shares_prompts: bool  # rows of one micro-batch that answer the same prompt compute it once

    def log_probs(
        self,
        rows: Sequence[TokenRow],
        temperature: Tensor,  # [B]
        *,
        entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """log pi(token | before), [B, T], and the entropy of each position's distribution, [B, T]."""
        ...

    def log_probs_and_kl(
        self,
        rows: Sequence[TokenRow],
        temperature: Tensor,  # [B]
        reference: Reference,
        *,
        entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The same, and KL(actor || reference) over the vocabulary at each position, [B, T]."""
        ...

    def save(self, path: Path) -> None: ...


class Reference(Protocol):
    """The frozen start policy over the whole vocabulary; R response tokens, in the order of a pack."""

    def hidden(self, rows: Sequence[TokenRow]) -> Tensor:
        """[R, H]"""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, V]"""
        ...


class Critic(Protocol):
    """The value function: V(s_t) read at the state before response token t."""

    model: nn.Module
    shares_prompts: bool  # as the actor's

    def values(self, rows: Sequence[TokenRow]) -> Tensor:
        """[B, T]"""
        ...

    def save(self, path: Path) -> None: ...


class Scorer(Protocol):
    """A reward model: one number per prompt + response."""

    def scores(self, rows: Sequence[TokenRow]) -> Tensor:
        """[B], fp32"""
        ...


class RolloutEngine(Protocol):
    """Prompts in, completions with log-probs out; the i-th list answers the i-th prompt."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int,
        temperature: float,  # 0: greedy
        top_p: float,
        max_new_tokens: int,
        seed: int,
        advance: Tell | None = None,  # told of each batch of prompts done
        places: Sequence[int] | None = None,  # of the prompts among all: answers are drawn by them
    ) -> list[list[Completion]]: ...


class Reward(Protocol):
    """Trajectories in, one number each out; None where a row cannot be scored (no ground truth)."""

    def __call__(self, rows: Sequence[Trajectory]) -> Sequence[float | None]: ...


class Guard(Protocol):
    """Looks at reduced metrics and says what to do; what it has counted is kept with the run."""

    name: str

    def __call__(self, metrics: Metrics) -> Verdict | None: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...


class Tracker(Protocol):
    """Receives metrics under a monotone update number."""

    def log(self, metrics: Metrics, number: int) -> None: ...
    def close(self) -> None: ...


class Mesh(Protocol):
    """The training processes: one here, many under FSDP."""

    rank: int
    world_size: int

    def sum(self, values: Sequence[float]) -> list[float]:
        """Elementwise sum over ranks."""
        ...

    def add(self, tensor: Tensor) -> Tensor:
        """The same of a tensor, in place."""
        ...


class Pool(Protocol):
    """Workers that do pieces of work, each with what it opened once: one here, many under Ray."""

    def map(
        self,
        make: Callable[[], Callable[[Piece, Tell], Found]],  # called by each worker, which keeps what it gets
        pieces: Sequence[Piece],
        tell: Tell,
    ) -> Generator[tuple[int, Found]]:
        """What was found of each piece, with the piece's index, in the order that they are done."""
        ...
