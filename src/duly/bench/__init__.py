"""Measures duly beside the least that its database can do, on that database: `duly bench`, and `make bench`.

Every measure is a part with a letter. Each repetition runs all parts, and in every part duly and its limit take turns,
so that whatever disturbs the machine disturbs both. The limit is written by hand, goes through the same client library
and syncs as hard. A worker is a process of its own; a tally shows that every job ran as often as it should.
"""
