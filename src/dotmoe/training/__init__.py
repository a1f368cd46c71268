"""A small training loop that knows nothing of experts: step, clip, log, save, resume."""
