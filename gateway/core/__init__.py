"""Define the rules of the gateway as pure functions on frozen values, without clock, randomness or I/O."""
