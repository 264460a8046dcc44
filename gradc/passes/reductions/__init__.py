"""How values of many rows are combined: the strategies, what they cost, which one is taken."""
