"""Blocks of whole chats: none is cut in two, and none is filled up with padding."""

import random
from collections.abc import Sequence
from itertools import cycle

import torch
from torch import Tensor

from dotmoe.text.answers import Answer


def whole_chats(answers: Sequence[Answer], seq_len: int) -> tuple[Tensor, Tensor]:
    """Pack chats into blocks of `seq_len` tokens.

    A chat that is longer than a block loses its end. What the chats of a block leave free is filled
    with them again, from the first: every token is text, and no chat stands in two blocks, of which
    one may be held out.

    Returns:
        Token ids, int32, and whether each belongs to an answer, bool: both [B, seq_len].
    """
    rows, marks = list[list[int]](), list[list[bool]]()
    for block in _mixed(_filled(answers, seq_len)):
        ids, is_answer = list[int](), list[bool]()
        for answer in cycle(block):
            ids += answer.ids
            is_answer += [place >= answer.answer_start for place in range(len(answer.ids))]
            if len(ids) >= seq_len:
                break
        rows.append(ids[:seq_len])
        marks.append(is_answer[:seq_len])
    return torch.tensor(rows, dtype=torch.int32), torch.tensor(marks)


def _filled(answers: Sequence[Answer], seq_len: int) -> list[list[Answer]]:
    """The chats of each block: longest first, each into the first block with room for it."""
    blocks, free = list[list[Answer]](), list[int]()
    for answer in sorted(answers, key=lambda answer: -len(answer.ids)):
        length = min(len(answer.ids), seq_len)
        place = next((place for place, room in enumerate(free) if room >= length), None)
        if place is None:
            blocks.append([])
            free.append(seq_len)
            place = len(blocks) - 1
        blocks[place].append(answer)
        free[place] -= length
    return blocks


def _mixed(blocks: list[list[Answer]]) -> list[list[Answer]]:
    """The blocks in another order, and the chats of each, which came by length.

    A chat is asked at the beginning of a context. Those at the beginning of a block must not all be
    long ones, of which none ends soon.
    """
    drawn = random.Random(0)
    return drawn.sample([drawn.sample(block, len(block)) for block in blocks], len(blocks))
