"""What `gateway bench` measures: calls through a gateway and without one, each answer checked."""
