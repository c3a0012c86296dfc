"""Entropy coding of quantised coefficients: symbol classes (classes.py) apart from the coder (rans.py)."""
