-- A store spread over several databases: which of them this one is, and for which records it takes claims.
--
-- A store in a single database has no layout, and its tables none of the triggers here. Gates that run on the older schema
-- know nothing of it; where a layout is written, none of them starts any more.

CREATE TABLE oncegate.layout (
    -- The store that all of them are together, and the secret of its gates: those of the database that it began in.
    store bytea NOT NULL CHECK (length(store) = 16),
    secret bytea NOT NULL CHECK (length(secret) = 32),
    -- The databases by the ids in their tables oncegate.store, in the order of the list.
    members bytea[] NOT NULL,
    -- While records move: the databases of the list that they move to.
    target bytea[],
    -- Of this database, in the places of its entries and deliveries: no other of the list has it.
    number smallint NOT NULL CHECK (number BETWEEN 0 AND 63),
    -- There is one row.
    is_one boolean PRIMARY KEY DEFAULT true CHECK (is_one)
);

-- The ids that this database takes claims for. Of all databases of a store, one at most has an id: that is all that keeps
-- a request from running in two of them. An empty `first` is before every id, and nothing in `beyond` is after every id.
CREATE TABLE oncegate.owned (
    first bytea PRIMARY KEY,
    beyond bytea
);

-- The ranges that this database has given up and no other has taken over yet, as far as this one knows. Until something of one
-- was set aside, it can be taken back.
CREATE TABLE oncegate.handover (
    first bytea PRIMARY KEY,
    beyond bytea,
    is_aside boolean NOT NULL DEFAULT false
);

-- Those that are handed to another database: they have left the tables here, and may not have arrived there. Claims,
-- settlements and readers of this database do not find them.
CREATE TABLE oncegate.outgoing_record (LIKE oncegate.record INCLUDING STORAGE, PRIMARY KEY (id));
CREATE TABLE oncegate.outgoing_delivery (LIKE oncegate.delivery INCLUDING STORAGE, PRIMARY KEY (id));

-- Whoever writes a claim or accepts a delivery holds this lock together with others of its kind, until it has committed. A
-- range changes its owner under the exclusive one: so no claim is under way that saw what was owned before.
CREATE FUNCTION oncegate.fence_lock_v1() RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ('x' || left(encode(sha256('oncegate fence'), 'hex'), 16))::bit(64)::bigint;

CREATE FUNCTION oncegate.refuse_foreign_v1() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'OG002',
        MESSAGE = 'this database keeps no records of this part of the store',
        HINT = 'Records move, or have moved, to other databases: start the gates with the list of all of them.';
END $$;

-- Refuses a statement that has written what is another database's to write. A statement of a VOLATILE function sees what
-- was committed before it: the lock comes first, so that the owners that are read cannot change before this commits.
CREATE FUNCTION oncegate.fence_v1() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- Whoever moves records writes them before this database takes their ids over.
    IF current_setting('oncegate.is_moving', true) = 'on' THEN
        RETURN NULL;
    END IF;
    PERFORM pg_advisory_xact_lock_shared(oncegate.fence_lock_v1());
    -- The records by which gates find out whether they can write belong to no request, and may be in any database.
    PERFORM FROM written w
    WHERE substr(w.id, 1, 14) <> 'oncegate proof'::bytea AND NOT EXISTS (
        SELECT FROM oncegate.owned o WHERE w.id >= o.first AND (o.beyond IS NULL OR w.id < o.beyond)
    );
    IF FOUND THEN
        PERFORM oncegate.refuse_foreign_v1();
    END IF;
    RETURN NULL;
END $$;

-- The same for a claim that takes the place of a record.
CREATE FUNCTION oncegate.fence_row_v1() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(oncegate.fence_lock_v1());
    PERFORM FROM oncegate.owned o WHERE NEW.id >= o.first AND (o.beyond IS NULL OR NEW.id < o.beyond);
    IF NOT FOUND THEN
        PERFORM oncegate.refuse_foreign_v1();
    END IF;
    RETURN NEW;
END $$;

-- A place in the order of time that no other database of the list gives: milliseconds, then a number that this database
-- counts, then its own.
CREATE FUNCTION oncegate.place_v1(counted bigint) RETURNS bigint
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ SELECT (oncegate.now_v1() << 20) + ((counted & 16383) << 6) + l.number FROM oncegate.layout l $$;

CREATE FUNCTION oncegate.place_entry_v1() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- One that comes from another database keeps its place.
    IF current_setting('oncegate.is_moving', true) IS DISTINCT FROM 'on' THEN
        NEW.position := oncegate.place_v1(NEW.position);
    END IF;
    RETURN NEW;
