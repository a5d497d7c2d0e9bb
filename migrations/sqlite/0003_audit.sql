-- What operators did. An entry says the word for it, who, and to which record; the rest is the gate's own.
CREATE TABLE audit (
    position INTEGER PRIMARY KEY AUTOINCREMENT, -- never used again: it names the entry
    at INTEGER NOT NULL,                        -- milliseconds since the Unix epoch
    until INTEGER NOT NULL,                     -- when it expires
    service TEXT NOT NULL,
    action TEXT NOT NULL,
    by TEXT NOT NULL,
    record BLOB,                                -- 32 bytes; nothing where it is not about one record
    detail BLOB NOT NULL,
    reason BLOB                                 -- encrypted where the gate has keys
);

CREATE INDEX audit_expiry ON audit (until);
CREATE INDEX audit_record ON audit (record, position) WHERE record IS NOT NULL;
