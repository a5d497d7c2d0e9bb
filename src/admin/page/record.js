// One record: what it is, its story, and what an operator can do about it. GET /api/v1/records/ID and /api/v1/audit?record=ID.

import { Problem, ask, query } from "/page/api.js";
import { detail, reasonOf } from "/page/audit.js";
import { change } from "/page/dialog.js";
import { asOf, bytes, code, duration, facts, h, problem, put, refuse, shortId, stateWord, time } from "/page/dom.js";

const WHOLE = /^[0-9a-fA-F]{64}$/;

const BECAUSE = {
  "lease-expired": "its gate ended, or could not reach the store in time", "shutdown": "its gate was stopped while it ran", "timeout": "the upstream did not answer in time",
  "broken": "the upstream broke off", "not-recorded": "an older release held it and did not note why",
  "unreadable": "this gate cannot read the record",
};

const unreadable = (record) => record.unreadable_because === "encrypted" ? "The record is encrypted, and no key of this gate opens it." : "A later version of oncegate wrote the record, and this one cannot read it.";

export function record({ id, gate, signal, announce, say, again }) {
  const place = h("div", {}, h("p", { class: "quiet" }, "Asking for the record."));
  const element = h("section", {}, h("h1", {}, "Record"), h("p", { class: "mono" }, id), place);
  const title = `Record ${id.slice(0, 12)}`;
  let revealed = null, wholeKey = null;
  const alter = (kind, record, opener) => change(opener, about(kind, record), { element, load, say, signal });

  async function load() {
    if (!WHOLE.test(id)) {
      put(place, h("p", {}, "This is no whole id. ", h("a", { href: `#/records${query({ id })}` }, "Search for records that begin with it.")));
      return;
    }
    const [found, log] = await Promise.allSettled([ask(`/api/v1/records/${id}`, { signal }), ask(`/api/v1/audit${query({ record: id, limit: 200 })}`, { signal })]);
    if (signal.aborted) return;
    const entries = log.status === "fulfilled" ? log.value.entries : [];
    const missing = log.status === "fulfilled" ? null : h("p", { class: "wrong" }, `The audit log cannot be read: ${log.reason.message}`);
    if (found.status === "fulfilled") show(found.value, entries, missing);
    else if (found.reason instanceof Problem && found.reason.status === 404) await gone(entries, missing);
    else put(place, problem(found.reason));
  }

  function show(record, entries, missing) {
    const { isOperator } = gate;
    const reveal = (label, run) => h("button", { type: "button", onclick: run }, label, h("span", { class: "hint" }, "The audit log says that you read it."));
    const offers = isOperator ? [
      record.state === "unknown" ? h("button", { type: "button", class: "main", id: "resolve", onclick: event => alter("resolve", record, event.currentTarget) }, "Resolve …") : null,
      h("button", { type: "button", class: "danger", id: "purge", onclick: event => alter("purge", record, event.currentTarget) }, "Purge …"),
    ] : [];
    put(place,
      h("div", { class: `note ${record.state === "unknown" ? "warn" : ""}` }, h("p", {}, stateWord(record.state)), h("p", {}, sentence(record))),
      offers.length > 0 ? h("div", { class: "buttons" }, offers) : h("p", { class: "quiet" }, "Your token is a viewer's: nothing can be changed, and keys and answers are not shown."),
      h("h2", {}, "Story"), story(record, entries, gate), missing,
      h("p", { class: "quiet" }, asOf(gate)),
      h("p", { class: "quiet" }, "The record keeps no replays: they are counted for each route. The log of the gate has a line for each request."),
      h("h2", {}, "Details"),
      facts([["Route", record.route], ["Namespace", record.namespace === record.route ? null : record.namespace], ["Service", record.service], ["Upstream", record.upstream],
        ["Request", code(`${record.method ?? "?"} ${record.path ?? "?"}`)], ["Key", isOperator ? code(wholeKey ?? record.key ?? "not readable") : "not shown to a viewer"],
        ["Caller", code(record.caller)], ["Fingerprint", code(record.fingerprint)], ["Claimed by request", code(record.request)], ["Trace", code(record.trace_id)],
        ["Answer", record.status ? `${record.status}, ${record.content_type ?? "no type"}, ${record.body_bytes === null ? "its body is not kept" : bytes(record.body_bytes)}` : null],
        ["Lease until", time(record.lease_until, gate, true)], ["Expires", time(record.expires_at, gate, true)],
        ["Orphaned", record.orphaned ? "The rules for keys changed: no request can find it any more." : null], ["Unreadable", record.unreadable ? `${unreadable(record)} Its key is never run again.` : null]]),
      isOperator && record.state === "completed" && revealed === null ? h("div", { class: "buttons" }, reveal("Show the answer", () => see("answer"))) : null,
      revealed,
      isOperator && record.keeps_key && wholeKey === null ? h("div", { class: "buttons" }, reveal("Show the whole key", () => see("key"))) : null);
  }

  // It may be an accepted request, which has a record only from its first attempt on.
  async function gone(entries, missing) {
    let accepted;
    try {
      [accepted] = (await ask(`/api/v1/deliveries${query({ id, limit: 1 })}`, { signal })).deliveries;
    } catch (error) {
      if (!signal.aborted) put(place, problem(error));
      return;
    }
    put(place, accepted ? waiting(accepted)
      : h("div", { class: "note" }, h("p", {}, "There is no record with this id: it was never there, it has expired, or it was released or purged. Its key is free.")),
      h("h2", {}, "Story"), entries.length > 0 ? story(null, entries, gate) : h("p", {}, "The audit log has nothing about it."), missing, h("p", { class: "quiet" }, asOf(gate)));
  }

  function waiting(accepted) {
    const isDead = accepted.state === "dead";
    return [h("div", { class: `note ${isDead ? "warn" : ""}` }, h("p", {}, stateWord(accepted.state)),
      h("p", {}, isDead ? "It is an accepted request that was given up, and it has no record. The gate does not deliver it by itself. Its key is not free."
        : "It is an accepted request that waits for its delivery. It has no record until an attempt begins. Its key is not free."),
      h("p", {}, h("a", { href: `#/deliveries${query({ id: accepted.id })}` }, isDead ? "Retry it among the deliveries" : "Show it among the deliveries"))),
    facts([["Route", accepted.route], ["Request", code(`${accepted.method ?? "?"} ${accepted.path ?? "?"}`)], ["Key", gate.isOperator ? code(accepted.key ?? "not readable") : "not shown to a viewer"],
      ["Accepted", time(accepted.accepted_at, gate)], ["Due", time(accepted.due_at, gate, true)], ["Expires", time(accepted.expires_at, gate, true)], ["Attempts", accepted.attempts], ["Reason", accepted.reason]])];
  }

  // What only an operator who asks for it sees.
  async function see(what) {
    try {
      const record = await ask(`/api/v1/records/${id}?${what}=true`, { signal });
      if (what === "key") {
        wholeKey = record.key ?? "not readable";
        announce("The key is shown under Details, as far as the record keeps it.");
      } else {
        revealed = answer(record.answer);
        announce("The answer is shown under Details.");
      }
    } catch (error) {
      if (signal.aborted) return;
      revealed = problem(error);
    }
    await load();
    element.querySelector("h1").focus();
  }

  load();
  return { title, element, reload: () => { again(); } };
}