END $$;

CREATE FUNCTION oncegate.place_delivery_v1() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF current_setting('oncegate.is_moving', true) IS DISTINCT FROM 'on' THEN
        NEW.sequence := oncegate.place_v1(NEW.sequence);
    END IF;
    RETURN NEW;
END $$;

-- Makes this database one of several. `oncegate migrate` calls it, as the owner of the tables: what owns nothing of
-- them can neither make the triggers nor be stopped by them.
CREATE FUNCTION oncegate.join_v1(
    of_store bytea, of_secret bytea, of_members bytea[], to_target bytea[], of_number smallint, from_id bytea, to_id bytea
)
RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM oncegate.durably_v1();
    PERFORM set_config('lock_timeout', '500ms', true);
    -- It waits until every claim under way has committed; those that follow meet it.
    CREATE TRIGGER fence_claims AFTER INSERT ON oncegate.record
        REFERENCING NEW TABLE AS written FOR EACH STATEMENT EXECUTE FUNCTION oncegate.fence_v1();
    -- Of what the gate does to a record that stands, this alone begins another attempt.
    CREATE TRIGGER fence_supersedes BEFORE UPDATE OF claimed_at ON oncegate.record
        FOR EACH ROW EXECUTE FUNCTION oncegate.fence_row_v1();
    CREATE TRIGGER fence_deliveries AFTER INSERT ON oncegate.delivery
        REFERENCING NEW TABLE AS written FOR EACH STATEMENT EXECUTE FUNCTION oncegate.fence_v1();
    CREATE TRIGGER place_deliveries BEFORE INSERT ON oncegate.delivery
        FOR EACH ROW EXECUTE FUNCTION oncegate.place_delivery_v1();
    CREATE TRIGGER place_entries BEFORE INSERT ON oncegate.audit
        FOR EACH ROW EXECUTE FUNCTION oncegate.place_entry_v1();
    INSERT INTO oncegate.layout (store, secret, members, target, number)
    VALUES (of_store, of_secret, of_members, to_target, of_number);
    IF from_id IS NOT NULL THEN
        INSERT INTO oncegate.owned (first, beyond) VALUES (from_id, to_id);
    END IF;
    -- A program that does not look for a layout would take this database for the whole store.
    UPDATE oncegate.migration SET compatible_with = 11 WHERE version = 11;
END $$;

-- Takes ids from what this database owns, if it owns all of them. When this has committed, none of them is claimed here.
CREATE FUNCTION oncegate.give_up_v1(from_id bytea, to_id bytea) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s'
AS $$
DECLARE
    held oncegate.owned;
BEGIN
    PERFORM oncegate.durably_v1();
    PERFORM pg_advisory_xact_lock(oncegate.fence_lock_v1());
    DELETE FROM oncegate.owned o
    WHERE o.first <= from_id AND (o.beyond IS NULL OR to_id IS NOT NULL AND to_id <= o.beyond)
    RETURNING * INTO held;
    IF held.first IS NULL THEN
        RETURN false;
    END IF;
    IF held.first < from_id THEN
        INSERT INTO oncegate.owned (first, beyond) VALUES (held.first, from_id);
    END IF;
    IF to_id IS NOT NULL AND (held.beyond IS NULL OR to_id < held.beyond) THEN
        INSERT INTO oncegate.owned (first, beyond) VALUES (to_id, held.beyond);
    END IF;
    INSERT INTO oncegate.handover (first, beyond) VALUES (from_id, to_id);
    RETURN true;
END $$;

