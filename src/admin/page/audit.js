// What operators did: GET /api/v1/audit.

import { ask, query } from "/page/api.js";
import { choice, h, pager, put, recordLink, some, table, time } from "/page/dom.js";

const ACTIONS = ["resolve", "purge", "bulk-resolve", "bulk-purge", "bulk-retry", "reseal", "reload", "read-answer", "read-key", "accept-identity-change", "retry", "pause", "resume"];

// What an entry says besides who, when and why.
export function detail(entry) {
  const parts = [];
  if (entry.resolution) parts.push(`resolved as: ${entry.resolution}`);
  if (entry.route) parts.push(`route ${entry.route}`);
  if (entry.before?.state) parts.push(`it was ${entry.before.state}`);
  for (const name of ["matched", "done", "failed", "in_flight", "resealed", "unopened"]) if (entry[name] !== undefined && entry[name] !== null) parts.push(`${name} ${entry[name]}`);
  if (entry.filter) parts.push(`filter ${JSON.stringify(entry.filter)}`);
  return parts.join(", ");
}

export const reasonOf = (entry, isOperator) => entry.reason_unreadable ? "encrypted with a key that the gate does not have" : entry.reason ?? (isOperator ? "" : "not shown");

export function audit({ gate, parameters, signal, announce }) {
  const by = h("input", { id: "by-token", value: parameters.by ?? "", autocomplete: "off", "aria-keyshortcuts": "/" });
  const since = h("input", { id: "by-since", value: parameters.since ?? "", autocomplete: "off" });
  const record = h("input", { id: "by-record", value: parameters.record ?? "", autocomplete: "off", spellcheck: "false", pattern: "[0-9A-Fa-f]{64}", title: "64 hexadecimal digits" });
  const action = choice("by-action", ACTIONS, parameters.action);
  const found = table("Entries, newest first", [{ name: "When" }, { name: "who" }, { name: "action" }, { name: "outcome" }, { name: "record" }, { name: "reason" }, { name: "what" }], "No entry is found.");
  const filter = () => ({ by: by.value.trim(), since: since.value.trim(), record: record.value.trim(), action: action.value });
  let asked = filter();
  const pages = pager({ gate, signal, announce, show, read: cursor => ask(`/api/v1/audit${query({ ...asked, limit: 50, cursor })}`, { signal }) });
  put(pages.place, found.element, pages.buttons);

  function search(event) {
    event.preventDefault();
    asked = filter();
    pages.search(`#/audit${query(asked)}`);
  }

  function show({ entries }, where) {
    found.fill(entries.map(entry => ({ key: entry.id, cells: [() => time(entry.at, gate), `${entry.by}${entry.client ? ` from ${entry.client}` : ""}`, entry.action, entry.outcome ?? "",
      () => entry.record ? recordLink(entry.record) : "–", reasonOf(entry, gate.isOperator), detail(entry)] })));
    return `${some(entries.length, "entry", "entries")}${where}`;
  }

  const labelled = (input, text, hint) => h("div", {}, h("label", { for: input.id }, text, hint ? h("span", { class: "hint" }, hint) : null), input);
  const element = h("section", {}, h("h1", {}, "Audit"),
    h("form", { onsubmit: search, role: "search", "aria-label": "Audit" }, h("div", { class: "fields" }, labelled(by, "Who", "the name of the token"), labelled(action, "Action"),
      labelled(record, "Record", "its whole id"), labelled(since, "Since", "1h, or 2026-01-31T22:00:00Z")), h("div", { class: "buttons" }, h("button", { class: "main" }, "Search"))),
    pages.element);
  pages.load();
  return { title: "Audit", element, reload: pages.load, find: () => by.focus() };
}
