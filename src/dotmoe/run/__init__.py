"""A run on disk: its config, its folder, and what a finished one contains."""
