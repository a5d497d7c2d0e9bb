// The frame of the page: which view is shown, the question every two seconds, the token, and the keys.

import { ask, hasToken, onRefusal, setToken } from "/page/api.js";
import { $, duration, h, put, refuse, write } from "/page/dom.js";
import { now, reasonOf, routes } from "/page/now.js";
import { kept, records } from "/page/records.js";
import { record } from "/page/record.js";
import { audit } from "/page/audit.js";
import { deliveries } from "/page/deliveries.js";

const EVERY = 2000;
const PATIENCE = 5000;
// A gate that was asked once in vain may only be slow.
const SILENT = 4000;

// What all views know.
const gate = { stats: null, isOperator: false, silentSince: null, said: "",
  // Its clock, not that of this browser.
  now: () => Date.parse(gate.stats.at) + Date.now() - gate.heard };

let shown = null;
let question = null;
let timer = 0;
let demanded = false;

// Says it to those who hear the page.
function announce(text) {
  $("announce").textContent = "";
  setTimeout(() => { $("announce").textContent = text; }, 50);
}

// Says what was done to all, until a view is opened.
function say(text) {
  write($("said"), text);
  $("said").hidden = false;
  announce(text);
}

const VIEWS = { now, routes, records, audit, deliveries };

// "#/records/ID?x=y" to its parts.
function place() {
  const [path, search] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, id] = path.split("/");
  return { name: Object.hasOwn(VIEWS, name) ? name : "now", id, parameters: Object.fromEntries(new URLSearchParams(search ?? "")) };
}

// No view is made before the gate says which role its user has. A view that comes by itself leaves the focus where it is.
function show(isAsked = true) {
  const { name, id, parameters } = place();
  // A dialog of the view closes, and gives the focus back.
  shown?.stop.abort();
  const hadFocus = $("content").contains(document.activeElement);
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#/${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const stop = new AbortController();
  const context = { id, parameters, gate, signal: stop.signal, announce, say, again: show };
  const view = demanded ? tokenForm() : !gate.stats ? asking() : id && name === "records" ? record(context) : VIEWS[name](context);
  shown = { ...view, stop };
  if (isAsked) $("said").hidden = true;
  put($("content"), view.element);
  document.title = `${view.title} – oncegate`;
  const heading = $("content").querySelector("h1");
  heading.tabIndex = -1;
  if (isAsked || hadFocus) heading.focus();
  if (isAsked) scrollTo(0, 0);
  if (gate.stats) shown.tick?.(gate.stats);
}

// Reads the stats, and reads them again two seconds after the answer. A hidden tab does not.
async function poll() {
  clearTimeout(timer);
  if (demanded || question) return;
  question = new AbortController();
  try {
    const stats = await ask("/api/v1/stats", { signal: question.signal, patience: PATIENCE });
    const was = gate.stats;
    Object.assign(gate, { stats, isOperator: stats.you.role === "operator", silentSince: null, heard: Date.now() });
    status();
    // What a view offers depends on the role.
    if (was?.you.role !== stats.you.role) show(false);
    else shown?.tick?.(stats);
  } catch (error) {
    if (!demanded) {
      gate.silentSince ??= Date.now();
      gate.error = error;
      status();
    }
  }
  question = null;
  if (!demanded && !document.hidden) timer = setTimeout(poll, EVERY);
}

// The line at the top, and the banner: both say the same at any time, and announce it only where it changes.
function status() {
  const { stats, silentSince, error } = gate;
  const isSilent = silentSince !== null && (gate.heard === undefined || Date.now() - gate.heard > SILENT);
  const banner = $("banner");
  let state = "asking", text = "Asking the gate", more = "";
  if (demanded) {
    [state, text] = ["warn", "A token is needed"];
  } else if (isSilent && error?.status) {
    [state, text, more] = ["bad", `The gate answers ${error.status}`, error.message];
  } else if (isSilent) {
    [state, text] = ["bad", "The gate no longer answers"];
    more = gate.heard ? `The gate no longer answers. What is shown here is from ${duration((Date.now() - gate.heard) / 1000)} ago. It is asked again every two seconds.`
      : "The gate does not answer. It is asked again every two seconds.";
  } else if (stats && !stats.ready) {
    [state, text, more] = ["bad", "Not ready", `This gate is not ready. ${reasonOf(stats)}`];
  } else if (stats) {
    [state, text] = ["good", "Ready"];
  }
  $("state").dataset.state = state;
  write($("state-text"), text);
  banner.hidden = more === "";
  write(banner, more);
  document.body.classList.toggle("old", isSilent);
  if (gate.said !== "" && gate.said !== text && state !== "asking") announce(more || text);
  if (state !== "asking") gate.said = text;
  const you = stats && !demanded ? `${stats.you.name === "-" ? "" : `${stats.you.name}, `}${stats.you.role}` : "";
  write($("who"), you);
  $("forget").hidden = !hasToken() || demanded;
  if (stats) write($("foot"), `oncegate ${stats.version}, up for ${duration(stats.uptime_seconds)}. Figures are of this process; records are of the store.`);
}

