// Accepted requests: GET /api/v1/deliveries, a page at a time. An operator pauses and resumes routes, and retries dead requests.

import { ask, query } from "/page/api.js";
import { change } from "/page/dialog.js";
import { code, duration, facts, h, pager, problem, put, recordLink, some, stateWord, table } from "/page/dom.js";

const LIMIT = 50;
const OPEN = ["id", "state", "route"];

const ACTS = {
  all: { name: "Retry all", what: "Every request that the filter finds and that was given up is queued again, and its attempts are counted anew. Those whose outcome is unknown are left alone." },
  pause: { name: "Pause the route", what: "Every gate of the store holds its deliveries back, until somebody resumes the route. Its requests are accepted, and wait. Attempts that are under way go on.", done: "Paused: its requests wait." },
  resume: { name: "Resume the route", what: "Every gate of the store delivers its requests again, each when it is due.", done: "Resumed: its requests are delivered." },
  retry: { name: "Retry the request", what: "The request is queued again and its attempts are counted anew. It goes to the upstream when its turn comes.", done: "Queued again: it is delivered when its turn comes." },
};

// "3 min 2 s ago" or "in 5 s", with the time itself for machines.
function moment(text, now) {
  const away = (Date.parse(now) - Date.parse(text)) / 1000;
  return h("time", { datetime: text, title: text }, away >= 0 ? `${duration(away)} ago` : `in ${duration(-away)}`);
}

const request = ({ method, path }) => `${method ?? "?"} ${path ?? "?"}`;

