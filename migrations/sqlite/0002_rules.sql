-- The rules that identities were made by, each from a time on, until the next ones of the namespace. Never removed: they
-- tell which records no request can find any more, and what the rules were that a start refuses to change.
CREATE TABLE rules_period (
    service TEXT NOT NULL,
    namespace TEXT NOT NULL,
    since INTEGER NOT NULL,          -- milliseconds since the Unix epoch; 0 is from the beginning
    digest BLOB NOT NULL,            -- 32 bytes, as in identity
    description TEXT,                -- nothing where an earlier version of oncegate adopted them
    PRIMARY KEY (service, namespace, since)
) WITHOUT ROWID;
