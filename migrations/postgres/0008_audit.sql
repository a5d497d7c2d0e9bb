-- What operators did. An entry says the word for it, who, and to which record; the rest is the gate's own.
--
-- Gates that run on the older schema know nothing of it.

CREATE TABLE oncegate.audit (
    -- It names the entry, and later ones have greater ones.
    position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- Milliseconds since 1970 by this server's clock.
    at bigint NOT NULL,
    expires_at bigint NOT NULL,
    service text NOT NULL,
    action text NOT NULL,
    by text NOT NULL,
    -- Nothing where it is not about one record.
    record bytea,
    detail bytea NOT NULL,
    -- Encrypted where the gate has keys.
    reason bytea
);

CREATE INDEX audit_expiry ON oncegate.audit (expires_at);
CREATE INDEX audit_record ON oncegate.audit (record, position) WHERE record IS NOT NULL;

-- Appends an entry, and gives its place.
CREATE FUNCTION oncegate.append_entry_v1(
    ttl bigint, new_service text, new_action text, new_by text, new_record bytea, new_detail bytea, new_reason bytea
)
RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    appended_at bigint := oncegate.now_v1();
    place bigint;
BEGIN
    PERFORM oncegate.durably_v1();
    INSERT INTO oncegate.audit AS a (at, expires_at, service, action, by, record, detail, reason)
    VALUES (
        appended_at, oncegate.after_v1(appended_at, ttl), new_service, new_action, new_by, new_record, new_detail, new_reason
    )
    RETURNING a.position INTO place;
    RETURN place;
END $$;

-- Puts another detail in the place of that of an entry. Whether there is one.
CREATE FUNCTION oncegate.amend_entry_v1(place bigint, new_detail bytea)
RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '200ms'
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM oncegate.durably_v1();
    UPDATE oncegate.audit a SET detail = new_detail WHERE a.position = place;
    RETURN FOUND;
END $$;

-- Removes up to so many entries that have expired, except those that others remove. How many.
CREATE FUNCTION oncegate.sweep_entries_v1(most bigint)
RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    now bigint := oncegate.now_v1();
    swept bigint;
BEGIN
    DELETE FROM oncegate.audit a
    WHERE a.position = ANY (ARRAY(
        SELECT e.position FROM oncegate.audit e WHERE e.expires_at <= now
        ORDER BY e.expires_at LIMIT most FOR UPDATE SKIP LOCKED
    ));
    GET DIAGNOSTICS swept = ROW_COUNT;
    RETURN swept;
END $$;

REVOKE ALL ON oncegate.audit FROM PUBLIC;
REVOKE ALL ON FUNCTION oncegate.append_entry_v1, oncegate.amend_entry_v1, oncegate.sweep_entries_v1 FROM PUBLIC;
