"""A dense or exported checkpoint as files: found, described, read, and run from disk."""
