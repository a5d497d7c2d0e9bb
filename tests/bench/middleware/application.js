// An application with a middleware for Idempotency-Key, as teams write it: the key is claimed by an INSERT, the answer is
// written beside it, and a retry gets it again. As the gate does, it commits twice for a new key and compares the request.
// What it lacks: leases, so that a key whose process died stays claimed; waiting; outcomes; a bound on memory.
//
// Arguments: the port to listen on, the port that tells how often the handler ran, and the URL of the database.

const crypto = require("node:crypto");
const http = require("node:http");
const express = require("express");
const { Pool } = require("pg");

const [port, runsPort, database] = process.argv.slice(2);
const pool = new Pool({ connectionString: database, max: 32 });
let runs = 0;

const CLAIM = "INSERT INTO idempotency (caller, key, fingerprint) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING";
const FIND = "SELECT fingerprint, status, headers, body FROM idempotency WHERE caller = $1 AND key = $2";
const SETTLE = "UPDATE idempotency SET status = $3, headers = $4, body = $5 WHERE caller = $1 AND key = $2";

function problem(response, status, code) {
  response.status(status).set("Idempotency-Status", code).type("application/problem+json").send({ status, code });
}

async function idempotent(request, response, next) {
  const key = request.get("Idempotency-Key");
  if (!key) return next();
  const caller = crypto.createHash("sha256").update(request.get("Authorization") ?? "").digest();
  const fingerprint = crypto.createHash("sha256").update(`${request.method} ${request.path}\n`).update(request.body).digest();
  const claimed = await pool.query({ name: "claim", text: CLAIM, values: [caller, key, fingerprint] });
  if (claimed.rowCount === 0) {
    const { rows: [found] } = await pool.query({ name: "find", text: FIND, values: [caller, key] });
    if (!found || !found.fingerprint.equals(fingerprint)) return problem(response, 422, "key-reused");
    if (found.status === null) return problem(response.set("Retry-After", "1"), 409, "in-flight");
    return response.status(found.status).set(found.headers).set("Idempotency-Status", "replayed").send(found.body);
  }
  const send = response.send.bind(response);
  response.send = body => {
    response.send = send;
    const bytes = Buffer.isBuffer(body) ? body : Buffer.from(body);
    const values = [caller, key, response.statusCode, response.getHeaders(), bytes];
    pool.query({ name: "settle", text: SETTLE, values }).then(() => response.set("Idempotency-Status", "executed").send(bytes), next);
    return response;
  };
  next();
}

const application = express();
application.disable("x-powered-by").disable("etag");
application.post("/v1/charges", express.raw({ type: () => true }), idempotent, (_, response) => {
  runs += 1;
  response.status(201).set({
    "Content-Type": "application/json", Location: "/v1/charges/ch_1QyT5k2eZvKYlo2C", "Cache-Control": "no-store", "X-Request-Id": "req_8f2b1c4d",
  }).send('{"id":"ch_1QyT5k2eZvKYlo2C","object":"charge","amount":1000,"currency":"eur","status":"succeeded"}');
});

const TABLE = `CREATE TABLE IF NOT EXISTS idempotency (
  caller bytea NOT NULL, key text NOT NULL, fingerprint bytea NOT NULL,
  status int, headers jsonb, body bytea, created_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (caller, key)
)`;
pool.query(TABLE).then(() => {
  http.createServer((_, response) => response.end(`${runs}`)).listen(runsPort, "127.0.0.1");
  const server = http.createServer({ keepAliveTimeout: 60_000 }, application);
  server.listen({ port, host: "127.0.0.1", backlog: 4096 });
});
