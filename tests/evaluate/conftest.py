"""An export of a random layout, and a text to measure it on."""

import pytest

from dotmoe.measure.config import TextConfig

TEXT = "The crows counted seven hills and seven valleys, and went on counting until dusk. " * 8


@pytest.fixture
def exported(exported, tmp_path):
    """As for all tests, with windows of a text (`corpus`) and its token ids (`ids`)."""

    def make(family="llama", **options):
        made = exported(family, **options)
        (tmp_path / "text.txt").write_text(TEXT)
        text = (str(tmp_path / "text.txt"),)
        made.corpus = TextConfig(text=text, window=48, batch_size=3)
        made.ids = made.dense.tokenizer(TEXT).input_ids
        return made

    return make
