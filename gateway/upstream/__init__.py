"""The ways to a provider; one file per kind."""
