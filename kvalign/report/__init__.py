"""The report card: what was measured (build.py) and how a person reads it (card.py)."""
