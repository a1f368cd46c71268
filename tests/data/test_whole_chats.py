"""Blocks of whole chats. Oracle: the chats themselves, found again in the blocks."""

import torch

from dotmoe.text.answers import Answer
from dotmoe.text.whole_chats import whole_chats


def chats(*lengths):
    first = 1000
    made = []
    for length in lengths:
        ids = tuple(range(first, first + length))
        made.append(Answer(messages=(), kind="", ids=ids, answer_start=2, finished=True))
        first += 1000
    return made


def test_every_chat_that_fits_a_block_is_whole_in_one():
    given = chats(30, 20, 5, 7, 12, 30, 9, 3, 28)
    tokens_BT, is_answer_BT = whole_chats(given, 32)
    rows = tokens_BT.tolist()
    for chat in given:
        found = [row for row in rows if set(chat.ids) <= set(row)]
        assert found, chat
    starts = {chat.ids[0] for chat in given}
    assert all(row[0] in starts for row in rows)
    place_BT = tokens_BT % 1000
    assert torch.equal(is_answer_BT, place_BT >= 2)


def test_few_tokens_are_read_twice():
    given = chats(*[30, 20, 10, 5] * 20)
    tokens_BT, _ = whole_chats(given, 64)
    assert tokens_BT.numel() <= 1.1 * sum(len(chat.ids) for chat in given)


def test_no_chat_stands_in_two_blocks():
    given = chats(*[30, 20, 12, 9, 5] * 20)
    tokens_BT, _ = whole_chats(given, 32)
    for chat in given:
        blocks = {row for row, _ in (tokens_BT == chat.ids[0]).nonzero().tolist()}
        assert len(blocks) == 1


def test_a_chat_longer_than_a_block_loses_its_end_and_one_alone_repeats():
    tokens_BT, _ = whole_chats(chats(40), 32)
    assert tokens_BT.tolist() == [list(range(1000, 1032))]
    tokens_BT, _ = whole_chats(chats(3), 8)
    assert tokens_BT.tolist() == [[1000, 1001, 1002, 1000, 1001, 1002, 1000, 1001]]


def test_any_chat_of_a_block_may_begin_it():
    given = chats(*[28, 4] * 100)  # a block of 32 tokens holds one of each
    tokens_BT, _ = whole_chats(given, 32)
    long_ones = {chat.ids[0] for chat in given if len(chat.ids) == 28}
    first = sum(row[0] in long_ones for row in tokens_BT.tolist())
    five_deviations = 5 * (100 * 0.5 * 0.5) ** 0.5
    assert abs(first - 50) < five_deviations
