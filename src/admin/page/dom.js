// Makes elements. Text only ever becomes a text node, so that no key and no reason can become markup.

const SVG = "http://www.w3.org/2000/svg";

// h("a", { href: "#/now", class: "x", onclick: f }, "text", element, [more], null)
export function h(name, props, ...children) {
  const element = document.createElement(name);
  set(element, props);
  element.append(...flat(children));
  return element;
}

function set(element, props) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
}

function flat(children) {
  return children.flat(9).filter(child => child !== null && child !== undefined && child !== false).map(child => child instanceof Node ? child : String(child));
}

// The same of an element that is there: these are its children now.
export function put(place, ...children) {
  place.replaceChildren(...flat(children));
}

// The same where some of them may be there: these stay where they are, since what is taken out loses the focus.
function arrange(place, elements) {
  for (const old of [...place.children]) if (!elements.includes(old)) old.remove();
  elements.forEach((element, nth) => { if (place.children[nth] !== element) place.insertBefore(element, place.children[nth]); });
}

export const $ = id => document.getElementById(id);

// Writes a text where it is another one: a reader of the screen hears of changes only.
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Says what is wrong with a field.
export function refuse(field, text) {
  field.setCustomValidity(text);
  field.reportValidity();
  field.setCustomValidity("");
}

// Rows that keep their elements, and with them the focus, as long as their keys are there. make(row) makes an element, and
// change(element, row) gives it what it has now.
export function keyed(place, rows, make, change) {
  const known = new Map([...place.children].map(element => [element.dataset.key, element]));
  arrange(place, rows.map(row => {
    const element = known.get(row.key) ?? make(row);
    element.dataset.key = row.key;
    change(element, row);
    return element;
  }));
}

// A table that keeps its roles where the style shows it as a list. Columns: { name, kind: "number" | "bar" }.
export function table(caption, columns, empty) {
  const body = h("tbody", { role: "rowgroup" });
  const head = columns.map(({ name, kind }) => h("th", { role: "columnheader", scope: "col", class: kind }, name));
  const element = h("table", { role: "table" },
    h("caption", {}, caption),
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, head)),
    body);
  // Rows: { key, cells: [text or function that makes an element] }.
  const make = ({ cells }) => h("tr", { role: "row" }, cells.map((_, nth) => nth === 0 ? h("th", { role: "rowheader", scope: "row" })
    : h("td", { role: "cell", class: columns[nth].kind, "data-label": columns[nth].name })));
  const change = (row, { cells }) => cells.forEach((cell, nth) => {
    const place = row.children[nth];
    if (typeof cell !== "function") write(place, cell ?? "");
    else if (place.firstChild?.refresh) place.firstChild.refresh(cell);
    else put(place, cell());
  });
  const fill = rows => {
    if (rows.length > 0) keyed(body, rows, make, change);
    else put(body, h("tr", { role: "row" }, h("td", { role: "cell", class: "plain", colspan: columns.length }, empty)));
  };
  return { element, fill };
}

// A list, which the gate gives a page at a time. read(cursor) asks for a page, show(page, where) shows it in `place` and gives a
// sentence that says what is where. The pages up to this one stand in the history of the browser, so that Back returns to the page that was left.
export function pager({ gate, signal, announce, hint, read, show }, cursors = history.state?.cursors ?? [null]) {
  const note = h("p", { class: "quiet", tabindex: "-1" }, hint), wrong = h("div"), place = h("div");
  let asked = 0, following = null;
  const go = (hash, state = history.state) => {
    history.replaceState({ ...state, cursors }, "", hash);
    return load();
  };
  const turn = async () => { await go(); note.focus(); };
  const back = h("button", { type: "button", onclick: () => { cursors.pop(); turn(); } }, "Previous page");
  const next = h("button", { type: "button", onclick: () => { cursors.push(following); turn(); } }, "Next page");

  async function load() {
    const nth = ++asked, number = cursors.length;
    place.setAttribute("aria-busy", "true");
    note.textContent = "Asking for the list. A large store may take some seconds.";
    put(wrong);
    // While a page is asked for, no other can be.
    back.disabled = next.disabled = true;
    following = null;
    try {
      const page = await read(cursors.at(-1));
      // An older answer may come later.
      if (signal.aborted || nth !== asked) return;
      following = page.next;
      place.hidden = false;
      note.textContent = `${show(page, ` on page ${number}${following === null ? ", which is the last" : ""}.`)} ${asOf(gate)}`;
      announce(note.textContent);
    } catch (error) {
      if (signal.aborted || nth !== asked) return;
      note.textContent = "";
      // What stands there answers another question, or is old.
      place.hidden = true;
      put(wrong, problem(error));
      announce(error.message);
    }
    back.disabled = number === 1;
    next.disabled = following === null;
    place.removeAttribute("aria-busy");
  }

  return {
    element: [note, wrong, place],
    place,
    buttons: h("div", { class: "buttons" }, back, next),
    load,
    // From the first page on. The address names the search.
    search: (hash, state) => { cursors = [null]; return go(hash, state); },
  };
}

