-- The rules that identities were made by, each from a time on, until the next ones of the namespace. Never removed: they
-- tell which records no request can find any more, and what the rules were that a start refuses to change.
--
-- What is on file now stays in oncegate.identity, which gates that run on the older schema read and write.

CREATE TABLE oncegate.rules_period (
    service text NOT NULL,
    namespace text NOT NULL,
    -- Milliseconds since 1970 by this server's clock; 0 is from the beginning.
    since bigint NOT NULL,
    digest bytea NOT NULL,
    -- Nothing where a gate that runs on the older schema adopted them.
    description text,
    PRIMARY KEY (service, namespace, since)
);
