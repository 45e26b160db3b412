"""What a request keeps when it does not fit."""
