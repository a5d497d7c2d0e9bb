// Accepted requests: GET /api/v1/deliveries, a page at a time. An operator pauses and resumes routes, and retries dead requests.

import { ask, query } from "/page/api.js";
import { change } from "/page/dialog.js";
import { choice, code, facts, h, moment, pager, put, recordLink, shortId, some, stateWord, table } from "/page/dom.js";

const LIMIT = 50;
const OPEN = ["id", "state", "route"];

const ACTS = {
  all: { name: "Retry all", what: "Every request that the filter finds and that was given up is queued again, and its attempts are counted anew. Those whose outcome is unknown are left alone." },
  pause: { name: "Pause the route", what: "Every gate of the store holds its deliveries back, until somebody resumes the route. Its requests are accepted, and wait. Attempts that are under way go on.", done: route => `Paused: the requests of ${route} wait.` },
  resume: { name: "Resume the route", what: "Every gate of the store delivers its requests again, each when it is due.", done: route => `Resumed: the requests of ${route} are delivered.` },
  retry: { name: "Retry the request", what: "The request is queued again and its attempts are counted anew. It goes to the upstream when its turn comes.", done: id => `Queued again: request ${shortId(id)} is delivered when its turn comes.` },
};

const request = ({ method, path }) => `${method ?? "?"} ${path ?? "?"}`;

