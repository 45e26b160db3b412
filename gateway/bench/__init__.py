"""Measure the cost of calls through a gateway and without one, for `gateway bench`."""
