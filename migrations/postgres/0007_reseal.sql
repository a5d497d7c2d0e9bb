-- Puts other values in the place of those of a record that is not in flight, if it still has the version that was seen:
-- the same head and answer, encrypted with another key.
CREATE FUNCTION oncegate.reseal_v1(
    wanted bytea, seen_attempt bytea, seen_state smallint, seen_until bigint, new_head bytea, new_answer bytea
)
RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '200ms'
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM oncegate.durably_v1();
    UPDATE oncegate.record r
    SET head = new_head, answer = new_answer
    WHERE r.id = wanted AND r.attempt = seen_attempt AND r.state + 0 = seen_state AND r.state <> 0
        AND r.expires_at = seen_until;
    RETURN FOUND;
END $$;

REVOKE ALL ON FUNCTION oncegate.reseal_v1 FROM PUBLIC;
