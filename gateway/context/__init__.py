"""Decide what of a conversation is sent, and write the request."""
