"""Arithmetic of budgets: reserve, settle, refuse."""
