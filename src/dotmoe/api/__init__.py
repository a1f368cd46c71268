"""The package from Python: its functions, their inputs in memory, and results as they are shown."""
