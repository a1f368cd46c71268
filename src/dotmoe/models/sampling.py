"""Many continuations at once: rows that are finished leave the batch, so none waits for another.

`generate` of Transformers computes every row until the longest one ends, samples over the whole
vocabulary, and on a CPU copies the head for each row of a prompt: `benchmarks/sampling.py`.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from dotmoe.models.family import readout_of

_LEAVE_AT = 8
"""A batch is cut down when one row in so many has finished: cutting copies its cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 0.7
    """0 takes the most likely token."""
    top_k: int = 40
    """Number of most likely tokens to draw from."""
    repetition_penalty: float = 1.0
    """Logits of tokens that a row has, its prompt included, are divided by this, negative ones
    multiplied, as Transformers and vLLM do; 1 changes nothing."""
    new_tokens: int = 512
    """Longest continuation."""
    rows: int = 64
    """Continuations that grow at once."""


class Continuation(NamedTuple):
    """Token ids that continue one prompt."""

    number: int
    """Number of the prompt."""
    ids: list[int]
    """New ids, with the end token if there is one."""
    finished: bool
    """Whether it ended by itself, before it was cut."""


@torch.no_grad()
def continuations(
    model: Any,
    prompts: Sequence[Sequence[int]],
    how: Sampling,
    ends: Collection[int],
    *,
    seed: int = 0,
    numbers: Sequence[int] | None = None,
    room: int | None = None,
    has_ended: Callable[[list[int]], bool] = lambda ids: False,
    on_finished: Callable[[int], None] = lambda rows: None,
) -> Iterator[Continuation]:
    """Continue each prompt until a token of `ends`; yields a batch of rows when its last is done.

    A row also ends where `has_ended` is true of its new ids, which it gets after each of them. It
    is cut at `new_tokens`, and where it has `room` tokens, its prompt included.

    Prompts of similar length share a batch. What is drawn for a prompt depends on `seed` and its
    number, by default its place in the list, not on the rows beside it, but for rounding.
    `on_finished` gets the number of rows that have ended, after each step.
    """
    of_ends = set(ends)
    numbers = range(len(prompts)) if numbers is None else numbers

    def is_done(ids: list[int]) -> bool:
        return ids[-1] in of_ends or has_ended(ids)

    numbered = dict(zip(numbers, prompts, strict=True))
    order = sorted(numbered, key=lambda number: len(numbered[number]))
    for start in range(0, len(order), how.rows):
        rows = {number: numbered[number] for number in order[start : start + how.rows]}
        most = {
            number: min(how.new_tokens, (room or len(row) + how.new_tokens) - len(row))
            for number, row in rows.items()
        }
        growing = _Growing(model, rows, how, seed)
        yield from _batch(growing, most, is_done, partial(_tell, on_finished, start))


def _tell(on_finished: Callable[[int], None], before: int, ended: int) -> None:
    on_finished(before + ended)


