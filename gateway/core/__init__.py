"""The rules: pure functions on frozen values; standard library only, no clock, no randomness, no I/O."""
