"""How much text is read: what training takes, what is held out, and what is drawn from evenly."""

import pytest

from dotmoe.common.progress import Progress
from dotmoe.text.config import DataConfig
from dotmoe.text.tokenise import tokenise

SEQ_LEN, HELDOUT_BLOCKS = 32, 10


@pytest.fixture
def amounts(text_file, dense, tmp_path):
    """Tokenises a text of 12,000 tokens; the numbers of blocks to train on and held out."""

    def make(**options):
        text = tokenise(
            DataConfig(data=(str(text_file),), seq_len=SEQ_LEN),
            dense,
            tmp_path,
            eval_text=(),
            eval_tokens=HELDOUT_BLOCKS * SEQ_LEN,
            progress=Progress(quiet=True),
            **options,
        )
        return text.training.num_blocks, text.heldout.num_blocks

    return make


def test_as_many_blocks_are_trained_on_as_asked_for_beside_those_held_out(amounts):
    assert amounts(blocks=20) == (20, HELDOUT_BLOCKS)


def test_tokens_that_are_drawn_evenly_come_from_eight_times_as_long_a_text(amounts):
    """Its first documents alone may share one topic."""
    assert amounts(blocks=1, min_tokens=5 * SEQ_LEN) == (8 * 5, HELDOUT_BLOCKS)