-- Puts the records and deliveries of ids that were given up aside, once none of the records is in flight; false while one
-- is. An attempt that runs goes on, and ends here.
CREATE FUNCTION oncegate.set_aside_v1(from_id bytea, to_id bytea) RETURNS boolean
LANGUAGE plpgsql
SET enable_seqscan = off SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s'
AS $$
BEGIN
    PERFORM oncegate.durably_v1();
    -- What is owned cannot change meanwhile; claims go on.
    PERFORM pg_advisory_xact_lock_shared(oncegate.fence_lock_v1());
    PERFORM FROM oncegate.owned o
    WHERE (to_id IS NULL OR o.first < to_id) AND (o.beyond IS NULL OR o.beyond > from_id);
    IF FOUND THEN
        RAISE EXCEPTION 'these ids are still claimed here';
    END IF;
    PERFORM FROM oncegate.record r WHERE r.id >= from_id AND (to_id IS NULL OR r.id < to_id) AND r.state = 0 LIMIT 1;
    IF FOUND THEN
        RETURN false;
    END IF;
    -- From here on nobody takes it back, also where nothing is set aside because there is nothing.
    UPDATE oncegate.handover h SET is_aside = true
    WHERE (to_id IS NULL OR h.first < to_id) AND (h.beyond IS NULL OR h.beyond > from_id);
    WITH gone AS (
        DELETE FROM oncegate.delivery d WHERE d.id >= from_id AND (to_id IS NULL OR d.id < to_id) RETURNING d.*
    )
    INSERT INTO oncegate.outgoing_delivery SELECT * FROM gone;
    WITH gone AS (
        DELETE FROM oncegate.record r WHERE r.id >= from_id AND (to_id IS NULL OR r.id < to_id) RETURNING r.*
    )
    INSERT INTO oncegate.outgoing_record SELECT * FROM gone;
    RETURN true;
END $$;

-- Adds ids to what this database owns, as the last step of the transaction that wrote their records; false where it owns
-- some of them. When it has committed, the records are here and claims are taken.
CREATE FUNCTION oncegate.take_over_v1(from_id bytea, to_id bytea) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    at_first bytea := from_id;
    at_beyond bytea := to_id;
    joined oncegate.owned;
BEGIN
    PERFORM oncegate.durably_v1();
    PERFORM set_config('lock_timeout', '5s', true);
    PERFORM pg_advisory_xact_lock(oncegate.fence_lock_v1());
    PERFORM FROM oncegate.owned o
    WHERE (to_id IS NULL OR o.first < to_id) AND (o.beyond IS NULL OR o.beyond > from_id);
    IF FOUND THEN
        RETURN false;
    END IF;
    -- What was set aside here is on its way to another one.
    PERFORM FROM oncegate.outgoing_record r WHERE r.id >= from_id AND (to_id IS NULL OR r.id < to_id) LIMIT 1;
    IF FOUND THEN
        RETURN false;
    END IF;
    PERFORM FROM oncegate.outgoing_delivery d WHERE d.id >= from_id AND (to_id IS NULL OR d.id < to_id) LIMIT 1;
    IF FOUND THEN
        RETURN false;
    END IF;
    DELETE FROM oncegate.owned o WHERE o.beyond = from_id RETURNING * INTO joined;
    at_first := coalesce(joined.first, at_first);
    DELETE FROM oncegate.owned o WHERE o.first = to_id RETURNING * INTO joined;
    IF joined.first IS NOT NULL THEN
        at_beyond := joined.beyond;
    END IF;
    INSERT INTO oncegate.owned (first, beyond) VALUES (at_first, at_beyond);
    RETURN true;
END $$;

-- Takes ids back that were given up; false, and nothing changes, where they were not given up as one range, or where somebody
-- has begun to set them aside: then another database may own them already.
CREATE FUNCTION oncegate.take_back_v1(from_id bytea, to_id bytea) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s'
AS $$
BEGIN
    PERFORM oncegate.durably_v1();
    PERFORM pg_advisory_xact_lock(oncegate.fence_lock_v1());
    DELETE FROM oncegate.handover h
    WHERE h.first = from_id AND h.beyond IS NOT DISTINCT FROM to_id AND NOT h.is_aside;
    RETURN FOUND AND oncegate.take_over_v1(from_id, to_id);
END $$;

-- Whether this database takes claims for an id.
CREATE FUNCTION oncegate.owns_v1(of_id bytea) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN NOT EXISTS (SELECT FROM oncegate.layout) OR EXISTS (
        SELECT FROM oncegate.owned o WHERE of_id >= o.first AND (o.beyond IS NULL OR of_id < o.beyond)
    );
END $$;

REVOKE ALL ON oncegate.layout, oncegate.owned, oncegate.handover, oncegate.outgoing_record, oncegate.outgoing_delivery FROM PUBLIC;
REVOKE ALL ON FUNCTION oncegate.fence_lock_v1, oncegate.refuse_foreign_v1, oncegate.fence_v1, oncegate.fence_row_v1, oncegate.place_v1,
    oncegate.place_entry_v1, oncegate.place_delivery_v1, oncegate.join_v1, oncegate.give_up_v1, oncegate.set_aside_v1, oncegate.take_over_v1,
    oncegate.take_back_v1, oncegate.owns_v1 FROM PUBLIC;
