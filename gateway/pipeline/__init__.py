"""Take one call from the client to a provider and back."""
