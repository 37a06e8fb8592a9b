"""The tests of duly; `tests.servers` holds the databases they run against."""
