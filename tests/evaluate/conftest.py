"""An export of a random layout, and a text to measure it on."""

from types import SimpleNamespace

import pytest

from dotmoe.export.config import ExportConfig
from dotmoe.export.write import export
from dotmoe.measure.config import TextConfig

TEXT = "The crows counted seven hills and seven valleys, and went on counting until dusk. " * 8


@pytest.fixture
def exported(dense_of, layout_of, tokens_BT, tmp_path):
    """Makes a dense model, a layout of 12 experts with k = 3, its export, and windows of a text."""

    def make(family="llama", window=48, **options):
        dense = dense_of(family)
        layout = layout_of(dense)
        export(dense, layout, tmp_path / "out", ExportConfig(**options), tokens_BT)
        (tmp_path / "text.txt").write_text(TEXT)
        corpus = TextConfig(text=(str(tmp_path / "text.txt"),), window=window, batch_size=3)
        ids = dense.tokenizer(TEXT).input_ids
        return SimpleNamespace(
            dense=dense, layout=layout, folder=tmp_path / "out", corpus=corpus, ids=ids
        )

    return make
