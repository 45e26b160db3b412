"""Values and state of one call."""
