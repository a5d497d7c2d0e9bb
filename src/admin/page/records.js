// Searches records: GET /api/v1/records, a page at a time. Nothing is listed before it is asked for, but what a link names.

import { ask, query } from "/page/api.js";
import { choice, code, duration, h, pager, put, recordLink, some, stateWord, table } from "/page/dom.js";

const LIMIT = 50;
const OPEN = ["id", "state", "route", "older_than", "since"];
// What names a client stays out of the address, and so out of the history of the browser, which only has the number of a search.
// A key and a scope, by that number: Back finds them here.
export const kept = new Map();

export function records({ gate, parameters, signal, announce }) {
  const { isOperator } = gate;
  const former = kept.get(history.state?.search);
  // After a reload of the tab, and for another token, what is left of such a search is another question.
  const isCut = history.state?.isNamed && !former;
  const fields = {};
  const field = (name, label, hint, props = {}) => {
    const value = (OPEN.includes(name) ? parameters : former)?.[name] ?? "";
    fields[name] = h("input", { id: `by-${name}`, value, autocomplete: "off", spellcheck: "false", autocapitalize: "off", ...props });
    return h("div", {}, h("label", { for: `by-${name}` }, label, h("span", { class: "hint" }, hint)), fields[name]);
  };
  fields.state = choice("by-state", ["unknown", "in-flight", "completed"], parameters.state);
  const found = table("Records, newest first", [{ name: "Record" }, { name: "state" }, { name: "route" }, { name: "request" }, { name: "key" }, { name: "claimed" }], "No record is found.");
  const pages = pager({ gate, signal, announce, show,
    hint: isCut ? "The search was for a key or a scope, which this page does not keep. Enter it again." : "Search, or press Search for all records, newest first.",
    read: cursor => ask(`/api/v1/records${query({ ...filter, limit: LIMIT, cursor })}`, { signal, patience: 60000 }) }, former ? undefined : [null]);
  let filter = null;

  const given = () => Object.fromEntries(Object.entries(fields).map(([name, input]) => [name, input.value.trim()]));

  function search(event) {
    event?.preventDefault();
    filter = given();
    const number = Date.now(), { key, scope } = filter;
    kept.set(number, { key, scope });
    return pages.search(`#/records${query(Object.fromEntries(OPEN.map(name => [name, filter[name]])))}`, { search: number, isNamed: Boolean(key || scope) });
  }

  function show({ records, next }, where) {
    found.fill(records.map(record => ({ key: record.id, cells: [() => recordLink(record.id), () => stateWord(record.state), record.route ?? "–",
      `${record.method ?? ""} ${record.path ?? ""}`, () => record.key === null ? (isOperator ? "not readable" : "not shown") : code(record.key), `${duration(record.age_seconds)} ago`] })));
    put(pages.place, found.element, pages.buttons);
    return records.length === 0 && next !== null ? "Nothing on this page, but there are older records: go on with the next page." : `${some(records.length, "record")}${where}`;
  }

  const names = gate.stats.routes.map(({ route }) => route).filter(route => route !== "-");
  const element = h("section", {}, h("h1", {}, "Records"),
    h("form", { onsubmit: search, role: "search", "aria-label": "Records" }, h("div", { class: "fields" },
      field("id", "Id", "all of it, or how it begins", { inputmode: "text", pattern: "[0-9A-Fa-f]{1,64}", title: "1 to 64 hexadecimal digits", "aria-keyshortcuts": "/" }),
      isOperator ? field("key", "Key", "all of it, as the client sent it") : null,
      h("div", {}, h("label", { for: "by-state" }, "State"), fields.state),
      field("route", "Route", "its name", { list: "routes-known" }),
      field("older_than", "Older than", "90s, 1h, 7d"),
      field("since", "Since", "1h, or 2026-01-31T22:00:00Z"),
      isOperator ? field("scope", "Scope", "header:X-Tenant=acme") : null),
      h("datalist", { id: "routes-known" }, names.map(name => h("option", { value: name }))),
      h("div", { class: "buttons" }, h("button", { class: "main" }, "Search"), h("button", { type: "button", onclick: clear }, "Clear"))),
    isOperator ? null : h("p", { class: "note" }, "Your token is a viewer's: keys and answers are not shown, and nothing can be changed."),
    pages.element);

  function clear() {
    for (const input of Object.values(fields)) input.value = "";
    fields.id.focus();
  }

  // Back returns to what was found, and a link that names a filter is a question; the bare view is not.
  if (former) {
    filter = given();
    pages.load();
  } else if (!isCut && OPEN.some(name => parameters[name])) search();
  return { title: "Records", element, reload: () => filter ? pages.load() : isCut ? fields.id.focus() : search(), find: () => fields.id.focus() };
}
