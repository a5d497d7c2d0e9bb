-- Turns in-flight records whose lease is past into unknown ones, but none that another transaction holds, and gives their
-- ids: an operator wants to know which attempts were lost. expire_leases_v1, which only counts them, stays for gates that
-- run on the older schema.
-- A plain walk of the index marks what it finds dead, so that the next one passes it by; a bitmap's does not.

CREATE FUNCTION oncegate.expire_leases_v2(most bigint) RETURNS SETOF bytea
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s'
AS $$
DECLARE
    at bigint := oncegate.now_v1();
BEGIN
    PERFORM oncegate.durably_v1();
    RETURN QUERY
    WITH lost AS (
        SELECT r.id FROM oncegate.record r WHERE r.state = 0 AND r.lease_until <= at
        LIMIT most FOR NO KEY UPDATE SKIP LOCKED
    ), turned AS (
        UPDATE oncegate.record r
        SET state = 2, expires_at = oncegate.after_v1(at, r.unknown_ttl)
        FROM lost WHERE r.id = ANY (ARRAY[lost.id])
        RETURNING r.id AS id, CASE WHEN r.is_awaited THEN oncegate.tell_v1(r.id) ELSE false END AS told
    )
    SELECT turned.id FROM turned WHERE told IS NOT NULL;
END $$;
