-- Takes what is due for less: without passing over what was taken before and, as a rule, without a write to an index.
--
-- Gates that run on the older schema go on with the older functions.

-- Until when somebody has a delivery. It stands in no index, so that an update of it alone touches none, where its page has
-- room for another version of the row (a HOT update).
ALTER TABLE oncegate.delivery ADD COLUMN held_until bigint NOT NULL DEFAULT 0;
ALTER TABLE oncegate.outgoing_delivery ADD COLUMN held_until bigint NOT NULL DEFAULT 0;
ALTER TABLE oncegate.delivery SET (fillfactor = 50);

-- Takes due deliveries of a route, and holds them: nobody else takes them meanwhile. Where more is due than fits, one half
-- goes by age, and the other half goes round the lanes; what few lanes leave goes by age too. The rounds go from higher lanes to
-- lower ones: so the next lane is found at its end, where its latest deliveries are.
--
-- A row that is removed stays in the indexes until the table is vacuumed, and a scan from their beginning would pass over all of
-- them: a minute of deliveries. So this looks for nothing that was due before `from_due` nor, in a lane that has later ones, for what
-- was accepted before `from_sequence`. The caller knows both from the last time, and gives none of them now and then.
--
-- The last row has no id. It says whether there may be more, before which lane to go on, and when the next is due; in `due`
-- and `sequence` stands the least of what was found.
CREATE FUNCTION oncegate.take_due_v2(
    of_origin bigint, most bigint, most_bytes bigint, hold bigint, is_ordered boolean, before_lane bigint, from_due bigint,
    from_sequence bigint
)
RETURNS TABLE (
    id bytea, token bytea, sequence bigint, lane bigint, accepted_at bigint, queued_at bigint, due bigint, attempts int,
    head bytea, note bytea, request bytea, body bytea, now bigint, is_more boolean, last_lane bigint, next_due bigint
)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_incremental_sort = off
SET plan_cache_mode = force_generic_plan SET jit = off SET lock_timeout = '2s'
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    at bigint := oncegate.now_v1();
    lowest constant bigint := -9223372036854775808;
    highest constant bigint := 9223372036854775807;
    candidates bigint := CASE WHEN is_ordered THEN 4 * most ELSE most END;
    depth constant bigint := CASE WHEN is_ordered THEN 1 ELSE 16 END;
    least_due bigint := coalesce(from_due, lowest);
    least_sequence bigint := CASE WHEN is_ordered THEN lowest ELSE coalesce(from_sequence, lowest) END;
    seen bigint;
    seen_due bigint;
    seen_sequence bigint;
    by_age bytea[];
    chosen bytea[];
    of_lanes bytea[];
    at_lane bigint := coalesce(before_lane, highest);
    next_lane bigint;
    has_wrapped boolean := at_lane = highest;
    lanes_left bigint := 64;
    room bigint;
    is_crowded boolean;
