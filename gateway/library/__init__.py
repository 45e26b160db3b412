"""Keep a token budget inside one Python program, without a gateway. Import these names from `gateway`."""
