"""Where sessions, their totals and their call records are kept; one file per kind of store."""
