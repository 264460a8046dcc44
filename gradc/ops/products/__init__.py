"""Sums of products: matrix products, contractions, convolutions, attention."""