BEGIN
    IF EXISTS (SELECT FROM oncegate.paused p WHERE p.origin = of_origin) THEN
        RETURN;
    END IF;
    IF is_ordered THEN
        WITH oldest AS MATERIALIZED (
            SELECT d.id, d.due, d.lane, d.sequence FROM oncegate.delivery d
            WHERE d.origin = of_origin AND d.dead_until IS NULL AND d.due >= least_due AND d.due <= at
                AND d.held_until <= at
            ORDER BY d.due LIMIT candidates
        ), first AS MATERIALIZED (
            SELECT l.lane, (
                SELECT e.sequence FROM oncegate.delivery e
                WHERE e.origin = of_origin AND e.lane >= l.lane AND e.lane <= l.lane AND e.dead_until IS NULL
                ORDER BY e.lane, e.sequence LIMIT 1
            ) AS sequence
            FROM (SELECT DISTINCT o.lane FROM oldest o) l
        )
        SELECT count(*), min(o.due), min(o.sequence), coalesce(array_agg(o.id ORDER BY o.due, o.sequence) FILTER (
            WHERE o.sequence IN (SELECT f.sequence FROM first f)
        ), '{}')
        INTO seen, seen_due, seen_sequence, by_age
        FROM oldest o;
    ELSE
        SELECT count(*), min(d.due), min(d.sequence), coalesce(array_agg(d.id ORDER BY d.due, d.sequence), '{}')
        INTO seen, seen_due, seen_sequence, by_age
        FROM (
            SELECT d.id, d.due, d.sequence FROM oncegate.delivery d
            WHERE d.origin = of_origin AND d.dead_until IS NULL AND d.due >= least_due AND d.due <= at
                AND d.held_until <= at
            ORDER BY d.due LIMIT candidates
        ) d;
    END IF;
    is_crowded := seen >= candidates;
    IF NOT is_crowded THEN
        chosen := by_age[1:most];
    ELSE
        chosen := by_age[1:(most + 1) / 2];
        WHILE lanes_left > 0 AND cardinality(chosen) < most LOOP
            room := least(lanes_left, most - cardinality(chosen));
            WITH RECURSIVE visited (lane) AS (
                SELECT at_lane
                UNION ALL
                SELECT (
                    SELECT d.lane FROM oncegate.delivery d
                    WHERE d.origin = of_origin AND d.dead_until IS NULL AND d.lane < v.lane
                    ORDER BY d.lane DESC, d.sequence DESC LIMIT 1
                )
                FROM visited v WHERE v.lane IS NOT NULL
            )
            SELECT count(*), min(f.lane), coalesce(array_agg(f.id) FILTER (WHERE f.id IS NOT NULL), '{}')
            INTO seen, next_lane, of_lanes
            FROM (
                SELECT v.lane, (
                    SELECT e.id FROM (
                        SELECT d.id, d.due, d.held_until, d.lane, d.sequence FROM oncegate.delivery d
                        WHERE d.origin = of_origin AND (d.lane, d.sequence) >= (v.lane, v.first) AND d.lane <= v.lane
                            AND d.dead_until IS NULL
                        ORDER BY d.lane, d.sequence LIMIT depth
                    ) e
                    WHERE e.due <= at AND e.held_until <= at AND e.id <> ALL (chosen) ORDER BY e.lane, e.sequence LIMIT 1
                ) AS id
                FROM (
                    SELECT l.lane, coalesce((
                        SELECT least_sequence FROM oncegate.delivery d
                        WHERE d.origin = of_origin AND (d.lane, d.sequence) >= (l.lane, least_sequence) AND d.lane <= l.lane
                            AND d.dead_until IS NULL
                        ORDER BY d.lane, d.sequence LIMIT 1
                    ), lowest) AS first
                    FROM (SELECT lane FROM visited OFFSET 1 LIMIT room) l
                    WHERE l.lane IS NOT NULL OFFSET 0
                ) v
            ) f;
            chosen := chosen || of_lanes;
            lanes_left := lanes_left - seen;
            at_lane := coalesce(next_lane, at_lane);
            IF seen < room THEN
                EXIT WHEN has_wrapped;
                has_wrapped := true;
                at_lane := highest;
            END IF;
        END LOOP;
        chosen := chosen || ARRAY(
            SELECT a.id FROM unnest(by_age) WITH ORDINALITY AS a (id, place)
            WHERE a.id <> ALL (chosen) ORDER BY a.place LIMIT most - cardinality(chosen)
        );
    END IF;
    RETURN QUERY
    WITH free AS MATERIALIZED (
        SELECT d.ctid AS place, d.due, d.sequence, octet_length(d.body) + octet_length(d.request) AS size
        FROM oncegate.delivery d
        WHERE d.id = ANY (chosen) AND d.dead_until + 0 IS NULL AND d.due + 0 <= at AND d.held_until <= at
        FOR UPDATE SKIP LOCKED
    ), fitting AS MATERIALIZED (
        SELECT s.place FROM (
            SELECT f.place, sum(f.size) OVER (ORDER BY f.due, f.sequence) - f.size AS before FROM free f
        ) s WHERE s.before < most_bytes
    ), taken AS (
        UPDATE oncegate.delivery d SET held_until = oncegate.after_v1(at, hold)
        WHERE d.ctid = ANY (ARRAY(SELECT f.place FROM fitting f))
        RETURNING d.*
    )
    SELECT t.id, t.token, t.sequence, t.lane, t.accepted_at, t.queued_at, t.held_until, t.attempts, t.head, t.note,
        t.request, t.body, at, false, at_lane, NULL::bigint
    FROM taken t;
    GET DIAGNOSTICS seen = ROW_COUNT;
    RETURN QUERY
    SELECT NULL::bytea, NULL::bytea, seen_sequence, NULL::bigint, NULL::bigint, NULL::bigint, seen_due, NULL::int,
        NULL::bytea, NULL::bytea, NULL::bytea, NULL::bytea, at, is_crowded OR seen < cardinality(chosen), at_lane, (
            SELECT d.due FROM oncegate.delivery d
            WHERE d.origin = of_origin AND d.dead_until IS NULL AND d.due > at ORDER BY d.due LIMIT 1
        );
END $$;

-- As before, by what is above.
CREATE OR REPLACE FUNCTION oncegate.take_due_v1(
    of_origin bigint, most bigint, most_bytes bigint, hold bigint, is_ordered boolean, after_lane bigint
)
RETURNS TABLE (
    id bytea, token bytea, sequence bigint, lane bigint, accepted_at bigint, queued_at bigint, due bigint, attempts int,
    head bytea, note bytea, request bytea, body bytea, now bigint, is_more boolean, last_lane bigint, next_due bigint
)
LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT * FROM oncegate.take_due_v2(of_origin, most, most_bytes, hold, is_ordered, after_lane, NULL, NULL)
$$;