export function deliveries({ gate, parameters, signal, announce, say }) {
  const { isOperator } = gate;
  const fields = {
    route: h("input", { id: "by-route", value: parameters.route ?? "", autocomplete: "off", spellcheck: "false", autocapitalize: "off", list: "routes-known", "aria-keyshortcuts": "/" }),
    state: choice("by-state", ["queued", "dead"], parameters.state),
    id: h("input", { id: "by-id", value: parameters.id ?? "", autocomplete: "off", spellcheck: "false", autocapitalize: "off", pattern: "[0-9A-Fa-f]{1,64}", title: "1 to 64 hexadecimal digits" }),
  };
  const found = table("Accepted requests, oldest first", [{ name: "Id" }, { name: "state" }, { name: "route" }, { name: "request" }, { name: "accepted" }, { name: "due" }, { name: "attempts", kind: "number" },
    { name: "reason" }, ...(isOperator ? [{ name: "change" }] : [])], "No accepted request is found.");
  const held = table("Routes, and whether they deliver", [{ name: "Route" }, { name: "deliveries" }, ...(isOperator ? [{ name: "change" }] : [])], "No route is known.");
  const known = h("datalist", { id: "routes-known" });
  const given = () => Object.fromEntries(OPEN.map(name => [name, fields[name].value.trim()]));
  let filter = given();
  const pages = pager({ gate, signal, announce, show, read: async cursor => {
    const [page, { routes }] = await Promise.all([ask(`/api/v1/deliveries${query({ ...filter, limit: LIMIT, cursor })}`, { signal }), ask("/api/v1/routes", { signal })]);
    return { ...page, configured: routes };
  } });

  function search(event) {
    event.preventDefault();
    filter = given();
    pages.search(`#/deliveries${query(filter)}`);
  }

  function show({ deliveries, paused, configured }, where) {
    const isPaused = name => paused.includes(name);
    // One that accepts no more may have some left.
    const names = configured.filter(({ name, accepts }) => accepts || isPaused(name) || deliveries.some(({ route }) => route === name)).map(({ name }) => name);
    put(known, names.map(name => h("option", { value: name })));
    if (names.length === 0 && deliveries.length === 0 && query(filter) === "") {
      put(pages.place);
      return "No route of this gate accepts requests to be delivered later: that takes mode = \"accept\", and SQLite or PostgreSQL as the store.";
    }
    const offer = (text, of, run) => () => h("button", { type: "button", "aria-label": `${text} ${of}`, onclick: event => run(event.currentTarget) }, text);
    held.fill(names.map(name => ({ key: name, cells: [name, isPaused(name) ? "paused: its requests wait" : "delivers",
      ...(isOperator ? [offer(isPaused(name) ? "Resume …" : "Pause …", name, opener => alter(opener, aboutRoute(name, !isPaused(name))))] : [])] })));
    found.fill(deliveries.map(delivery => ({ key: delivery.id, cells: [() => recordLink(delivery.id), () => stateWord(delivery.state), delivery.route ?? "–", request(delivery),
      () => moment(delivery.accepted_at, gate), delivery.due_at ? () => moment(delivery.due_at, gate, true) : "", `${delivery.attempts}`, delivery.reason ?? "",
      ...(isOperator ? [delivery.state === "dead" ? offer("Retry …", delivery.id.slice(0, 16), opener => alter(opener, aboutRetry(delivery))) : ""] : [])] })));
    const mayRetry = isOperator && deliveries.some(({ state }) => state === "dead");
    put(pages.place, h("h2", {}, "Routes that accept"),
      h("p", { class: paused.length > 0 ? "note warn" : "" }, paused.length > 0 ? `Paused: ${paused.join(", ")}. Their requests are accepted, and wait.` : "No route is paused."), held.element,
      h("h2", {}, "Requests"), mayRetry ? h("p", {}, offer("Retry all …", "that were given up", opener => alter(opener, aboutRetryAll()))()) : null, found.element, pages.buttons);
    return `${some(deliveries.length, "accepted request")}${where}`;
  }

  // Adds up what the gate says of all that the filter finds, a part at a time. What breaks off says what was done so far.
  async function retryAll(more) {
    const { route, id } = filter, chosen = Object.entries({ route, id }).filter(([, value]) => value);
    const sum = { matched: 0, done: 0, failed: 0, of_unknown_outcome: 0 };
    const add = part => { for (const name in sum) sum[name] += part[name] ?? 0; };
    let asOf = more.as_of, after;
    do {
      try {
        const part = await ask("/api/v1/records/retry", { method: "POST", body: { filter: Object.fromEntries(chosen), all: chosen.length === 0, ...more, ...(after ? { after } : {}) } });
        add(part);
        asOf ??= part.as_of;
        after = part.next;
      } catch (error) {
        add(error.body ?? {});
        if (sum.done + sum.failed > 0) error.soFar = outcome(sum);
        throw error;
      }
    } while (after);
    return { ...sum, asOf };
  }

  const outcome = ({ done, failed }) => `${some(done, "request")} queued again.${failed > 0 ? ` For ${failed} the store failed: retry them once more.` : ""}`;

  function aboutRetryAll() {
    const { name, what } = ACTS.all;
    let asOf = null;
    return {
      title: "Retry all of these requests?", fields: h("p", {}, what),
      look: async reason => {
        const sum = await retryAll({ dry_run: true, reason });
        asOf = sum.asOf;
        return { name, isDanger: false, changed: sum.matched === 0 ? "No request that can be retried is found." : null,
          parts: [h("p", { class: "say" }, what), facts([["To be queued again", some(sum.matched, "request")], ["Left alone", `${some(sum.of_unknown_outcome, "request")} of unknown outcome`],
            ["Route", filter.route || "any"], ["Id", filter.id ? code(filter.id) : "any"], ["Action", name], ["Reason", reason]])] };
      },
      act: async reason => outcome(await retryAll({ reason, as_of: asOf })),
    };
  }

  const alter = (opener, what) => change(opener, what, { element, load: pages.load, say, signal });

  // What the dialog asks, shows and does.
  function aboutRoute(route, isPause) {
    const { name, what, done } = ACTS[isPause ? "pause" : "resume"];
    return {
      title: `${isPause ? "Pause" : "Resume"} the route ${route}?`, fields: h("p", {}, what),
      look: async reason => {
        const isPaused = (await ask("/api/v1/deliveries?limit=1")).paused.includes(route);
        return { name, isDanger: isPause, changed: isPaused === isPause ? `The route changed since you looked at it: it is ${isPaused ? "paused" : "not paused"} now.` : null,
          parts: [h("p", { class: "say" }, what), facts([["Route", route], ["Deliveries", isPaused ? "paused" : "delivers"], ["Action", name], ["Reason", reason]])] };
      },
      act: async reason => {
        await ask(`/api/v1/deliveries/${isPause ? "pause" : "resume"}`, { method: "POST", body: { route, reason } });
        return done(route);
      },
    };
  }

  function aboutRetry(delivery) {
    const { name, what, done } = ACTS.retry;
    return {
      title: `Retry request ${shortId(delivery.id)}?`, fields: h("p", {}, what),
      look: async reason => {
        const [fresh] = (await ask(`/api/v1/deliveries${query({ id: delivery.id, limit: 1 })}`)).deliveries;
        const isChanged = fresh?.state !== delivery.state || fresh.accepted_at !== delivery.accepted_at || fresh.reason !== delivery.reason;
        const shown = fresh ?? delivery;
        return { name, isDanger: false, changed: !isChanged ? null : fresh ? `The request changed since you looked at it: it is ${fresh.state} now.` : "The request is no longer to be delivered.",
          parts: [h("p", { class: "say" }, what), facts([["Id", code(shown.id)], ["State", fresh ? stateWord(fresh.state) : "gone"], ["Route", shown.route], ["Request", code(request(shown))], ["Key", code(shown.key)],
            ["Accepted", moment(shown.accepted_at, gate)], ["Attempts", shown.attempts], ["Given up, since", shown.reason], ["Action", name], ["Reason", reason]])] };
      },
      act: async reason => {
        await ask(`/api/v1/records/${delivery.id}/retry`, { method: "POST", body: { reason } });
        return done(delivery.id);
      },
    };
  }

  const labelled = (input, text, hint) => h("div", {}, h("label", { for: input.id }, text, hint ? h("span", { class: "hint" }, hint) : null), input);
  const element = h("section", {}, h("h1", {}, "Deliveries"),
    h("form", { onsubmit: search, role: "search", "aria-label": "Deliveries" }, h("div", { class: "fields" }, labelled(fields.route, "Route", "its name"), labelled(fields.state, "State"),
      labelled(fields.id, "Id", "all of it, or how it begins")), known, h("div", { class: "buttons" }, h("button", { class: "main" }, "Search"))),
    isOperator ? null : h("p", { class: "note" }, "Your token is a viewer's: nothing can be changed."),
    pages.element);
  pages.load();
  return { title: "Deliveries", element, reload: pages.load, find: () => fields.route.focus() };
}
