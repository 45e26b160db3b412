"""The rules: pure functions on frozen values, without clock, randomness or I/O."""
