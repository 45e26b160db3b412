"""Token counters: adapters to tokenizers."""
