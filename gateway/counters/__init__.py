"""Count tokens with tokenizers: adapters to tokenizer libraries."""
