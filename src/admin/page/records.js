// Searches records: GET /api/v1/records, a page at a time. Nothing is listed before it is asked for, but what a link names.

import { ask, query } from "/page/api.js";
import { code, duration, h, pager, problem, put, recordLink, some, stateWord, table } from "/page/dom.js";

const LIMIT = 50;
const OPEN = ["id", "state", "route", "older_than", "since"];
// What names a client stays out of the address, and so out of the history of the browser.
const kept = { key: "", scope: "" };

export function records({ gate, parameters, signal, announce }) {
  const { isOperator } = gate;
  const fields = {};
  const field = (name, label, hint, props = {}) => {
    const value = OPEN.includes(name) ? parameters[name] ?? "" : kept[name];
    fields[name] = h("input", { id: `by-${name}`, value, autocomplete: "off", spellcheck: "false", autocapitalize: "off", ...props });
    return h("div", {}, h("label", { for: `by-${name}` }, label, h("span", { class: "hint" }, hint)), fields[name]);
  };
  fields.state = h("select", { id: "by-state" }, ["", "unknown", "in-flight", "completed"].map(state =>
    h("option", { value: state, selected: (parameters.state ?? "") === state }, state === "" ? "any" : state)));
  const found = table("Records, newest first", [{ name: "Record" }, { name: "state" }, { name: "route" }, { name: "request" }, { name: "key" }, { name: "claimed" }, { name: "answer" }], "No record is found.");
  const place = h("div");
  const wrong = h("div");
  const note = h("p", { class: "quiet" });
  const pages = pager(load);
  let filter = {}, loads = 0, asked = 0;

  const read = () => Object.fromEntries(Object.entries(fields).map(([name, input]) => [name, input.value.trim()]).filter(([, value]) => value !== ""));

  function search(event) {
    event?.preventDefault();
    filter = read();
    for (const name of ["key", "scope"]) kept[name] = filter[name] ?? "";
    const open = query(Object.fromEntries(OPEN.map(name => [name, filter[name]])));
    history.replaceState(null, "", `#/records${open}`);
    pages.first();
    return load();
  }

  async function load() {
    place.setAttribute("aria-busy", "true");
    note.textContent = "Searching. A large store may take some seconds.";
    put(wrong);
    const nth = ++asked, cursor = pages.ask();
    try {
      const page = await ask(`/api/v1/records${query({ ...filter, limit: LIMIT, cursor })}`, { signal, patience: 60000 });
      // An older answer may come later.
      if (nth !== asked) return;
      const { number, isLast } = pages.show(page.next);
      loads += 1;
      found.fill(page.records.map(record => ({ key: `${loads}:${record.id}`, cells: [() => recordLink(record.id), () => stateWord(record.state), record.route ?? "–",
        `${record.method ?? ""} ${record.path ?? ""}`, () => record.key === null ? (isOperator ? "not readable" : "not shown") : code(record.key), `${duration(record.age_seconds)} ago`, record.status ? `${record.status}` : ""] })));
      put(place, found.element, pages.buttons);
      const text = page.records.length === 0 && !isLast ? "Nothing on this page, but there are older records: go on with the next page."
        : `${some(page.records.length, "record")} on page ${number}${isLast ? ", which is the last" : ""}.`;
      note.textContent = text;
      announce(text);
    } catch (error) {
      if (signal.aborted || nth !== asked) return;
      pages.failed();
      note.textContent = "";
      put(wrong, problem(error));
      announce(error.message);
    }
    place.removeAttribute("aria-busy");
  }

  const names = gate.stats?.routes.map(({ route }) => route).filter(route => route !== "-") ?? [];
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
    isOperator || !gate.stats ? null : h("p", { class: "note" }, "Your token is a viewer's: keys and answers are not shown, and nothing can be changed."),
    note, wrong, place);

  function clear() {
    for (const input of Object.values(fields)) input.value = "";
    fields.id.focus();
  }

  // A link that names a filter is a question; the bare view is not.
  if (gate.stats && OPEN.some(name => parameters[name])) search();
  else note.textContent = "Search, or press Search for all records, newest first.";
  return { title: "Records", element, reload: search, find: () => fields.id.focus() };
}
