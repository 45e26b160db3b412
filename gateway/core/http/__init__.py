"""Rules about HTTP messages: headers, retries, events, compression."""
