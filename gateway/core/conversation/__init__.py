"""Parse the messages of a conversation, and group them into units that are kept or dropped together."""
