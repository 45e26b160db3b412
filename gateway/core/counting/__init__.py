"""Count the tokens of a request."""
