"""Find the active step of a session, restrict the tools of a call to it, and stop agents that run away."""
