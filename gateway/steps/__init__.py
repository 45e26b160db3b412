"""Find the active step of a session, and restrict the tools of a call to it."""
