"""Real servers and mannered stand-ins for the tests, each a plain class with `start` and `stop`."""
