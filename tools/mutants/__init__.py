"""Put one bug at a time into a copy of the source and check that the tests notice it."""
