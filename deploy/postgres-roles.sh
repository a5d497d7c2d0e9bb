#!/bin/sh
# For compose.yaml, whose paths and variables it knows. Runs once, when its database is made: one role for the gate and one for the upstream, in one database.
# Neither can read what the other keeps there.
set -eu

role() {
    psql --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" \
        --set role="$1" --set password="$(cat "/run/secrets/$1-password")" <<'SQL'
CREATE ROLE :"role" LOGIN PASSWORD :'password';
SQL
}

role oncegate
role payments
psql --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" <<SQL
-- The gate makes its schema itself (\`oncegate migrate\`), and lets everybody call what an upstream settles with.
GRANT CREATE ON DATABASE "$POSTGRES_DB" TO oncegate;
CREATE SCHEMA payments AUTHORIZATION payments;
SQL
