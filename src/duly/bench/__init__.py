"""Measures duly on your own database: `duly bench`."""
