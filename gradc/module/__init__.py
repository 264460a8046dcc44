"""Module, and what its calls take and give."""
