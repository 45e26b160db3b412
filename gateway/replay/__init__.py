"""Replay recorded requests and calls with other settings."""
