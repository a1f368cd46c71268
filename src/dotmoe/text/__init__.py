"""Text: sources, token blocks, and the tokenise stage."""
