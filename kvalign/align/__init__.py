"""Directions that heads share: pairwise alignment, and the principal basis over all of them."""
