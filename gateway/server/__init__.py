"""Serve HTTP and WebSockets to clients."""
