"""Store sessions, accounts and call records: one package for each kind of store."""