export function deliveries({ gate, parameters, signal, announce }) {
  const { isOperator } = gate;
  const fields = {
    route: h("input", { id: "by-route", value: parameters.route ?? "", autocomplete: "off", spellcheck: "false", autocapitalize: "off", list: "routes-known", "aria-keyshortcuts": "/" }),
    state: h("select", { id: "by-state" }, ["", "queued", "dead"].map(state => h("option", { value: state, selected: (parameters.state ?? "") === state }, state === "" ? "any" : state))),
    id: h("input", { id: "by-id", value: parameters.id ?? "", autocomplete: "off", spellcheck: "false", autocapitalize: "off", pattern: "[0-9A-Fa-f]{1,64}", title: "1 to 64 hexadecimal digits" }),
  };
  const found = table("Accepted requests, oldest first", [{ name: "Id" }, { name: "state" }, { name: "route" }, { name: "request" }, { name: "accepted" }, { name: "due" }, { name: "attempts", kind: "number" },
    { name: "reason" }, ...(isOperator ? [{ name: "change" }] : [])], "No accepted request is found.");
  const held = table("Routes, and whether they deliver", [{ name: "Route" }, { name: "deliveries" }, ...(isOperator ? [{ name: "change" }] : [])], "No route is known.");
  const known = h("datalist", { id: "routes-known" });
  const place = h("div"), routes = h("div"), wrong = h("div");
  const note = h("p", { class: "quiet" }, "Asking for the accepted requests.");
  const pages = pager(load);
  let filter = {}, loads = 0, asked = 0;

  function search(event) {
    event?.preventDefault();
    filter = Object.fromEntries(OPEN.map(name => [name, fields[name].value.trim()]));
    pages.first();
    history.replaceState(null, "", `#/deliveries${query(filter)}`);
    return load();
  }

  async function load() {
    place.setAttribute("aria-busy", "true");
    put(wrong);
    const nth = ++asked, cursor = pages.ask();
    try {
      const [page, configured] = await Promise.all([ask(`/api/v1/deliveries${query({ ...filter, limit: LIMIT, cursor })}`, { signal }), ask("/api/v1/routes", { signal })]);
      // An older answer may come later.
      if (nth !== asked) return;
      show(page, configured.routes);
      announce(note.textContent);
    } catch (error) {
      if (signal.aborted || nth !== asked) return;
      pages.failed();
      note.textContent = "";
      put(wrong, problem(error));
      announce(error.message);
    }
    place.removeAttribute("aria-busy");
  }

  function show({ deliveries, next: cursor, paused }, configured) {
    const now = gate.stats.at, isPaused = name => paused.includes(name);
    const { number, isLast } = pages.show(cursor);
    loads += 1;
    // One that accepts no more may have some left.
    const names = configured.filter(({ name, accepts }) => accepts || isPaused(name) || deliveries.some(({ route }) => route === name)).map(({ name }) => name);
    put(known, names.map(name => h("option", { value: name })));
    if (names.length === 0 && deliveries.length === 0 && number === 1 && isLast && query(filter) === "") {
      put(routes);
      put(place);
      note.textContent = "No route of this gate accepts requests to be delivered later: that takes mode = \"accept\", and SQLite or PostgreSQL as the store.";
      return;
    }
    const offer = (text, of, run) => () => h("button", { type: "button", "aria-label": `${text} ${of}`, onclick: event => run(event.currentTarget) }, text);
    held.fill(names.map(name => ({ key: `${loads}:${name}`, cells: [name, isPaused(name) ? "paused: its requests wait" : "delivers",
      ...(isOperator ? [offer(isPaused(name) ? "Resume …" : "Pause …", name, opener => alter(opener, aboutRoute(name, !isPaused(name))))] : [])] })));
    put(routes, h("h2", {}, "Routes that accept"),
      h("p", { class: paused.length > 0 ? "note warn" : "" }, paused.length > 0 ? `Paused: ${paused.join(", ")}. Their requests are accepted, and wait.` : "No route is paused."), held.element);
    found.fill(deliveries.map(delivery => ({ key: `${loads}:${delivery.id}`, cells: [() => recordLink(delivery.id), () => stateWord(delivery.state), delivery.route ?? "–", request(delivery),
      () => moment(delivery.accepted_at, now), delivery.due_at ? () => moment(delivery.due_at, now) : "", `${delivery.attempts}`, delivery.reason ?? "",
      ...(isOperator ? [delivery.state === "dead" ? offer("Retry …", delivery.id.slice(0, 16), opener => alter(opener, aboutRetry(delivery))) : ""] : [])] })));
    const mayRetry = isOperator && deliveries.some(({ state }) => state === "dead");
    put(place, h("h2", {}, "Requests"), mayRetry ? h("p", {}, offer("Retry all …", "that were given up", opener => alter(opener, aboutRetryAll()))()) : null, found.element, pages.buttons);
    note.textContent = `${some(deliveries.length, "accepted request")} on page ${number}${isLast ? ", which is the last" : ""}.`;
  }

  // Adds up what the gate says of all that the filter finds, a part at a time.
  async function retryAll(more) {
    const { route, id } = filter, given = Object.entries({ route, id }).filter(([, value]) => value);
    let sum = null, after;
    do {
      const part = await ask("/api/v1/records/retry", { method: "POST", body: { filter: Object.fromEntries(given), all: given.length === 0, ...more, ...(after ? { after } : {}) } });
      const plus = name => (sum?.[name] ?? 0) + (part[name] ?? 0);
      sum = { matched: plus("matched"), done: plus("done"), failed: plus("failed"), unknown: (sum?.unknown ?? 0) + (part.of_unknown_outcome ?? 0), asOf: sum?.asOf ?? part.as_of };
      after = part.next;
    } while (after);
    return sum;
  }

  function aboutRetryAll() {
    const { name, what } = ACTS.all;
    let asOf = null;
    return {
      title: "Retry all of these requests?", fields: h("p", {}, what),
      look: async reason => {
        const sum = await retryAll({ dry_run: true, reason });
        asOf = sum.asOf;
        return { name, isDanger: false, changed: sum.matched === 0 ? "No request that can be retried is found." : null,
          parts: [h("p", { class: "say" }, what), facts([["To be queued again", some(sum.matched, "request")], ["Left alone", `${some(sum.unknown, "request")} of unknown outcome`],
            ["Route", filter.route || "any"], ["Id", filter.id ? code(filter.id) : "any"], ["Action", name], ["Reason", reason]])] };
      },
      act: async reason => {
        const { done, failed } = await retryAll({ reason, as_of: asOf });
        return `${some(done, "request")} queued again.${failed > 0 ? ` For ${failed} the store failed: retry them once more.` : ""}`;
      },
    };
  }

  const alter = (opener, what) => change(opener, what, { element, load, announce });

  // What the dialog asks, shows and does.
  function aboutRoute(route, isPause) {
    const { name, what, done } = ACTS[isPause ? "pause" : "resume"];
    return {
      title: isPause ? "Pause this route?" : "Resume this route?", fields: h("p", {}, what),
      look: async reason => {
        const isPaused = (await ask("/api/v1/deliveries?limit=1")).paused.includes(route);
        return { name, isDanger: isPause, changed: isPaused === isPause ? `The route changed since you looked at it: it is ${isPaused ? "paused" : "not paused"} now.` : null,
          parts: [h("p", { class: "say" }, what), facts([["Route", route], ["Deliveries", isPaused ? "paused" : "delivers"], ["Action", name], ["Reason", reason]])] };
      },
      act: async reason => {
        await ask(`/api/v1/deliveries/${isPause ? "pause" : "resume"}`, { method: "POST", body: { route, reason } });
        return done;
      },
    };
  }

  function aboutRetry(delivery) {
    const { name, what, done } = ACTS.retry;
    return {
      title: "Retry this request?", fields: h("p", {}, what),
      look: async reason => {
        const [fresh] = (await ask(`/api/v1/deliveries${query({ id: delivery.id, limit: 1 })}`)).deliveries;
        const isChanged = fresh?.state !== delivery.state || fresh.accepted_at !== delivery.accepted_at || fresh.reason !== delivery.reason;
        const shown = fresh ?? delivery;
        return { name, isDanger: false, changed: !isChanged ? null : fresh ? `The request changed since you looked at it: it is ${fresh.state} now.` : "The request is no longer to be delivered.",
          parts: [h("p", { class: "say" }, what), facts([["Id", code(shown.id)], ["State", fresh ? stateWord(fresh.state) : "gone"], ["Route", shown.route], ["Request", code(request(shown))], ["Key", code(shown.key)],
            ["Accepted", moment(shown.accepted_at, gate.stats.at)], ["Attempts", shown.attempts], ["Given up, since", shown.reason], ["Action", name], ["Reason", reason]])] };
      },
      act: async reason => {
        await ask(`/api/v1/records/${delivery.id}/retry`, { method: "POST", body: { reason } });
        return done;
      },
    };
  }

  const labelled = (input, text, hint) => h("div", {}, h("label", { for: input.id }, text, hint ? h("span", { class: "hint" }, hint) : null), input);
  const element = h("section", {}, h("h1", {}, "Deliveries"),
    h("form", { onsubmit: search, role: "search", "aria-label": "Deliveries" }, h("div", { class: "fields" }, labelled(fields.route, "Route", "its name"), labelled(fields.state, "State"),
      labelled(fields.id, "Id", "all of it, or how it begins")), known, h("div", { class: "buttons" }, h("button", { class: "main" }, "Search"))),
    isOperator || !gate.stats ? null : h("p", { class: "note" }, "Your token is a viewer's: nothing can be changed."),
    note, wrong, routes, place);
  // The stats say which role the user has, and so which buttons the view has.
  if (gate.stats) search();
  return { title: "Deliveries", element, reload: () => { if (gate.stats) load(); }, find: () => fields.route.focus() };
}
