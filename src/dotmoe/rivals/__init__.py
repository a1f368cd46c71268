"""Published methods to compare with: other splits of the same FFNs, and pruning."""
