-- Batches: nothing could make one before. With a key one is found again, and filled on from where its filling stopped.

alter table duly.duly_batch
    add column key text,
    -- How many jobs it was given, in the order of their giving; counted only where it has a key.
    add column filled bigint not null default 0 check (filled >= 0),
    -- The share of its jobs that must succeed for all of it to count as success.
    add column ok_at double precision not null default 1 check (ok_at between 0 and 1),
    -- Cancelled before it was complete, it is no success, whatever has succeeded of it.
    add column cancelled_at bigint,
    add column cancelled_by text,
    add column cancelled_why text;

create unique index duly_batch_key on duly.duly_batch (key) where key is not null;

create view duly.duly_batches as
select id, name, key, open, succeeded, partial, dead, cancelled,
       open + succeeded + partial + dead + cancelled as total,
       created_at, to_timestamp(created_at / 1000.0) as created,
       sealed_at, to_timestamp(sealed_at / 1000.0) as sealed,
       completed_at, to_timestamp(completed_at / 1000.0) as completed
  from duly.duly_batch;

update duly.duly_meta set value = '3' where name = 'schema';
