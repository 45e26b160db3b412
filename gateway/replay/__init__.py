"""Read recorded requests, and try other settings on them."""
