-- All that a test may change besides rows, as one value. A copy has the oids of its template, so one value fits
-- all databases of a pool.
select md5(concat_ws('|',
  (select string_agg(concat_ws(',', oid, relname, relkind, relnamespace, relowner, reloptions, relacl, relnatts,
                               relhastriggers, relrowsecurity, relpersistence, relispartition,
                               case when relkind = 'r' then reltuples end), ';' order by oid)
     from pg_class where oid >= 16384 and relnamespace <> 'pg_toast'::regnamespace),
  (select string_agg(concat_ws(',', a.attrelid, a.attname, a.atttypid, a.attnotnull, a.attacl, a.attoptions,
                               a.attstattarget, pg_get_expr(d.adbin, d.adrelid)), ';' order by a.attrelid, a.attnum)
     from pg_attribute a join pg_class c on c.oid = a.attrelid
     left join pg_attrdef d on (d.adrelid, d.adnum) = (a.attrelid, a.attnum)
    where a.attrelid >= 16384 and a.attnum > 0 and c.relkind in ('r', 'v')),
  (select string_agg(concat_ws(',', indexrelid, indisvalid, indisclustered), ';' order by indexrelid)
     from pg_index where indexrelid >= 16384 and indrelid in (select oid from pg_class where relkind = 'r')),
  (select string_agg(concat_ws(',', oid, conname, convalidated), ';' order by oid)
     from pg_constraint where oid >= 16384),
  (select string_agg(concat_ws(',', oid, tgname, tgenabled), ';' order by oid) from pg_trigger where oid >= 16384),
  (select string_agg(concat_ws(',', oid, proname, proowner, proacl, md5(prosrc)), ';' order by oid)
     from pg_proc where oid >= 16384),
  (select string_agg(concat_ws(',', oid, typname), ';' order by oid) from pg_type where oid >= 16384),
  (select string_agg(concat_ws(',', oid, nspname, nspowner, nspacl), ';' order by oid)
     from pg_namespace where oid >= 2200),
  (select string_agg(extname, ',' order by extname) from pg_extension),
  (select string_agg(concat_ws(',', datdba, datallowconn, datconnlimit, datacl), ';')
     from pg_database where datname = current_database()),
  (select string_agg(concat_ws(',', setrole, setconfig), ';' order by setrole) from pg_db_role_setting
    where setdatabase = (select oid from pg_database where datname = current_database())),
  (select count(*) from pg_default_acl),
  (select count(*) from pg_statistic where starelid >= 16384),
  (select string_agg(name || '=' || value, ',' order by name) from duly.duly_meta)))
