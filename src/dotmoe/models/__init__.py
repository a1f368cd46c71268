"""Model families: what a conversion needs to know about a dense architecture."""
