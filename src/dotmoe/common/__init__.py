"""Files, ranks, options, tables, progress and errors; nothing of models."""
