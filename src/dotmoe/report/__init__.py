"""Report: result files in, tables, plots and words out. Nothing is computed again."""
