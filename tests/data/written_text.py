"""Texts, and files of each format that hold them."""

import json

import pyarrow
import pyarrow.parquet

from dotmoe.text.config import DataConfig
from dotmoe.text.sources import documents
from runs import refusal

TEXTS = ["The cat sat on the mat.\n", "Zwölf Boxkämpfer 🙂", "x = [1, 2]\n\n\ty = 3"]


def documents_of(*sources, **options):
    return list(documents(DataConfig(data=tuple(map(str, sources)), **options)))


def read(*sources, **options):
    return [document.text for document in documents_of(*sources, **options)]


def refusal_of(*sources, **options):
    return refusal(read, *sources, **options)


def write(path, content):
    """Plain or, where the name ends so, compressed."""
    content = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    with pyarrow.output_stream(path, compression="detect") as file:
        file.write(content)
    return path


def parquet_bytes(columns):
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue().to_pybytes()


def jsonl(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
