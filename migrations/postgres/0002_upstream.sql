-- What an upstream calls that shares the database: it settles inside its own transaction, together with its own writes.
--
-- Anybody may call these two. The token of the attempt is what gives the right, and only its upstream knows it; so no
-- message shows it. They run with the rights of the schema's owner, on a search path of their own.
--
-- An error that says that the attempt is not current has the SQLSTATE OG001, one about an argument 22023.

-- The token as bytes.
CREATE FUNCTION oncegate.token_v1(caller text, token text) RETURNS bytea
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF token IS NULL OR token = '' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('%s: there is no attempt', caller),
            HINT = 'Call it only for requests that carry the header Idempotency-Attempt. One without it is not protected.';
    END IF;
    IF token !~ '^[0-9A-Fa-f]{32}$' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('%s: the attempt is not 32 hexadecimal digits', caller),
            HINT = 'Pass the value of the header Idempotency-Attempt as it came.';
    END IF;
    RETURN decode(token, 'hex');
END $$;

-- The record that an attempt may still end, locked. In flight or unknown: it goes from the one to the other, never back,
-- so that looking in this order cannot miss it.
--
-- A plan that was made on an empty table may stay for as long as a session lives, and would read the whole of some other
-- index. Without sorting, only one index gives the order that is asked for; with `=` there would be nothing to order.
CREATE FUNCTION oncegate.current_v1(caller text, wanted bytea) RETURNS bytea
LANGUAGE plpgsql AS $$
DECLARE
    found_id bytea;
BEGIN
    SELECT r.id INTO found_id FROM oncegate.record r
    WHERE r.attempt BETWEEN wanted AND wanted AND r.state = 0 ORDER BY r.attempt LIMIT 1 FOR UPDATE;
    IF found_id IS NULL THEN
        SELECT r.id INTO found_id FROM oncegate.record r
        WHERE r.attempt BETWEEN wanted AND wanted AND r.state = 2 ORDER BY r.attempt LIMIT 1 FOR UPDATE;
    END IF;
    IF found_id IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'OG001',
            MESSAGE = format('%s: the attempt is not current: it has ended, or was superseded, released or purged', caller),
            HINT = 'Roll back, and do nothing for this request: its key has its answer, or is another attempt''s now.';
    END IF;
    RETURN found_id;
END $$;

-- The headers of an answer in their stored form, which the program's codec describes: how many, then each name and each
-- value behind its length. None where there are none.
CREATE FUNCTION oncegate.headers_v1(caller text, headers jsonb) RETURNS bytea
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    count int := 0;
    size int := 0;
    fields bytea := ''::bytea;
    line jsonb;
    name text;
    value text;
    raw bytea;
    wrong text;
BEGIN
    IF jsonb_typeof(headers) <> 'array' THEN
        wrong := 'the headers are not an array';
    ELSIF jsonb_array_length(headers) > 4096 THEN
        wrong := 'there are more than 4096 headers';
    ELSE
        FOR line IN SELECT given.line FROM jsonb_array_elements(headers) WITH ORDINALITY AS given (line, nth) ORDER BY nth
        LOOP
            count := count + 1;
            IF (jsonb_typeof(line) = 'array' AND jsonb_typeof(line -> 0) = 'string' AND jsonb_typeof(line -> 1) = 'string'
                AND line -> 2 IS NULL) IS NOT TRUE
            THEN
                wrong := format('header %s is not a pair of two strings', count);
                EXIT;
            END IF;
            name := lower((line ->> 0) COLLATE "C");
            -- White space around a value is not part of it (RFC 9110, 5.5).
            value := btrim(line ->> 1, ' ' || chr(9));
            IF name !~ '^[!#$%&''*+.^_`|~0-9a-z-]+$' COLLATE "C" OR length(name) > 65535 THEN
                -- It is not shown: it may be a value.
                wrong := format('header %s has a name that no header can have', count);
                EXIT;
            END IF;
            -- They speak of one connection or one message, not of the answer: what replays it writes its own.
            IF name IN ('connection', 'content-length', 'te', 'trailer', 'transfer-encoding', 'upgrade', 'keep-alive',
                'proxy-connection', 'proxy-authenticate', 'http2-settings')
            THEN
                wrong := format('header %s, %s, cannot be given: it is not part of an answer that is kept', count, name);
                EXIT;
            END IF;
            IF name IN ('idempotency-status', 'idempotent-replayed', 'idempotency-expires', 'idempotency-attempt',
                'idempotency-control')
            THEN
                wrong := format('header %s, %s, cannot be given: oncegate says it of an answer, or takes it out of one',
                    count, name);
                EXIT;
            END IF;
            -- Anything but control characters; a tab is none.
            IF value ~ '[\u0001-\u0008\u000a-\u001f\u007f]' COLLATE "C" THEN
                wrong := format('header %s, %s, has a value that no header can have', count, name);
                EXIT;
            END IF;
            raw := convert_to(value, 'UTF8');
            size := size + length(name) + octet_length(raw);
            IF size > 262144 THEN
                wrong := 'the headers are larger than 256 KiB';
                EXIT;
            END IF;
            fields := fields || int4send(length(name)) || convert_to(name, 'UTF8') || int4send(octet_length(raw)) || raw;
        END LOOP;
    END IF;
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('%s: %s', caller, wrong),
            HINT = 'Pass an array of [name, value] pairs, such as [["Content-Type", "application/json"]], or NULL.';
    END IF;
    RETURN int4send(count) || fields;