-- As before; `until` is what a take of either kind gave as `due`.
CREATE FUNCTION oncegate.change_delivery_v2(
    of_id bytea, of_token bytea, until bigint, kind smallint, span bigint, is_attempt boolean, new_note bytea
)
RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan SET lock_timeout = '2s'
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    at bigint := oncegate.now_v1();
BEGIN
    PERFORM oncegate.durably_v1();
    IF kind = 0 THEN
        DELETE FROM oncegate.delivery d WHERE d.id = of_id AND d.token = of_token;
    ELSIF kind = 1 THEN
        UPDATE oncegate.delivery d SET due = oncegate.after_v1(at, span), held_until = 0,
            attempts = d.attempts + is_attempt::int, note = coalesce(new_note, d.note)
        WHERE d.id = of_id AND d.token = of_token AND until IN (d.held_until, d.due + 0) AND d.dead_until + 0 IS NULL;
    ELSE
        UPDATE oncegate.delivery d SET dead_until = oncegate.after_v1(at, span), held_until = 0,
            attempts = d.attempts + is_attempt::int, note = new_note
        WHERE d.id = of_id AND d.token = of_token AND until IN (d.held_until, d.due + 0) AND d.dead_until + 0 IS NULL;
    END IF;
    RETURN FOUND;
END $$;

CREATE OR REPLACE FUNCTION oncegate.change_delivery_v1(
    of_id bytea, of_token bytea, held_until bigint, kind smallint, span bigint, is_attempt boolean, new_note bytea
)
RETURNS boolean
LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT oncegate.change_delivery_v2($1, $2, $3, $4, $5, $6, $7)
$$;

-- As before, but without a join: after an ANALYZE of a queue that was short at that moment, the planner read the index of all ids
-- to join them, with those of the rows that were removed since the last vacuum.
CREATE OR REPLACE FUNCTION oncegate.finish_deliveries_v1(ids bytea[], tokens bytea[])
RETURNS SETOF bytea
LANGUAGE plpgsql
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan SET jit = off SET lock_timeout = '2s'
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM oncegate.durably_v1();
    RETURN QUERY
    DELETE FROM oncegate.delivery d WHERE d.id = ANY (ids) AND d.token = tokens[array_position(ids, d.id)]
    RETURNING d.id;
END $$;

-- As before, but what was kept is looked up once.
CREATE OR REPLACE FUNCTION oncegate.accept_v1(
    ids bytea[], tokens bytea[], origins bigint[], lanes bigint[], heads bytea[], requests bytea[], bodies bytea[]
)
RETURNS TABLE (id bytea, found smallint)
LANGUAGE plpgsql
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan SET jit = off SET lock_timeout = '2s'
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    at bigint := oncegate.now_v1();
    kept bytea[];
    recorded bytea[];
BEGIN
    PERFORM oncegate.durably_v1();
    WITH inserted AS (
        INSERT INTO oncegate.delivery AS d (id, token, origin, lane, accepted_at, queued_at, due, head, request, body)
        SELECT a.id, a.token, a.origin, a.lane, at, at, at, a.head, a.request, a.body
        FROM unnest(ids, tokens, origins, lanes, heads, requests, bodies)
            AS a (id, token, origin, lane, head, request, body)
        ON CONFLICT (id) DO NOTHING
        RETURNING d.id
    )
    SELECT coalesce(array_agg(i.id), '{}') INTO kept FROM inserted i;
    IF cardinality(kept) = 0 THEN
        -- What stands may be on this server's disk only.
        PERFORM oncegate.flush_v1();
    END IF;
    -- In a statement of its own, which sees what was committed meanwhile: a delivery is removed after its record has its
    -- end, so that the record of one that was there when this began is there now.
    SELECT coalesce(array_agg(a.id), '{}') INTO recorded FROM unnest(ids) AS a (id)
    WHERE EXISTS (
        SELECT FROM oncegate.record r
        WHERE r.id = ANY (ARRAY[a.id]) AND (r.state + 0 = 0 OR r.expires_at > at) OFFSET 0
    );
    IF recorded && kept THEN
        DELETE FROM oncegate.delivery d WHERE d.id = ANY (recorded) AND d.id = ANY (kept);
    END IF;
    RETURN QUERY
    SELECT a.id, CASE
        WHEN a.id = ANY (recorded) THEN 2::smallint
        WHEN a.id = ANY (kept) THEN 0::smallint
        WHEN (SELECT d.token FROM oncegate.delivery d WHERE d.id = ANY (ARRAY[a.id]) OFFSET 0) = a.token THEN 0::smallint
        ELSE 1::smallint
    END
    FROM unnest(ids, tokens) AS a (id, token);
END $$;

REVOKE ALL ON FUNCTION oncegate.take_due_v2, oncegate.change_delivery_v2 FROM PUBLIC;

-- Who runs the older functions runs these now.
DO $$
DECLARE
    grantee name;
BEGIN
    FOR grantee IN
        SELECT r.rolname FROM pg_proc p CROSS JOIN LATERAL aclexplode(p.proacl) a JOIN pg_roles r ON r.oid = a.grantee
        WHERE p.oid = 'oncegate.take_due_v1'::regproc AND a.privilege_type = 'EXECUTE'
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION oncegate.take_due_v2, oncegate.change_delivery_v2 TO %I', grantee);
    END LOOP;
END $$;
