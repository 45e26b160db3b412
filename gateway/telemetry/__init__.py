"""Observe settled calls without changing them: one module for each target."""
