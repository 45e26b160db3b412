"""Choose what a request keeps when it is trimmed."""
