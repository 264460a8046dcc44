"""Graph -> Graph."""
