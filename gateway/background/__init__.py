"""Find and settle calls whose response is fetched later."""
