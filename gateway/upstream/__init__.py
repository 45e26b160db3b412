"""Send requests to providers."""
