-- Only PostgreSQL has something to change: SQLite prepares the checks once with the statement that has them.

update duly_meta set value = '6' where name = 'schema';
