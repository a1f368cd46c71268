"""A small training loop, independent of experts: step, clip, log, save, resume."""
