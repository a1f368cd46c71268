"""Model families: what a dense architecture must tell us to be converted."""
