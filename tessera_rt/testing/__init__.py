"""Tools for testing code that runs on several ranks: a pool of worker processes."""
