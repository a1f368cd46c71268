"""Many continuations at once: rows that are finished leave the batch, so none waits for another.

`generate` of Transformers computes every row until the longest one ends, samples over the whole
vocabulary, and on a CPU copies the head for each row of a prompt: `benchmarks/sampling.py`.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from dotmoe.models.hf_config import readout_of
from dotmoe.models.hooks import cache_arguments

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
    is_finished: bool
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
    on_closed: Callable[[int], None] = lambda rows: None,
) -> Iterator[Continuation]:
    """Continue each prompt until a token of `ends`; yields a batch of rows when its last is done.

    A row also ends where `has_ended` is true of its new ids, which it gets after each of them. It
    is cut at `new_tokens`, and where it has `room` tokens, its prompt included.

    Prompts of similar length share a batch. What is drawn for a prompt depends on `seed` and its
    number, by default its place in the list, not on the rows beside it, but for rounding.
    `on_closed` gets the number of rows that are finished or cut, after each step.
    """
    of_ends = set(ends)
    numbers = range(len(prompts)) if numbers is None else numbers

    def is_done(ids: list[int]) -> bool:
        return ids[-1] in of_ends or has_ended(ids)

    def row_of(number: int, prompt: Sequence[int]) -> _Row:
        longest = how.new_tokens if room is None else min(how.new_tokens, room - len(prompt))
        return _Row(number, prompt, longest)

    rows = [row_of(number, prompt) for number, prompt in zip(numbers, prompts, strict=True)]
    rows.sort(key=lambda row: len(row.prompt))
    for start in range(0, len(rows), how.rows):
        batch = rows[start : start + how.rows]
        _decode(_Batch(model, batch, how, seed), is_done, partial(_report, on_closed, start))
        for row in batch:
            yield Continuation(row.number, row.new, row.is_finished)


@dataclass(slots=True)
class _Row:
    """One continuation while it grows."""

    number: int
    prompt: Sequence[int]
    longest: int
    """New tokens at which it is cut."""
    new: list[int] = field(default_factory=list)
    is_finished: bool = False

    @property
    def is_open(self) -> bool:
        """Whether it goes on."""
        return not self.is_finished and len(self.new) < self.longest


def _report(on_closed: Callable[[int], None], before: int, closed: int) -> None:
    """Report closed rows: those of earlier batches and of this one."""
    on_closed(before + closed)


def _decode(
    batch: "_Batch",
    is_done: Callable[[list[int]], bool],
    on_closed: Callable[[int], None],
) -> None:
    """Continue rows side by side until each is finished or cut."""
    rows = tuple(batch.rows)
    while any(row.is_open for row in batch.rows):
        batch.leave_closed_rows()
        for row, token in zip(batch.rows, batch.decode_step(), strict=True):
            if row.is_open:
                row.new.append(token)
                row.is_finished = is_done(row.new)
        on_closed(len([row for row in rows if not row.is_open]))


class _Batch:
    """Rows that grow side by side: what they have read, as a cache, and the tokens to read next."""

    def __init__(self, model: Any, rows: Sequence[_Row], how: Sampling, seed: int) -> None:
        self.rows = list(rows)
        prompts = [row.prompt for row in rows]
        self._model = model
        self._base = model.base_model
        self._how = how
        self._readout = readout_of(self._base.config)
        self._head = model.get_output_embeddings()
        self._device = next(model.parameters()).device
        self._cache = DynamicCache(config=model.config)
        seeds = {row.number: _seed_of(seed, row.number) for row in rows}
        self._generators = {n: torch.Generator().manual_seed(own) for n, own in seeds.items()}
        longest = max(map(len, prompts))
        blanks = [longest - len(prompt) for prompt in prompts]
        padded = [[0] * blank + list(p) for blank, p in zip(blanks, prompts, strict=True)]
        self._tokens_BT = torch.tensor(padded, device=self._device)
        place_T = torch.arange(longest, device=self._device)
        blank_B1 = torch.tensor(blanks, device=self._device)[:, None]
        self._is_read_BT = (place_T >= blank_B1).long()
        self._position_BT = (place_T - blank_B1).clamp_min(0)
        self._has_BV = self._tokens_that_rows_have(prompts)

    def _tokens_that_rows_have(self, prompts: Collection[Sequence[int]]) -> Tensor | None:
        """Whether each row has each token of the vocabulary; None if nothing asks."""
        if self._how.repetition_penalty == 1.0:
            return None
        has_BV = torch.zeros(len(prompts), len(self._head.weight), dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            has_BV[row, torch.tensor(prompt)] = True
        return has_BV.to(self._device)

    def decode_step(self) -> list[int]:
        """Read the tokens at hand and draw the next one of each row."""
        output = self._base(
            input_ids=self._tokens_BT,
            attention_mask=self._is_read_BT,
            position_ids=self._position_BT,
            **cache_arguments(self._cache),
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

    def leave_closed_rows(self) -> None:
        """Go on with the open rows alone, if enough of them are closed to be worth the copy."""
        places = [place for place, row in enumerate(self.rows) if row.is_open]
        closed = len(self.rows) - len(places)
        if closed < max(1, len(self.rows) // _LEAVE_AT):
            return
        place_B = torch.tensor(places, device=self._device)
        self._cache.batch_select_indices(place_B)
        self._tokens_BT = self._tokens_BT[place_B]
        self._position_BT = self._position_BT[place_B]
        self._is_read_BT = self._is_read_BT[place_B]
        if self._has_BV is not None:
            self._has_BV = self._has_BV[place_B]
        self.rows = [self.rows[place] for place in places]

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
        generators = [self._generators[row.number] for row in self.rows]
        # float32 whatever torch's default is: bfloat16 has a thousand values between 0 and 1.
        draws = [torch.rand(top_k, generator=each, dtype=torch.float32) for each in generators]
        noise_BK = -(-torch.stack(draws).clamp_min(1e-30).log()).log()
        score_BK = logit_BK / self._how.temperature + noise_BK.to(self._device)
        return token_BK.gather(1, score_BK.argmax(dim=1, keepdim=True))[:, 0]


def _seed_of(seed: int, number: int) -> int:
    return seed * 1_000_003 + number
