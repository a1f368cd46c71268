"""Exports of tiny models to look at."""

from types import SimpleNamespace

import pytest

from dotmoe.export import GgufConfig, export
from dotmoe.layout import ExpertLayout


@pytest.fixture
def exported(dense_of, layout_of, tokens_BT, tmp_path):
    """Exports a model, by its family or itself, with a layout or one of `layout_of` by its options.

    Gives the dense model, the layout, the folder and the record.
    """

    def make(dense="llama", layout=None, *, out="out", text_BT=tokens_BT, origin=None, **config):
        dense = dense_of(dense) if isinstance(dense, str) else dense
        if not isinstance(layout, ExpertLayout):
            layout = layout_of(dense, **layout or {})
        folder, config = tmp_path / out, GgufConfig(**config)
        record = export(dense, layout, folder, config, text_BT, origin=origin)
        return SimpleNamespace(dense=dense, layout=layout, folder=folder, record=record)

    return make