// Chooses one of the words, or any. A word that only a link names stays as it is, so that the gate refuses it and says why.
export const choice = (id, words, chosen = "") => h("select", { id }, ["", ...words, ...(chosen === "" || words.includes(chosen) ? [] : [chosen])].map(word =>
  h("option", { value: word, selected: word === chosen }, word === "" ? "any" : word)));

// A bar of a part from 0 to 1. Its number stands in another column.
function measure(part) {
  return () => {
    const inner = h("span");
    const outer = h("span", { class: "measure", "aria-hidden": "true" }, inner);
    const show = part => { inner.style.width = `${Math.min(1, Math.max(0, part)) * 100}%`; };
    outer.refresh = cell => show(cell.part);
    show(part);
    return outer;
  };
}

export function bar(part) {
  const cell = measure(part);
  cell.part = part;
  return cell;
}

// A line of numbers, for those who see it; the numbers are in the text beside it.
export function spark(values) {
  const most = Math.max(1e-9, ...values);
  const points = values.map((value, nth) => `${(nth * 100 / Math.max(1, values.length - 1)).toFixed(1)},${(29 - 28 * value / most).toFixed(1)}`);
  const svg = document.createElementNS(SVG, "svg");
  set(svg, { viewBox: "0 0 100 30", preserveAspectRatio: "none", class: "spark", "aria-hidden": "true" });
  const line = document.createElementNS(SVG, "polyline");
  set(line, { points: points.join(" ") });
  svg.append(line);
  return svg;
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

export const code = text => text === null || text === undefined ? null : h("code", {}, text);

const SIGNS = { "completed": "good", "in-flight": "run", "unknown": "warn", "dead": "warn" };
export const stateWord = state => h("span", { class: "word", "data-state": SIGNS[state] }, state);

export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor(whole % 3600 / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor(whole % 86400 / 3600)} h`;
}

export function short(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.01) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
}

// The gate gives null where it has not counted yet.
export const count = number => number === null || number === undefined ? "not known" : new Intl.NumberFormat("en").format(number);
export const some = (number, one, more = `${one}s`) => `${count(number)} ${number === 1 ? one : more}`;
export const rate = number => typeof number !== "number" ? count(null) : number >= 100 ? count(Math.round(number)) : number >= 10 ? number.toFixed(1) : number.toFixed(2);

export function bytes(number) {
  if (number < 1024) return `${number} B`;
  if (number < 1 << 20) return `${(number / 1024).toFixed(1)} KiB`;
  if (number < 1 << 30) return `${(number / (1 << 20)).toFixed(1)} MiB`;
  return `${(number / (1 << 30)).toFixed(1)} GiB`;
}

// Beside a time, by the clock of the gate: how long ago something happened, which is never ahead, or how far off a term is.
const ago = away => `${duration(away)} ago`;
const off = away => away < 0 ? `in ${duration(-away)}` : ago(away);
const beside = (text, gate, isTerm) => (isTerm ? off : ago)((gate.now() - Date.parse(text)) / 1000);
const utc = text => text.replace("T", " ").replace(/\.\d+Z$/, " UTC");

// In UTC, as in the logs.
export const time = (text, gate, isTerm = false) => text ? h("span", {}, h("time", { datetime: text }, utc(text)), gate ? ` (${beside(text, gate, isTerm)})` : "") : null;

// The same in a list.
export const moment = (text, gate, isTerm = false) => h("time", { datetime: text, title: text }, beside(text, gate, isTerm));

// What is not asked for again by itself says how old it is.
export const asOf = gate => `As of ${utc(new Date(gate.now()).toISOString()).slice(11)}; r loads it again.`;

export const shortId = id => `${id.slice(0, 16)}…`;
export const recordLink = id => h("a", { href: `#/records/${id}`, class: "mono" }, shortId(id));

// Where there is a problem, its sentence.
export function problem(error) {
  return h("div", { class: "note bad" }, h("p", { class: "wrong" }, error.title ?? "The gate does not answer"),
    error.message && error.message !== error.title ? h("p", {}, error.message) : null);
}
