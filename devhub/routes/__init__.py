"""The doors: parse, call, answer. Knows HTTP, keeps nothing."""