// What a retry of its request gets.
function sentence(record) {
  if (record.unreadable) return `${unreadable(record)} A retry gets 503, and never runs.`;
  if (record.state === "completed") return record.body_bytes === null || record.body_bytes === undefined ? `Its answer is ${record.status}. The body is not kept: a retry gets 409 response-not-stored.`
    : `Its answer is ${record.status}. A retry gets the same answer again, and does not run.`;
  if (record.state === "in-flight") return "The attempt runs. A retry waits or gets 409 in-flight, and does not run.";
  return "Nobody knows whether the upstream did it. Unless the route's recovery says otherwise, a retry gets 409 outcome-unknown and does not run. Find out at the upstream what became of it, then resolve it.";
}

function story(record, entries, gate) {
  const events = [];
  const add = (at, what, more, kind) => events.push({ at, what, more, kind, nth: events.length });
  const before = entries.find(({ before }) => before?.claimed_at)?.before;
  if (record) {
    add(record.claimed_at, "Claimed", `by request ${record.request ?? "?"}. The claim is durable from here on: no other request with this key runs.`);
    add(record.claimed_at, "Forwarded", `to the upstream ${record.upstream ?? "?"}.`);
    if (record.state === "in-flight") add(null, "The attempt runs", `Its lease is renewed while it does; now it ends ${record.lease_until ? `at ${record.lease_until}` : "?"}.`, "later");
    if (record.state === "unknown") add(record.unknown_since, "The outcome turned unknown", `Why: ${record.unknown_because ?? "?"}${BECAUSE[record.unknown_because] ? `, ${BECAUSE[record.unknown_because]}` : ""}.`);
    const resolved = entries.find(entry => entry.action.endsWith("resolve") && entry.resolution === "complete" && entry.outcome === "done" && entry.before?.request === record.request);
    if (record.state === "completed" && !resolved) add(null, "Settled", `with ${record.status ?? "?"}. The record does not say when, nor who gave the answer: the upstream, or an operator who resolved many records at once.`);
    if (record.state !== "in-flight") add(record.expires_at, "Expires", "Then the record is removed, and the key is free.", "later");
  } else if (before) add(before.claimed_at, "Claimed", `by request ${before.request ?? "?"}.`);
  const words = { "resolve": "Resolved", "purge": "Purged", "read-answer": "The answer was read", "read-key": "The whole key was read" };
  for (const entry of [...entries].reverse())
    add(entry.at, words[entry.action] ?? entry.action, [`by ${entry.by}`, entry.outcome === "done" ? "" : `outcome: ${entry.outcome}`, detail(entry), reasonOf(entry, true) ? `reason: ${reasonOf(entry, true)}` : ""].filter(part => part).join("; "));
  // What has no time stands after what came before it.
  let last = "";
  for (const event of events) last = event.sort = event.at ?? last;
  events.sort((a, b) => a.sort < b.sort ? -1 : a.sort > b.sort ? 1 : a.nth - b.nth);
  return h("ol", { class: "story" }, events.map(({ at, what, more, kind }) => h("li", { class: kind },
    h("p", {}, h("strong", {}, what), at ? [" – ", time(at, gate, kind === "later")] : null), h("p", {}, more))));
}

