"""Measurements: evaluate, analyse, bench, inspect, and the report of a run."""
