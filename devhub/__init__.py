"""A Hub-compatible HTTP server on a plain folder, for the demo, the tests and machines without internet.

It speaks the dialect huggingface_hub and transformers expect; it knows nothing of kvalign.
"""