function demand(problem) {
  const wasShown = demanded;
  demanded = true;
  gate.why = hasToken() ? problem.message : "";
  setToken(null);
  kept.clear();
  gate.stats = null;
  status();
  if (!wasShown || gate.why) show();
  $("content").querySelector("input")?.focus();
}

const asking = () => ({ title: "Asking the gate", element: h("h1", {}, "Asking the gate") });

function tokenForm() {
  const input = h("input", { id: "token", type: "password", autocomplete: "off", spellcheck: "false", required: true, "aria-describedby": "token-hint" });
  const send = event => {
    event.preventDefault();
    const value = input.value.trim();
    // What cannot stand in a header is no token.
    if (!/^[\x21-\x7e]+$/.test(value)) return refuse(input, "A token has no spaces, and only ASCII characters.");
    setToken(value);
    demanded = false;
    gate.said = "";
    show();
    poll();
  };
  const element = h("section", {}, h("h1", {}, "A token is needed"),
    gate.why ? h("p", { class: "wrong", role: "alert" }, gate.why) : null,
    h("form", { onsubmit: send },
      h("label", { for: "token" }, "Token"),
      h("p", { class: "hint", id: "token-hint" }, "One of admin.tokens, or the one of admin.token_file. It is kept in this tab only, until the tab is closed."),
      input, h("div", { class: "buttons" }, h("button", { class: "main" }, "Go on"))));
  return { title: "Token", element };
}

function forget() {
  setToken(null);
  question?.abort();
  demand({ message: "" });
}

// One key each. They can be switched off, for those who speak to their machine or slip (WCAG 2.1.4).
let keys = true;
const TARGETS = { "1": "#/now", "2": "#/routes", "3": "#/records", "4": "#/audit", "5": "#/deliveries" };

function help() {
  const opener = document.activeElement;
  const isOn = h("input", { type: "checkbox", checked: keys, onchange: event => { keys = event.target.checked; } });
  const dialog = h("dialog", { "aria-labelledby": "keys-title" },
    h("h2", { id: "keys-title" }, "Keys"),
    h("dl", { class: "facts" }, [["1", "Now"], ["2", "Routes"], ["3", "Records"], ["4", "Audit"], ["5", "Deliveries"], ["/", "Go to the search of records, of the audit log or of deliveries"],
      ["r", "Load the view again"], ["?", "This help"], ["Esc", "Close a dialog; nothing is changed"]]
      .map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)])),
    h("label", { class: "check" }, isOn, "Single keys do this"),
    h("form", { method: "dialog" }, h("div", { class: "buttons" }, h("button", { class: "main", autofocus: true }, "Close"))));
  dialog.addEventListener("close", () => { dialog.remove(); opener?.focus?.(); });
  document.body.append(dialog);
  dialog.showModal();
}

function press(event) {
  const isTyping = event.target.closest?.("input, select, textarea") !== null;
  if (!keys || isTyping || event.ctrlKey || event.altKey || event.metaKey || document.querySelector("dialog[open]")) return;
  if (event.key in TARGETS) location.hash = TARGETS[event.key];
  else if (event.key === "?") help();
  else if (event.key === "r") (shown.reload ?? poll)();
  else if (event.key === "/" && gate.stats) {
    // At once: the next key is of the search.
    if (!shown.find) {
      history.pushState(null, "", "#/records");
      show();
    }
    shown.find();
  } else return;
  event.preventDefault();
}

onRefusal(demand);
addEventListener("hashchange", () => show());
addEventListener("keydown", press);
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
$("help").addEventListener("click", help);
$("forget").addEventListener("click", forget);
$("skip").addEventListener("click", event => { event.preventDefault(); $("view").focus(); });
show(false);
poll();
