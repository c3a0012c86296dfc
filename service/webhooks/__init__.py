"""Delivery of webhooks by the API process: where a message may go, sending one, sending them all."""
