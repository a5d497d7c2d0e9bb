// What the gate does now, and its routes. All figures are of GET /api/v1/stats, which the frame asks for.

import { ask } from "/page/api.js";
import { asOf, bar, bytes, code, count, duration, h, keyed, problem, put, rate, short, shortId, some, spark, table, time, write } from "/page/dom.js";

const REASONS = {
  "starting": "It starts.",
  "waiting-for-store-lock": "It waits for the SQLite file, which another process holds.",
  "waiting-for-store": "It waits for its store, which it could not reach since it started, or which does not take its configuration.",
  "waiting-for-token-keys": "It could not fetch the keys of tokens. Requests with a token get 503.",
  "store-unavailable": "Its store is away or cannot be written. Protected requests get 503, and nothing of them runs.",
  "draining": "It stops: it finishes what it has, and takes no more.",
};

export const reasonOf = stats => REASONS[stats.reason] ?? `The reason is ${stats.reason}.`;

const MEANINGS = {
  "executed": "ran at the upstream, and the answer is recorded", "replayed": "answered again from a record", "released": "ran, and the key is free again",
  "recovered": "an unknown outcome that the upstream explained", "unrecorded": "answered before it was durable", "unprotected": "the store was away, and the route fails open",
  "passed": "not protected", "ignored": "carried a key that no route protects", "observed": "forwarded and only observed", "accepted": "taken, to be delivered later",
  "refused": "the upstream did not let the caller have the recorded answer", "in-flight": "a retry while the attempt runs", "outcome-unknown": "an answer that leaves the outcome unknown, such as a 502 of the upstream, or a retry of such a request",
  "response-not-stored": "a retry whose answer was not kept", "key-reused": "a key that belongs to another request", "caller-differs": "a key of a caller with another proof",
  "key-missing": "the route requires a key", "key-invalid": "the key is not well-formed", "scope-missing": "a part of the scope is missing", "no-route": "no route matches",
  "upstream-unreachable": "nothing was sent", "upstream-broken": "the upstream broke off: the outcome is unknown", "upstream-timeout": "no answer in time: the outcome is unknown",
  "still-running": "the attempt runs on, longer than the client waits", "store-unavailable": "nothing was sent", "overloaded": "a limit is reached: nothing was sent", "quota-exceeded": "too many new keys",
  "request-expired": "too old to run", "bad-request": "malformed or ambiguous", "request-too-large": "its body is larger than the route allows", "request-timeout": "did not arrive in time",
  "headers-too-large": "its head is larger than is allowed", "expectation-failed": "an Expect that is not supported", "loop-detected": "has passed through this gate already",
  "credentials-unverifiable": "a token that cannot be verified",
};

// Outcomes that an operator should hear of while they happen.
const TROUBLE = {
  "upstream-unreachable": "The upstream cannot be reached. Nothing of these requests was sent.",
  "upstream-broken": "The upstream breaks off. The outcomes of these requests are unknown.",
  "upstream-timeout": "The upstream does not answer in time. The outcomes of these requests are unknown.",
  "outcome-unknown": "Requests end with an unknown outcome: the upstream answered 502 or 504, or they are retries of such requests.",
  "store-unavailable": "Requests are refused, since the store fails. Nothing of them was sent.",
  "overloaded": "Requests are refused, since a limit is reached. Nothing of them was sent.",
  "unprotected": "Requests run without protection, since the store fails and their route fails open.",
  "unrecorded": "Answers were given that are not durable yet.",
};

const UNITS = { max_buffered_memory: bytes, max_buffered_disk: bytes };

// What is wrong: { key, line }, and { href, link } where a view shows more.
function complaints(stats) {
  const found = [];
  const add = (key, line, href, link) => found.push({ key, line, href, link });
  if (!stats.ready) add("ready", `The gate is not ready. ${reasonOf(stats)}`);
  if (stats.store.away.length > 0) add("away", `A database of the store does not answer: ${stats.store.away.join(", ")}. Requests with its keys are refused, and counts lack its records.`);
  for (const [outcome, sentence] of Object.entries(TROUBLE)) {
    const now = stats.outcomes[outcome]?.per_second ?? 0;
    if (now > 0) add(outcome, `${sentence} There are ${rate(now)} a second.`);
  }
  for (const error of stats.store.errors)
    if (error.per_second > 0) add(`${error.store} ${error.op} ${error.kind}`, `The store fails at ${error.op}: ${error.kind}, ${rate(error.per_second)} a second.`);
  for (const { limit, used, max } of stats.limits)
    if (max > 0 && used >= 0.9 * max) add(limit, `The limit ${limit} is nearly reached: ${(UNITS[limit] ?? count)(used)} of ${(UNITS[limit] ?? count)(max)}.`);
  if (stats.deliveries?.dead > 0) add("dead", `Accepted requests were given up: ${count(stats.deliveries.dead)}.`, "#/deliveries?state=dead", "Show them");
  if (!stats.last_reload.successful) add("configuration", "The configuration was refused when it was last read. The gate goes on with the former one.");
  return found;
}