END $$;

-- An answer in its stored form.
CREATE FUNCTION oncegate.answer_v1(caller text, status int, headers jsonb, body bytea) RETURNS bytea
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    wrong text;
    hint text;
BEGIN
    IF status IS NULL OR status NOT BETWEEN 200 AND 599 THEN
        wrong := 'the status is not a number from 200 to 599';
        hint := 'Pass the status that a retry is to get.';
    ELSIF status IN (204, 205, 304) AND octet_length(body) > 0 THEN
        wrong := format('an answer with status %s has no body', status);
        hint := 'Pass NULL as the body, or another status.';
    ELSIF octet_length(body) > 67108864 THEN
        wrong := 'the body is larger than 64 MiB';
        hint := 'Answer with less, such as the address of what was made.';
    END IF;
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = format('%s: %s', caller, wrong), HINT = hint;
    END IF;
    -- Version 1, as it is; the status, with its usual phrase; the headers; and then what is no tombstone: no trailers,
    -- and the body.
    RETURN decode('0100', 'hex') || int2send(status::int2) || decode('00', 'hex') || oncegate.headers_v1(caller, headers)
        || decode('01', 'hex') || int4send(0) || coalesce(body, ''::bytea);
END $$;

-- Completes the record of an attempt with an answer, as part of the caller's transaction: retries get this answer once
-- that has committed, and the first client too, whatever the upstream says to it. Raises where the attempt is not
-- current, so that what else the transaction did is undone. An attempt completes once: the second call raises.
CREATE FUNCTION oncegate.complete(attempt text, status int, headers jsonb, body bytea) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on
SET enable_seqscan = off SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    token bytea := oncegate.token_v1('oncegate.complete', complete.attempt);
    stored bytea := oncegate.answer_v1('oncegate.complete', complete.status, complete.headers, complete.body);
    ended bytea;
    at bigint;
    waits boolean;
BEGIN
    PERFORM oncegate.durably_v1();
    ended := oncegate.current_v1('oncegate.complete', token);
    at := oncegate.now_v1();
    UPDATE oncegate.record r
    SET state = 1, expires_at = CASE
            WHEN oncegate.after_v1(r.claimed_at, r.ttl) > at THEN oncegate.after_v1(r.claimed_at, r.ttl)
            ELSE oncegate.after_v1(at, r.ttl)
        END,
        answer = stored
    WHERE r.id = ended
    RETURNING r.is_awaited INTO waits;
    IF waits THEN
        PERFORM oncegate.tell_v1(ended);
    END IF;
END $$;

-- Raises unless the attempt is current, and keeps it so until the caller's transaction ends: nobody ends or supersedes it
-- meanwhile, and where it is in flight it stays so, though its lease be past.
CREATE FUNCTION oncegate.assert_current(attempt text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on
SET enable_seqscan = off SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
    PERFORM oncegate.current_v1('oncegate.assert_current',
        oncegate.token_v1('oncegate.assert_current', assert_current.attempt));
END $$;

COMMENT ON FUNCTION oncegate.complete(text, int, jsonb, bytea) IS
    'Completes the attempt of the header Idempotency-Attempt with this answer when the transaction commits; headers are an array of [name, value] pairs. Raises OG001 where the attempt is not current.';
COMMENT ON FUNCTION oncegate.assert_current(text) IS
    'Raises OG001 unless the attempt of the header Idempotency-Attempt is current, and keeps it so until the transaction ends.';

REVOKE ALL ON FUNCTION
    oncegate.token_v1(text, text), oncegate.current_v1(text, bytea), oncegate.headers_v1(text, jsonb),
    oncegate.answer_v1(text, int, jsonb, bytea)
FROM PUBLIC;
GRANT EXECUTE ON FUNCTION oncegate.complete(text, int, jsonb, bytea), oncegate.assert_current(text) TO PUBLIC;
