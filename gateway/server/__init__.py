"""The HTTP shell: ASGI endpoints, headers, client keys, the /api routes."""
