-- Batches: nothing could make one before. With a key one is found again, and filled on from where its filling stopped.
-- No column has a check: SQLite would look through the whole table, by a pragma that D1 does not take.

alter table duly_batch add column key text;
-- How many jobs it was given, in the order of their giving; counted only where it has a key.
alter table duly_batch add column filled integer not null default 0;
-- The share of its jobs that must succeed for all of it to count as success.
alter table duly_batch add column ok_at real not null default 1;
-- Cancelled before it was complete, it is no success, whatever has succeeded of it.
alter table duly_batch add column cancelled_at integer;
alter table duly_batch add column cancelled_by text;
alter table duly_batch add column cancelled_why text;

create unique index duly_batch_key on duly_batch (key) where key is not null;

create view duly_batches as
select id, name, key, open, succeeded, partial, dead, cancelled,
       open + succeeded + partial + dead + cancelled as total,
       created_at, strftime('%Y-%m-%dT%H:%M:%fZ', created_at / 1000.0, 'unixepoch') as created,
       sealed_at, strftime('%Y-%m-%dT%H:%M:%fZ', sealed_at / 1000.0, 'unixepoch') as sealed,
       completed_at, strftime('%Y-%m-%dT%H:%M:%fZ', completed_at / 1000.0, 'unixepoch') as completed
  from duly_batch;

update duly_meta set value = '3' where name = 'schema';
