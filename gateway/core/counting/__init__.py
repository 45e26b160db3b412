"""What a request weighs."""
