"""Compose the gateway from its parts, and run it in one process."""
