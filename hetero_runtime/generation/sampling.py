"""Choosing the next token from the logits of one request.

logits [vocab] -> float32 -> transforms of transformers -> argmax, or one seeded draw
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero_runtime.errors import RequestError
from hetero_runtime.generation.params import SamplingParams
from hetero_runtime.hf.sampling import logits_transform


class Sampler:
    """Draws the tokens of one request, from a random generator of its own.

    Because nothing random is shared, a seeded request gives the same tokens whatever else the
    engine serves. One sampler serves one request: it counts steps and advances its generator.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, device: torch.device | str) -> None:
        self._params = params
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._transform = logits_transform(params)
        self._generator = torch.Generator(device=self.device)
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)
        self._num_sampled = 0

    def transform(self, logits: torch.Tensor, history_token_ids: Sequence[int]) -> torch.Tensor:
        """Logits after penalty, temperature and filters, float32 [vocab]; dropped tokens are -inf.

        `history_token_ids` are all tokens so far, prompt included: the repetition penalty sees them.
        """
        assert logits.shape == (self.vocab_size,), f"logits {tuple(logits.shape)}, vocab {self.vocab_size}"
        scores = logits.float()
        if self._transform is None:
            return scores
        seen = history_token_ids if self._params.repetition_penalty != 1 else ()
        history = torch.tensor([list(seen)], dtype=torch.long, device=scores.device)  # [1, tokens]
        return self._transform(history, scores[None])[0]

    def sample(self, logits: torch.Tensor, history_token_ids: Sequence[int]) -> int:
        """The next token id, for `logits` [vocab] of any float type on the sampler's device.

        Waits for the device once (twice when not greedy). Raises RequestError when the logits hold
        NaN or infinity, with the step, instead of going on with garbage.
        """
        if not self.is_greedy:
            return self.draw(self.probabilities(logits, history_token_ids))
        scores = self.transform(logits, history_token_ids)
        token_id, sound = torch.stack([scores.argmax(), _is_sound(logits, scores).long()]).tolist()
        self._require(bool(sound), logits)
        self._num_sampled += 1
        return int(token_id)

    def probabilities(self, logits: torch.Tensor, history_token_ids: Sequence[int]) -> torch.Tensor:
        """What the next token is drawn from where the request is not greedy, float32 [vocab].

        Arguments and errors as for `sample`; counts as a step. Waits for the device once.
        """
        scores = self.transform(logits, history_token_ids)
        # before any draw: bad input to it would kill a CUDA context
        self._require(bool(_is_sound(logits, scores)), logits)
        self._num_sampled += 1
        return torch.softmax(scores, dim=-1)

    def draw(self, weights: torch.Tensor) -> int:
        """A token id, drawn with probabilities in proportion to `weights` [vocab], whose sum is above 0."""
        return int(torch.multinomial(weights, 1, generator=self._generator))

    def uniform(self) -> float:
        """A random number in [0, 1)."""
        return float(torch.rand((), generator=self._generator, device=self.device))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken instead of a random one."""
        return self._params.is_greedy

    @property
    def takes_likeliest(self) -> bool:
        """Whether the next token is the most likely one by its logits alone, whatever came before."""
        return self.is_greedy and self._transform is None

    def _require(self, is_sound: bool, logits: torch.Tensor) -> None:
        """Raise the RequestError of this step unless its logits are sound."""
        if is_sound:
            return
        num_nan = int(torch.isnan(logits).sum())
        num_inf = int(torch.isinf(logits).sum())
        cause = (
            f"{num_nan} NaN and {num_inf} infinite among {self.vocab_size} logits"
            if num_nan or num_inf
            else "logits too large for float32 after temperature or repetition penalty"
        )
        raise unsound_logits(self._num_sampled, cause)


def _is_sound(logits: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Whether `logits` are numbers, and some of the `scores` made of them are finite. On the device."""
    return torch.isfinite(logits).all() & torch.isfinite(scores.amax())


def unsound_logits(step: int, cause: str) -> RequestError:
    """What ends a request whose logits are no numbers to choose from."""
    return RequestError(
        f"generation stopped at step {step} (0 is the first new token): {cause}. "
        "Check the model with `hetero-runtime verify`; if it runs in float16, take bfloat16 or float32."
    )