def _batch(
    growing: "_Growing",
    most: dict[int, int],
    is_done: Callable[[list[int]], bool],
    on_finished: Callable[[int], None],
) -> Iterator[Continuation]:
    """Continue rows side by side; `most` has the longest continuation of each, by its number."""
    grown: dict[int, list[int]] = {number: [] for number in most}
    finished, cut = set[int](), {number for number, longest in most.items() if longest < 1}
    while left := _open(growing.numbers, finished | cut):
        if len(growing.numbers) - len(left) >= max(1, len(growing.numbers) // _LEAVE_AT):
            growing.keep(left)
        tokens = growing.step()
        for number, token in zip(growing.numbers, tokens, strict=True):
            if number in finished or number in cut:
                continue
            grown[number].append(token)
            if is_done(grown[number]):
                finished.add(number)
            elif len(grown[number]) == most[number]:
                cut.add(number)
        on_finished(len(finished))
    for number in most:
        yield Continuation(number, grown[number], number in finished)


def _open(numbers: Sequence[int], closed: Collection[int]) -> list[int]:
    """Places of the rows that go on."""
    return [place for place, number in enumerate(numbers) if number not in closed]


class _Growing:
    """Rows of one batch: what they have read, as a cache, and the tokens to read next."""

    def __init__(
        self, model: Any, prompts: dict[int, Sequence[int]], how: Sampling, seed: int
    ) -> None:
        self.numbers = list(prompts)
        self._model, self._base, self._how = model, model.base_model, how
        self._readout, self._head = readout_of(self._base.config), model.get_output_embeddings()
        self._device = next(model.parameters()).device
        self._cache = DynamicCache(config=model.config)
        # Renamed in Transformers 5.24.
        names = inspect.signature(self._base.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._generators = {n: torch.Generator().manual_seed(_seed_of(seed, n)) for n in prompts}
        longest = max(map(len, prompts.values()))
        blanks = [longest - len(prompt) for prompt in prompts.values()]
        padded = [[0] * blank + list(p) for blank, p in zip(blanks, prompts.values(), strict=True)]
        self._tokens_BT = torch.tensor(padded, device=self._device)
        place_T = torch.arange(longest, device=self._device)
        blank_B1 = torch.tensor(blanks, device=self._device)[:, None]
        self._is_read_BT = (place_T >= blank_B1).long()
        self._position_BT = (place_T - blank_B1).clamp_min(0)
        self._has_BV = self._tokens_that_rows_have(prompts.values())

    def _tokens_that_rows_have(self, prompts: Collection[Sequence[int]]) -> Tensor | None:
        """Whether each row has each token of the vocabulary; None if nothing asks."""
        if self._how.repetition_penalty == 1.0:
            return None
        has_BV = torch.zeros(len(prompts), len(self._head.weight), dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            has_BV[row, torch.tensor(prompt)] = True
        return has_BV.to(self._device)

    def step(self) -> list[int]:
        """Read the tokens at hand and draw the next one of each row."""
        output = self._base(
            input_ids=self._tokens_BT,
            attention_mask=self._is_read_BT,
            position_ids=self._position_BT,
            use_cache=True,
            **{self._cache_name: self._cache},
        )
        hidden_BD = output.last_hidden_state[:, -1].contiguous()
        logits_BV = self._penalised(self._readout.logits(self._head(hidden_BD)))
        chosen_B1 = self._drawn(logits_BV)[:, None]
        if self._has_BV is not None:
            self._has_BV.scatter_(1, chosen_B1, True)
        self._tokens_BT = chosen_B1
        self._position_BT = self._position_BT[:, -1:] + 1
        self._is_read_BT = torch.cat([self._is_read_BT, torch.ones_like(chosen_B1)], dim=1)
        tokens: list[int] = chosen_B1[:, 0].tolist()
        return tokens

    def keep(self, places: list[int]) -> None:
        """Go on with some of the rows."""
        place_B = torch.tensor(places, device=self._device)
        self._cache.batch_select_indices(place_B)
        self._tokens_BT = self._tokens_BT[place_B]
        self._position_BT = self._position_BT[place_B]
        self._is_read_BT = self._is_read_BT[place_B]
        if self._has_BV is not None:
            self._has_BV = self._has_BV[place_B]
        self.numbers = [self.numbers[place] for place in places]

    def _penalised(self, logits_BV: Tensor) -> Tensor:
        """Logits, lower for tokens that a row has."""
        if self._has_BV is None:
            return logits_BV
        factor = self._how.repetition_penalty
        lower_BV = torch.where(logits_BV > 0, logits_BV / factor, logits_BV * factor)
        return torch.where(self._has_BV, lower_BV, logits_BV)

    def _drawn(self, logits_BV: Tensor) -> Tensor:
        """A token of each row: the largest of logit / temperature + Gumbel noise, of the top k."""
        if not self._how.temperature:
            return logits_BV.argmax(dim=1)
        top_k = min(self._how.top_k, logits_BV.shape[1])
        logit_BK, token_BK = logits_BV.topk(top_k, dim=1)
        draws = [torch.rand(top_k, generator=self._generators[number]) for number in self.numbers]
        noise_BK = -(-torch.stack(draws).clamp_min(1e-30).log()).log()
        score_BK = logit_BK / self._how.temperature + noise_BK.to(self._device)
        return token_BK.gather(1, score_BK.argmax(dim=1, keepdim=True))[:, 0]


def _seed_of(seed: int, number: int) -> int:
    return seed * 1_000_003 + number
