"""Mixture-of-Experts parts: router, masked FFN, losses, and their surgery into a dense model."""