function answer(whole) {
  if (!whole) return h("p", {}, "The answer is not kept.");
  let text = "The body is not kept.";
  if (whole.body_base64 !== null) {
    const raw = Uint8Array.from(atob(whole.body_base64), character => character.charCodeAt(0));
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(raw);
    } catch {
      text = `${bytes(raw.length)} that are not text.`;
    }
  }
  return h("section", {}, h("h3", {}, "The answer"), h("pre", {}, whole.headers.map(([name, value]) => `${name}: ${value}`).join("\n")), h("pre", {}, text));
}

const ACTS = {
  release: { name: "Release the key", what: "The record is removed. The next request with this key runs at the upstream, as if there had been none. On a route that accepts requests, the request is dead until you retry it under Deliveries. Do this only if the first attempt had no effect.", done: id => `Released: the key of record ${id} is free. A request that was accepted waits under Deliveries.` },
  complete: { name: "Complete the record", what: "Every retry gets the answer below, and nothing runs. Do this if the attempt took effect.", done: id => `Completed: retries get the answer of record ${id}.` },
  purge: { name: "Purge the record", what: "The record is removed. Its answer is lost, and the next request with this key runs at the upstream.", done: id => `Purged: the key of record ${id} is free.` },
};

// What the dialog asks, shows and does about a record.
function about(kind, record) {
  const choice = (value, text) => h("label", { class: "check" }, h("input", { type: "radio", name: "action", value, required: true, onchange: choose }), text);
  const status = h("input", { id: "status", type: "number", min: "200", max: "599", value: "200", required: true });
  const headers = h("textarea", { id: "headers", spellcheck: "false" }, record.grpc ? "grpc-status: 0" : "Content-Type: application/json");
  const body = h("textarea", { id: "body", spellcheck: "false" });
  const given = h("fieldset", { hidden: true, disabled: true }, h("legend", {}, "The answer that retries get"),
    h("label", { for: "status" }, "Status"), status, h("label", { for: "headers" }, "Headers", h("span", { class: "hint" }, "one a line, as Name: value")), headers,
    h("label", { for: "body" }, "Body", h("span", { class: "hint" }, record.grpc ? "leave it empty: the API takes the messages of a gRPC call" : "text, sent as UTF-8")), body);
  const short = shortId(record.id);
  let action = kind === "purge" ? "purge" : null, match;

  function choose(event) {
    action = event.target.value;
    given.hidden = given.disabled = action !== "complete";
  }

  function lines() {
    return headers.value.split("\n").map(line => line.trim()).filter(line => line !== "").map(line => {
      const at = line.indexOf(":");
      return at < 1 ? null : [line.slice(0, at).trim(), line.slice(at + 1).trim()];
    });
  }

  function isRight() {
    if (action !== "complete" || !lines().includes(null)) return true;
    refuse(headers, "Each line must be Name: value.");
    return false;
  }

  async function look(reason) {
    const fresh = await ask(`/api/v1/records/${record.id}`);
    const { name, what } = ACTS[action];
    match = fresh.etag;
    return { name, isDanger: action !== "complete",
      changed: fresh.etag === record.etag ? null
        : `The record changed since you opened it: ${fresh.state === record.state ? "another attempt claimed it" : `it was ${record.state}, and is ${fresh.state} now`}.`,
      parts: [h("p", { class: "say" }, what),
        fresh.state === "in-flight" ? h("p", { class: "wrong" }, "Its attempt still runs and is not stopped: a retry may run beside it.") : null,
        facts([["Record", code(fresh.id)], ["State", stateWord(fresh.state)], ["Route", fresh.route], ["Request", code(`${fresh.method ?? "?"} ${fresh.path ?? "?"}`)], ["Key", code(fresh.key)],
          ["Claimed", `${duration(fresh.age_seconds)} ago`], ["Action", name], ["Reason", reason]]),
        action === "complete" ? h("pre", {}, `${status.value}\n${lines().map(pair => pair.join(": ")).join("\n")}\n\n${body.value}`) : null] };
  }

  async function act(reason) {
    if (action === "purge") await ask(`/api/v1/records/${record.id}${query({ reason })}`, { method: "DELETE", match });
    else await ask(`/api/v1/records/${record.id}/resolve`, { method: "POST", match, body: { action, reason,
      ...(action === "complete" ? { status: Number(status.value), headers: lines(), body_base64: base64(body.value) } : {}) } });
    return ACTS[action].done(short);
  }

  const fields = kind === "purge" ? h("p", {}, ACTS.purge.what) : [h("fieldset", {}, h("legend", {}, "What became of the attempt?"),
    choice("release", "It had no effect: release the key, and a retry runs."), choice("complete", "It took effect: complete the record with an answer.")), given];
  return { title: `${kind === "purge" ? "Purge" : "Resolve"} record ${short}?`, fields, isRight, look, act };
}

function base64(text) {
  const raw = new TextEncoder().encode(text);
  let binary = "";
  for (let at = 0; at < raw.length; at += 4096) binary += String.fromCharCode(...raw.subarray(at, at + 4096));
  return btoa(binary);
}
