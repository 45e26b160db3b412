"""Observers: they read call records and change nothing; one file per kind."""
