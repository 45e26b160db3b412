"""Adapters to tokenizers."""