function tile(what) {
  const parts = { value: h("p", { class: "value" }, "–"), more: h("p", { class: "more" }, "\u00a0"), extra: h("div") };
  const element = h("li", { class: "tile" }, h("p", { class: "what" }, what), parts.value, parts.more, parts.extra);
  return {
    element,
    set: (value, more, state = "") => {
      write(parts.value, value);
      write(parts.more, more || "\u00a0");
      element.dataset.state = state;
    },
    extra: child => put(parts.extra, child),
  };
}

const sum = outcomes => Object.values(outcomes).reduce((all, { per_second }) => all + per_second, 0);
const history = [];

export function now() {
  const tiles = Object.fromEntries(["Requests a second", "Attempts in flight", "Waiting requests", "Latency, 95 of 100", "Unknown records", "Records", "Accepted requests"].map(what => [what, tile(what)]));
  const lines = h("ul"), wrong = h("div", { class: "note", id: "wrong" }, lines);
  const outcomes = table("Requests of this process. A rate is of the last seconds.", [{ name: "Outcome" }, { name: "a second", kind: "number" },
    { name: "part", kind: "bar" }, { name: "since the start", kind: "number" }, { name: "what it is" }], "No request has been answered yet.");
  const limits = table("How much of the limits is in use, and how often each was reached since the start.", [{ name: "Limit" }, { name: "in use", kind: "number" },
    { name: "of", kind: "number" }, { name: "part", kind: "bar" }, { name: "reached", kind: "number" }], "Not known yet.");
  const store = h("div");
  const unknown = h("a", { href: "#/records?state=unknown" }, "Show them");
  tiles["Unknown records"].extra(h("p", { class: "more" }, unknown));

  function tick(stats) {
    const all = sum(stats.outcomes);
    if (history.at(-1)?.at !== stats.at) history.push({ at: stats.at, all });
    if (history.length > 60) history.shift();
    tiles["Requests a second"].set(rate(all), `over the last ${Math.round(stats.rate_window_seconds)} s`);
    if (history.length > 1) tiles["Requests a second"].extra(spark(history.map(({ all }) => all)));
    tiles["Attempts in flight"].set(count(stats.attempts_in_flight), `requests in all: ${count(stats.requests_in_flight)}`);
    tiles["Waiting requests"].set(count(stats.requests_waiting), "for the attempt of another");
    const { latency } = stats;
    tiles["Latency, 95 of 100"].set(short(latency?.p95_seconds), latency ? `half: ${short(latency.p50_seconds)}, 99 of 100: ${short(latency.p99_seconds)}` : "no requests in the last minute");
    const oldest = stats.oldest_unknown, records = stats.records ?? {}, number = records.unknown, hasUnknown = Boolean(oldest) || number > 0;
    tiles["Unknown records"].set(count(number), oldest ? `the oldest for ${duration(oldest.age_seconds)}` : number > 0 ? "age not known" : number === 0 ? "none" : "", hasUnknown ? "warn" : "");
    const queued = stats.deliveries?.queued, waits = stats.oldest_delivery_seconds;
    tiles["Accepted requests"].set(count(queued), queued === 0 ? "none waits for its delivery" : typeof waits === "number" ? `the oldest waits for ${duration(waits)}` : "wait for their delivery");
    tiles.Records.set(count(records.completed), `completed; in flight: ${count(records["in-flight"])}`);

    const found = complaints(stats);
    wrong.classList.toggle("bad", found.length > 0);
    wrong.classList.toggle("warn", found.length === 0 && hasUnknown);
    const text = found.length > 0 ? found : [{ key: "nothing", line: "Nothing is wrong that this gate knows of." }];
    if (hasUnknown) text.push({ key: "unknown", line: `There are unknown outcomes. Somebody has to find out what became of them.${oldest ? ` The oldest is ${duration(oldest.age_seconds)} old:` : ""}`,
      href: oldest && `#/records/${oldest.id}`, link: oldest && shortId(oldest.id) });
    keyed(lines, text, () => h("li", {}, h("span"), " ", h("a")), (item, { line, href, link }) => {
      const [sentence, more] = item.children;
      write(sentence, line);
      write(more, link ?? "");
      more.href = href ?? "";
      more.hidden = !href;
    });

    const most = Math.max(...Object.values(stats.outcomes).map(({ per_second }) => per_second), 1e-9);
    outcomes.fill(Object.entries(stats.outcomes).sort(([a], [b]) => a < b ? -1 : 1).map(([word, { total, per_second }]) =>
      ({ key: word, cells: [word, rate(per_second), bar(per_second / most), count(total), MEANINGS[word] ?? ""] })));
    limits.fill(stats.limits.filter(({ max, reached }) => max !== undefined || reached > 0).map(({ limit, used, max, reached }) => {
      const unit = UNITS[limit] ?? count;
      return { key: limit, cells: [limit, max === undefined ? "" : unit(used), max === undefined ? "" : unit(max), bar(max ? used / max : 0), count(reached)] };
    }));
    const errors = stats.store.errors.map(({ op, kind, total, per_second }) => `${op}, ${kind}: ${count(total)} (${rate(per_second)} a second)`);
    const cache = Object.entries(stats.cache).map(([word, number]) => `${word} ${count(number)}`).join(", ");
    const lines2 = [["Store", stats.store.kind ?? "not open yet"], ["Errors of the store", errors.length === 0 ? "none since the start" : errors.join("; ")], ["Answers before the store is asked", cache],
      ["Configuration", `${stats.last_reload.successful ? "applied" : "refused"}, ${duration((Date.parse(stats.at) - Date.parse(stats.last_reload.at)) / 1000)} ago`]];
    if (store.firstChild) store.querySelectorAll("dd").forEach((line, nth) => write(line, lines2[nth][1]));
    else put(store, h("dl", { class: "facts" }, lines2.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
  }

  const element = h("section", {}, h("h1", {}, "Now"), wrong, h("ul", { class: "tiles", role: "list" }, Object.values(tiles).map(({ element }) => element)),
    h("h2", {}, "Requests by outcome"), outcomes.element, h("h2", {}, "Limits"), limits.element, h("h2", {}, "Store and configuration"), store);
  return { title: "Now", element, tick };
}

// GET /api/v1/routes and /api/v1/observed, when it is opened and when it is loaded again.
export function routes({ gate, signal, announce }) {
  const place = h("div"), age = h("p", { class: "quiet" }, "Asking for the routes.");
  let figures = null;

  async function reload() {
    try {
      const [{ routes }, observed] = await Promise.all([ask("/api/v1/routes", { signal }), ask("/api/v1/observed", { signal })]);
      show(routes, observed.routes);
      announce(some(routes.length, "route"));
    } catch (error) {
      if (!signal.aborted) put(place, problem(error));
    }
  }

  function show(configured, observed) {
    figures = table("Figures of this process; latency of the last minute.", [{ name: "Route" }, { name: "requests a second", kind: "number" }, { name: "replayed", kind: "number" },
      { name: "problems", kind: "number" }, { name: "attempts in flight", kind: "number" }, { name: "95 of 100 take", kind: "number" }, { name: "upstream", kind: "number" }, { name: "since the start", kind: "number" }], "No route is configured.");
    const policies = table("What is configured.", [{ name: "Route" }, { name: "mode" }, { name: "methods" }, { name: "path" }, { name: "host" }, { name: "upstream" }, { name: "answers are kept" }, { name: "records" }], "No route is configured.");
    policies.fill(configured.map(route => ({ key: route.name, cells: [route.name + (route.namespace === route.name ? "" : ` (namespace ${route.namespace})`), route.mode, route.methods.join(", "), () => code(route.path), route.host, route.upstream,
      duration(route.ttl_seconds), () => h("a", { href: `#/records?route=${encodeURIComponent(route.name)}`, "aria-label": `Records of ${route.name}` }, "Records")] })));
    const watched = observed.map(report => {
      const examples = table(`The newest keys of ${report.route} that ran again`, [{ name: "Request" }, { name: "key" }, { name: "first" }, { name: "again" }, { name: "would have got" }, { name: "the answers" }], "None.");
      examples.fill(report.examples.map((example, nth) => ({ key: `${nth}`, cells: [`${example.method} ${example.path}`, () => code(example.key ?? "not shown"), () => time(example.first_at), () => time(example.again_at), example.would, example.answer_differs ? "differ" : "are equal"] })));
      return h("section", {}, h("h3", {}, report.route), h("p", {}, `${some(report.requests, "request")} since `, time(report.since), `. Duplicates: ${count(report.duplicates)}. Keys that ran more than once: ${count(report.keys_run_again)}, `
        + `${count(report.keys_answered_differently)} of them with another answer.`), report.examples.length > 0 ? examples.element : null);
    });
    put(place, figures.element, h("h2", {}, "Policy"), policies.element, h("h2", {}, "Observed duplicates"),
      ...(watched.length > 0 ? watched : [h("p", {}, "No route has mode = \"observe\".")]));
    put(age, asOf(gate));
    tick(gate.stats);
  }

  const isProblem = word => !["executed", "replayed", "released", "recovered", "passed", "observed", "accepted"].includes(word);
  function tick(stats) {
    figures?.fill(stats.routes.map(route => {
      const of = test => Object.entries(route.outcomes).filter(([word]) => test(word)).reduce((all, [, { per_second }]) => all + per_second, 0);
      const total = Object.values(route.outcomes).reduce((all, { total }) => all + total, 0);
      return { key: route.route, cells: [route.route === "-" ? "no route" : route.route, rate(of(() => true)), rate(of(word => word === "replayed")), rate(of(isProblem)), count(route.attempts_in_flight),
        short(route.latency?.p95_seconds), short(route.upstream_latency?.p95_seconds), count(total)] };
    }));
  }

  reload();
  return { title: "Routes", tick, reload, element: h("section", {}, h("h1", {}, "Routes"), age, place) };
}
