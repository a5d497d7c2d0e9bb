-- Records, and what the gate does to them.
--
-- Everything the gate sends is one call of a function here: their plans are pinned where they are defined, they are kept
-- by the server across transactions even where a pooler hands out a different connection each time, and a version of the
-- gate keeps finding the functions that it was written for. A function is never changed: what must differ gets the next
-- number, and the old one stays for as long as gates that call it may run beside newer ones.
--
-- A plan is made once in a session, and may be made when the table is new, or was swept empty and analysed so. Then the
-- planner thinks that reading all of it is cheapest, and goes on so when there are millions. To forbid it to scan the
-- table does not help: it reads a whole index instead, and compares each entry with each of the batch. So whatever
-- looks for the records of a batch leaves it no other way than one look for each:
-- * a subquery for each id, as a value or as LATERAL with OFFSET 0, is never turned into a join;
-- * `r.id = ANY (ARRAY[e.id])` is found by index as `=` is, and counted as that, but can be neither hashed nor merged,
--   and is no reason to read an index in its order;
-- * `state + 0` keeps it from reading the whole of an index that has records in that state only.

CREATE SCHEMA oncegate;
GRANT USAGE ON SCHEMA oncegate TO PUBLIC;

CREATE TABLE oncegate.migration (
    version int PRIMARY KEY,
    -- The oldest program, by the latest migration it knows, that may run on this schema.
    compatible_with int NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- One row for each (service, namespace, scope, key). Times are milliseconds since 1970 by this server's clock, spans are
-- milliseconds. There is no foreign key and no sequence: rows can be spread over servers by their id.
CREATE TABLE oncegate.record (
    id bytea NOT NULL,
    attempt bytea NOT NULL,
    -- 0 in flight, 1 completed, 2 unknown
    state smallint NOT NULL,
    claimed_at bigint NOT NULL,
    -- In flight: when the lease ends. No index has it, so that a renewal touches none.
    lease_until bigint NOT NULL,
    -- Otherwise: when the record expires.
    expires_at bigint,
    -- How long it answers from its claim on if its upstream completes it, and how long it is kept if it turns unknown.
    ttl bigint NOT NULL,
    unknown_ttl bigint NOT NULL,
    origin bigint NOT NULL,
    -- Whether somebody waits to be told when the attempt ends.
    is_awaited boolean NOT NULL DEFAULT false,
    head bytea NOT NULL,
    answer bytea,
    CONSTRAINT record_pkey PRIMARY KEY (id)
) WITH (
    -- Room for the answer beside the claim, on the same page.
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.1,
    autovacuum_analyze_scale_factor = 0.1
);

-- What is in flight: small, whatever the table has. By attempt, which is all that an upstream knows.
CREATE INDEX record_in_flight ON oncegate.record (attempt) WHERE state = 0;
CREATE INDEX record_unknown ON oncegate.record (id) WHERE state = 2;
CREATE INDEX record_unknown_attempt ON oncegate.record (attempt) WHERE state = 2;
CREATE INDEX record_expiry ON oncegate.record (expires_at) WHERE state <> 0;

CREATE TABLE oncegate.origin (
    id bigint PRIMARY KEY,
    service text NOT NULL,
    namespace text NOT NULL,
    route text NOT NULL
);

CREATE TABLE oncegate.identity (
    service text NOT NULL,
    namespace text NOT NULL,
    digest bytea NOT NULL,
    PRIMARY KEY (service, namespace)
);

-- The time, by which everything lives and expires.
CREATE FUNCTION oncegate.now_v1() RETURNS bigint
LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN (date_part('epoch', clock_timestamp()) * 1000)::bigint;

-- This long after that time; the end of all time where that is later still.
CREATE FUNCTION oncegate.after_v1(at bigint, span bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN at + least(span, 9223372036854775807 - at);

-- Makes the transaction wait until it is on the disk, and on the standby that it waits for, whatever the session is set
-- to. It takes effect for the whole transaction.
CREATE FUNCTION oncegate.durably_v1() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF current_setting('synchronous_commit') IN ('off', 'local', 'remote_write') THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    -- That the wait for a standby was broken off is told in a warning, and nowhere else.
    IF current_setting('client_min_messages') = 'error' THEN
        PERFORM set_config('client_min_messages', 'warning', true);
    END IF;
END $$;

-- Makes a transaction that writes nothing wait until everything before it is durable: what an earlier one wrote, and
-- nobody knows how that ended, may be on this server's disk only.
CREATE FUNCTION oncegate.flush_v1() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pg_logical_emit_message(true, 'oncegate', '');
END $$;

-- Whether another transaction holds a record. Its attempt is at work, whatever became of its lease: to write the next
-- one down, the gate would have to wait for that transaction.
CREATE FUNCTION oncegate.is_held_v1(wanted bytea) RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off
SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s'
AS $$
BEGIN
    -- This lock goes together with others of its kind and with what the gate writes, not with an upstream's.
    PERFORM FROM oncegate.record r WHERE r.id = wanted FOR KEY SHARE SKIP LOCKED;
    RETURN NOT FOUND;
END $$;

-- Tells whoever waits for a record that its attempt has ended.
CREATE FUNCTION oncegate.tell_v1(ended bytea) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pg_notify('oncegate', encode(ended, 'hex'));
    RETURN false;
END $$;

-- Claims ids. Each comes once, in order, so that two batches wait for each other in one direction only.
-- For a claim that stands under its own attempt: its id and when it was claimed. For an id that is another's: the record too.
-- For one that went away meanwhile: nothing, and it is to be asked for again. An answer above 256 KiB is left out.
CREATE FUNCTION oncegate.claim_v1(
    ids bytea[], attempts bytea[], leases bigint[], ttls bigint[], unknown_ttls bigint[], origins bigint[], heads bytea[]
)
RETURNS TABLE (
    id bytea, now bigint, attempt bytea, state smallint, claimed_at bigint, until bigint, head bytea, answer bytea
)
LANGUAGE plpgsql
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan SET lock_timeout = '200ms'
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    at bigint := oncegate.now_v1();
    claimed bigint;
BEGIN
    -- Looked at here, since a call costs more than to look.
    IF current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
        OR current_setting('client_min_messages') = 'error'
    THEN
        PERFORM oncegate.durably_v1();
    END IF;
    -- What stands is looked for first: inserting where somebody changes a record would wait until he is done, and that
    -- may be an upstream's long transaction.
    RETURN QUERY
    INSERT INTO oncegate.record AS r
        (id, attempt, state, claimed_at, lease_until, ttl, unknown_ttl, origin, head)
    SELECT a.id, a.attempt, 0::smallint, at, oncegate.after_v1(at, a.lease), a.ttl, a.unknown_ttl, a.origin, a.head
    FROM (
        -- One for each: one for all of them would first put each array into a store of its own.
        SELECT unnest(ids) AS id, unnest(attempts) AS attempt, unnest(leases) AS lease, unnest(ttls) AS ttl,
            unnest(unknown_ttls) AS unknown_ttl, unnest(origins) AS origin, unnest(heads) AS head
    ) AS a
    WHERE (SELECT true FROM oncegate.record s WHERE s.id = a.id) IS NULL
    ON CONFLICT (id) DO NOTHING
    RETURNING r.id, at, NULL::bytea, NULL::smallint, NULL::bigint, NULL::bigint, NULL::bytea, NULL::bytea;
    GET DIAGNOSTICS claimed = ROW_COUNT;
    IF claimed = cardinality(ids) THEN
        RETURN;
    END IF;
    at := oncegate.now_v1();
    RETURN QUERY
    SELECT r.id, at, r.attempt, CASE WHEN w.is_held THEN 0::smallint ELSE r.state END, r.claimed_at,
        CASE WHEN w.is_held THEN at + 1000 WHEN r.state <> 0 THEN r.expires_at ELSE r.lease_until END,
        r.head,
        -- A batch of large answers would be more than anybody expects at once: these are asked for by get_v1.
        CASE WHEN octet_length(r.answer) <= 262144 THEN r.answer END
    FROM unnest(ids, attempts) AS a (id, attempt),
        LATERAL (SELECT * FROM oncegate.record s WHERE s.id = a.id OFFSET 0) AS r
        -- Its attempt is at work, though its lease be past or nobody know how it ends: it is in flight.
        CROSS JOIN LATERAL (
            SELECT (r.state = 2 OR r.state = 0 AND r.lease_until <= at) AND oncegate.is_held_v1(r.id) AS is_held OFFSET 0
        ) AS w
    WHERE r.state <> 0 OR r.attempt <> a.attempt;
    RETURN QUERY
    SELECT r.id, r.claimed_at, NULL::bytea, NULL::smallint, NULL::bigint, NULL::bigint, NULL::bytea, NULL::bytea
    FROM unnest(ids, attempts) AS a (id, attempt),
        LATERAL (SELECT * FROM oncegate.record s WHERE s.id = a.id OFFSET 0) AS r
    WHERE r.state = 0 AND r.attempt = a.attempt;
    IF FOUND AND claimed = 0 THEN
        PERFORM oncegate.flush_v1();
    END IF;
END $$;

-- Puts a claim in the place of the record whose version was seen.
CREATE FUNCTION oncegate.supersede_v1(
    wanted bytea, seen_attempt bytea, seen_state smallint, seen_until bigint,
    new_attempt bytea, new_lease bigint, new_ttl bigint, new_unknown_ttl bigint, new_origin bigint, new_head bytea
)
RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '200ms'
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    at bigint := oncegate.now_v1();
BEGIN
    PERFORM oncegate.durably_v1();
    UPDATE oncegate.record r
    SET attempt = new_attempt, state = 0, claimed_at = at, lease_until = oncegate.after_v1(at, new_lease),
        expires_at = NULL, ttl = new_ttl, unknown_ttl = new_unknown_ttl, origin = new_origin, is_awaited = false,
        head = new_head, answer = NULL
    WHERE r.id = wanted AND r.attempt = seen_attempt AND r.state + 0 = seen_state
        AND CASE r.state WHEN 0 THEN r.lease_until ELSE r.expires_at END = seen_until
        -- Where it stands already it stands as it was claimed.
        AND (r.state <> 0 OR r.attempt <> new_attempt);
    IF FOUND THEN
        RETURN true;
    END IF;
    PERFORM FROM oncegate.record r WHERE r.id = wanted AND r.attempt = new_attempt AND r.state + 0 = 0;
    IF FOUND THEN
        PERFORM oncegate.flush_v1();
        RETURN true;
    END IF;
    RETURN false;
END $$;

-- Ends attempts. Each id comes once, in order.
-- How: 1 completes, and expires a span after its claim; 2 completes, and expires a span from now; 3 is released; 4 turns
-- unknown. Only what is clear is done here, and comes back as its id and when it expires (now, for a release). For the
-- others comes what stands, for the gate to judge: without an attempt where nothing stands.
-- A batch that is careful leaves alone what other transactions hold; that comes back as held.
CREATE FUNCTION oncegate.settle_v1(
    ids bytea[], attempts bytea[], hows smallint[], spans bigint[], answers bytea[], careful boolean
)
RETURNS TABLE (
    id bytea, now bigint, done_until bigint, is_held boolean,
    attempt bytea, state smallint, claimed_at bigint, until bigint, unknown_ttl bigint, head bytea, answer bytea
)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan SET lock_timeout = '200ms'
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    at bigint := oncegate.now_v1();
    -- Those of a careful batch that nobody holds.
    free bytea[];
    ended bigint;
    released bigint := 0;
BEGIN
    IF current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
        OR current_setting('client_min_messages') = 'error'
    THEN
        PERFORM oncegate.durably_v1();
    END IF;
    IF careful THEN
        free := ARRAY(
            SELECT r.id FROM oncegate.record r WHERE r.id = ANY (ids) ORDER BY r.id FOR NO KEY UPDATE SKIP LOCKED
        );
    END IF;
    RETURN QUERY
    UPDATE oncegate.record r
    SET state = CASE e.how WHEN 4 THEN 2::smallint ELSE 1::smallint END,
        expires_at = CASE
            WHEN e.how = 4 THEN oncegate.after_v1(at, r.unknown_ttl)
            WHEN e.how = 1 AND oncegate.after_v1(r.claimed_at, e.span) > at THEN oncegate.after_v1(r.claimed_at, e.span)
            ELSE oncegate.after_v1(at, e.span)
        END,
        answer = e.answer
    FROM (
        SELECT unnest(ids) AS id, unnest(attempts) AS attempt, unnest(hows) AS how, unnest(spans) AS span,
            unnest(answers) AS answer
    ) AS e
    WHERE r.id = ANY (ARRAY[e.id]) AND r.attempt = e.attempt
        AND (r.state = 0 AND e.how IN (1, 2, 4) OR r.state = 2 AND e.how IN (1, 2))
        AND (NOT careful OR r.id = ANY (free))
    RETURNING r.id, at, r.expires_at, CASE WHEN r.is_awaited THEN oncegate.tell_v1(r.id) ELSE false END,
        NULL::bytea, NULL::smallint, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bytea, NULL::bytea;
    GET DIAGNOSTICS ended = ROW_COUNT;
    IF ended = cardinality(ids) THEN
        RETURN;
    END IF;
    IF 3 = ANY (hows) THEN
        RETURN QUERY
        DELETE FROM oncegate.record r
        USING unnest(ids, attempts, hows) AS e (id, attempt, how)
        WHERE e.how = 3 AND r.id = ANY (ARRAY[e.id]) AND r.attempt = e.attempt AND r.state <> 1
            AND (NOT careful OR r.id = ANY (free))
        RETURNING r.id, at, at, CASE WHEN r.is_awaited THEN oncegate.tell_v1(r.id) ELSE false END,
            NULL::bytea, NULL::smallint, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bytea, NULL::bytea;
        GET DIAGNOSTICS released = ROW_COUNT;
    END IF;
    IF ended + released = cardinality(ids) THEN
        RETURN;
    END IF;
    RETURN QUERY
    SELECT e.id, at, NULL::bigint, r.id IS NOT NULL AND careful AND e.id <> ALL (free), r.attempt, r.state, r.claimed_at,
        CASE r.state WHEN 0 THEN r.lease_until ELSE r.expires_at END, r.unknown_ttl, r.head, r.answer
    FROM unnest(ids) AS e (id)
        LEFT JOIN LATERAL (SELECT s.xmin, s.* FROM oncegate.record s WHERE s.id = e.id OFFSET 0) AS r ON true
    -- Not what was written just now.
    WHERE r.id IS NULL OR r.xmin IS DISTINCT FROM pg_current_xact_id_if_assigned()::xid;
    IF ended + released = 0 THEN
        -- Perhaps all of it was done before, by a statement whose end nobody saw.
        PERFORM oncegate.flush_v1();
    END IF;
END $$;

-- Extends leases, and gives the ids of those that it did. What another transaction holds is left alone: to wait for it
-- would put all the others at risk.
CREATE FUNCTION oncegate.renew_v1(ids bytea[], attempts bytea[], leases bigint[]) RETURNS SETOF bytea
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s'
AS $$
DECLARE
    at bigint := oncegate.now_v1();
BEGIN
    PERFORM oncegate.durably_v1();
    RETURN QUERY
    WITH free AS (
        SELECT r.id, a.lease
        FROM unnest(ids, attempts, leases) AS a (id, attempt, lease), LATERAL (
            SELECT s.id FROM oncegate.record s WHERE s.id = a.id AND s.attempt = a.attempt AND s.state = 0
            OFFSET 0 FOR NO KEY UPDATE SKIP LOCKED
        ) AS r
    )
    UPDATE oncegate.record r SET lease_until = oncegate.after_v1(at, free.lease)
    FROM free WHERE r.id = ANY (ARRAY[free.id])
    RETURNING r.id;
END $$;

-- Turns in-flight records whose lease is past into unknown ones, but none that another transaction holds.
-- A plain walk of the index marks what it finds dead, so that the next one passes it by; a bitmap's does not.
CREATE FUNCTION oncegate.expire_leases_v1(most bigint) RETURNS bigint
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s'
AS $$
DECLARE
    at bigint := oncegate.now_v1();
    turned bigint;
BEGIN
    PERFORM oncegate.durably_v1();
    WITH lost AS (
        SELECT r.id FROM oncegate.record r WHERE r.state = 0 AND r.lease_until <= at
        LIMIT most FOR NO KEY UPDATE SKIP LOCKED
    ), turned AS (
        UPDATE oncegate.record r
        SET state = 2, expires_at = oncegate.after_v1(at, r.unknown_ttl)
        FROM lost WHERE r.id = ANY (ARRAY[lost.id])
        RETURNING CASE WHEN r.is_awaited THEN oncegate.tell_v1(r.id) ELSE false END AS told
    )
    SELECT count(told) INTO turned FROM turned;
    RETURN turned;
END $$;

-- Removes records that expired after `begin`, the first to expire first, and gives how many, and when the last one did.
CREATE FUNCTION oncegate.sweep_v1(begin bigint, most bigint, OUT swept bigint, OUT reached bigint)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s'
AS $$
DECLARE
    at bigint := oncegate.now_v1();
BEGIN
    WITH gone AS (
        DELETE FROM oncegate.record r
        WHERE r.id = ANY (ARRAY(
            SELECT e.id FROM oncegate.record e
            WHERE e.state <> 0 AND e.expires_at >= begin AND e.expires_at <= at
            ORDER BY e.expires_at LIMIT most FOR UPDATE SKIP LOCKED
        ))
        RETURNING r.expires_at
    )
    SELECT count(*), max(expires_at) INTO swept, reached FROM gone;
END $$;

-- What stands, with where it comes from. An attempt that another transaction holds is at work: see is_held_v1.
CREATE FUNCTION oncegate.get_v1(wanted bytea)
RETURNS TABLE (
    id bytea, now bigint, attempt bytea, state smallint, claimed_at bigint, until bigint, head bytea, answer bytea,
    service text, namespace text, route text
)
LANGUAGE plpgsql SET enable_seqscan = off
SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s'
AS $$
#variable_conflict use_column
DECLARE
    at bigint := oncegate.now_v1();
BEGIN
    RETURN QUERY
    SELECT r.id, at, r.attempt, CASE WHEN w.is_held THEN 0::smallint ELSE r.state END, r.claimed_at,
        CASE WHEN w.is_held THEN at + 1000 WHEN r.state <> 0 THEN r.expires_at ELSE r.lease_until END,
        r.head, r.answer, o.service, o.namespace, o.route
    FROM oncegate.record r LEFT JOIN oncegate.origin o ON o.id = r.origin
        -- Its attempt is at work, though its lease be past or nobody know how it ends: it is in flight.
        CROSS JOIN LATERAL (
            SELECT (r.state = 2 OR r.state = 0 AND r.lease_until <= at) AND oncegate.is_held_v1(r.id) AS is_held OFFSET 0
        ) AS w
    WHERE r.id = wanted;
END $$;

-- Removes a record, whatever its state, and tells whoever may have it in mind. Returns whether there was one.
CREATE FUNCTION oncegate.remove_v1(wanted bytea) RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '2s'
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM oncegate.durably_v1();
    DELETE FROM oncegate.record r WHERE r.id = wanted;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM pg_notify('oncegate', 'removed ' || encode(wanted, 'hex'));
    RETURN true;
END $$;

-- How many records there are in flight, completed and unknown. Where the table is larger than 64 MiB, the completed
-- ones are estimated from the statistics: to count them all would read a whole index each time.
CREATE FUNCTION oncegate.count_v1(OUT in_flight bigint, OUT completed bigint, OUT unknown bigint)
LANGUAGE plpgsql SET enable_seqscan = off
SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s'
AS $$
DECLARE
    pages bigint := pg_relation_size('oncegate.record') / current_setting('block_size')::bigint;
BEGIN
    SELECT count(*) INTO in_flight FROM oncegate.record r WHERE r.state = 0;
    SELECT count(*) INTO unknown FROM oncegate.record r WHERE r.state = 2;
    IF pages <= 8192 OR (SELECT c.reltuples < 0 FROM pg_class c WHERE c.oid = 'oncegate.record'::regclass) THEN
        SELECT count(*) INTO completed FROM oncegate.record r WHERE r.state = 1;
    ELSE
        SELECT greatest(0, (c.reltuples / greatest(c.relpages, 1) * pages)::bigint - in_flight - unknown) INTO completed
        FROM pg_class c WHERE c.oid = 'oncegate.record'::regclass;
    END IF;
END $$;

-- Asks to be told when a record's attempt ends. Returns whether one is in flight.
CREATE FUNCTION oncegate.await_v1(wanted bytea) RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off
SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s'
AS $$
BEGIN
    -- Where somebody holds it, whoever waits is not told, and looks for himself.
    UPDATE oncegate.record r SET is_awaited = true
    WHERE r.id = (
            SELECT s.id FROM oncegate.record s
            WHERE s.id = wanted AND s.state + 0 = 0 AND NOT s.is_awaited FOR NO KEY UPDATE SKIP LOCKED
        );
    RETURN FOUND OR EXISTS (SELECT FROM oncegate.record r WHERE r.id = wanted AND r.state + 0 = 0);
END $$;

-- Nobody but the gate's own role calls these. What an upstream calls is granted where it is defined.
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA oncegate FROM PUBLIC;
