-- Changes of many accepted requests at once, and of their keys.
--
-- Gates that run on the older schema change one at a time.

-- Removes deliveries whose records have their ends, in order. Those that were there.
CREATE FUNCTION oncegate.finish_deliveries_v1(ids bytea[], tokens bytea[])
RETURNS SETOF bytea
LANGUAGE plpgsql
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan SET jit = off SET lock_timeout = '2s'
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM oncegate.durably_v1();
    RETURN QUERY
    DELETE FROM oncegate.delivery d USING unnest(ids, tokens) AS f (id, token)
    WHERE d.id = f.id AND d.token = f.token
    RETURNING d.id;
END $$;

-- Puts other values in the place of those of a delivery, if its note is still what was seen: the same, encrypted with another
-- key. Whether that was so.
CREATE FUNCTION oncegate.reseal_delivery_v1(
    wanted bytea, seen_token bytea, seen_note bytea, new_head bytea, new_request bytea, new_body bytea, new_note bytea
)
RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '200ms'
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM oncegate.durably_v1();
    UPDATE oncegate.delivery d SET head = new_head, request = new_request, body = new_body, note = new_note
    WHERE d.id = wanted AND d.token = seen_token AND d.note IS NOT DISTINCT FROM seen_note;
    RETURN FOUND;
END $$;

REVOKE ALL ON FUNCTION oncegate.finish_deliveries_v1, oncegate.reseal_delivery_v1 FROM PUBLIC;
