"""Read, reserve and settle the budgets of a call."""
