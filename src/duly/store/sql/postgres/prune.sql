-- What has had its time is removed in bounded chunks, on PostgreSQL. Each section answers with one row per
-- thing it took, so that the caller knows whether to come back. Dead jobs are never pruned. Several workers may
-- prune at once: each skips what another has locked.

-- name: prune_results
with clock as materialized (select :now as now)
update duly.duly_done
   set result = null, prune_at = finished_at + keep_ms
 where id = any (array(
       select id from duly.duly_done
        where prune_at <= (select now from clock) and finished_at + keep_ms > (select now from clock)
        order by prune_at
        limit :limit::int
          for update skip locked))
returning id::text;

-- name: prune_done
with clock as materialized (select :now as now),
gone as (
    delete from duly.duly_done
     where id = any (array(
           select id from duly.duly_done
            where prune_at <= (select now from clock) and finished_at + keep_ms <= (select now from clock)
            order by prune_at, id
            limit :limit::int
              for update skip locked))
    returning id
),
attempts_gone as (
    delete from duly.duly_attempt where job_id = any (array(select id from gone))
),
steps_gone as (
    delete from duly.duly_step where job_id = any (array(select id from gone))
)
select id::text from gone;

-- name: prune_keys
-- By the place of the row, which the lock holds still: a join by two columns may be planned as a walk over all keys.
delete from duly.duly_key
 where ctid = any (array(
       select ctid from duly.duly_key
        where expires_at <= (select :now)
        order by expires_at
        limit :limit::int
          for update skip locked))
returning key;

-- name: prune_events
delete from duly.duly_event
 where id = any (array(
       select id from duly.duly_event
        where at <= (select :now) - :keep_ms::bigint
        order by at
        limit :limit::int
          for update skip locked))
returning id;

-- name: prune_fires
delete from duly.duly_fire
 where ctid = any (array(
       select ctid from duly.duly_fire
        where at <= (select :now) - :keep_ms::bigint
        order by at
        limit :limit::int
          for update skip locked))
returning schedule;

-- name: prune_batches
delete from duly.duly_batch
 where id = any (array(
       select id from duly.duly_batch
        where open = 0 and completed_at <= (select :now) - :keep_ms::bigint
          and not exists (select 1 from duly.duly_done where batch_id = duly_batch.id)
        limit :limit::int
          for update skip locked))
returning id::text;

-- name: prune_workers
delete from duly.duly_worker
 where id = any (array(
       select id from duly.duly_worker
        where seen_at <= (select :now) - :keep_ms::bigint
        limit :limit::int
          for update skip locked))
returning id;
