"""Messages of a conversation, and the units that are kept or dropped together."""
