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

export const $ = id => document.getElementById(id);

// Writes a text where it is another one: a reader of the screen hears of changes only.
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// A table that keeps its roles where the style shows it as a list. Columns: { name, kind: "number" | "bar" }.
export function table(caption, columns, empty) {
  const body = h("tbody", { role: "rowgroup" });
  const head = columns.map(({ name, kind }) => h("th", { role: "columnheader", scope: "col", class: kind }, name));
  const element = h("table", { role: "table" },
    h("caption", {}, caption),
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, head)),
    body);
  // Rows: { key, cells: [text or function that makes an element] }. A row with a known key keeps its elements, and with them
  // the focus; its texts change.
  const fill = rows => {
    const known = new Map([...body.children].map(row => [row.dataset.key, row]));
    const fresh = rows.map(({ key, cells }) => {
      const old = known.get(key);
      if (old && old.children.length === cells.length) {
        cells.forEach((cell, nth) => {
          if (typeof cell !== "function") write(old.children[nth], cell ?? "");
          else old.children[nth].firstChild?.refresh?.(cell);
        });
        return old;
      }
      const row = h("tr", { role: "row", "data-key": key });
      cells.forEach((cell, nth) => {
        const { name, kind } = columns[nth];
        const inside = typeof cell === "function" ? cell() : cell;
        row.append(nth === 0 ? h("th", { role: "rowheader", scope: "row" }, inside)
          : h("td", { role: "cell", class: kind, "data-label": name }, inside));
      });
      return row;
    });
    if (fresh.length === 0) fresh.push(h("tr", { role: "row" }, h("td", { role: "cell", class: "plain", colspan: columns.length }, empty)));
    const same = fresh.length === body.children.length && fresh.every((row, nth) => row === body.children[nth]);
    if (!same) body.replaceChildren(...fresh);
  };
  return { element, fill };
}

// The pages of a list, which the gate gives one at a time. While a page is asked for, no other can be.
export function pager(load) {
  // The cursors of the pages up to this one.
  let cursors = [null], following = null;
  const back = h("button", { type: "button", onclick: () => { cursors.pop(); load(); } }, "Previous page");
  const next = h("button", { type: "button", onclick: () => { cursors.push(following); load(); } }, "Next page");
  return {
    buttons: h("div", { class: "buttons" }, back, next),
    first: () => { cursors = [null]; },
    ask: () => { back.disabled = next.disabled = true; return cursors.at(-1); },
    failed: () => { back.disabled = cursors.length === 1; },
    show: cursor => {
      following = cursor;
      back.disabled = cursors.length === 1;
      next.disabled = following === null;
      return { number: cursors.length, isLast: following === null };
    },
  };
}

// A bar of a part from 0 to 1. Its number stands in another column.
export function measure(part) {
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

export const count = number => new Intl.NumberFormat("en").format(number);
export const some = (number, one, more = `${one}s`) => `${count(number)} ${number === 1 ? one : more}`;
export const rate = number => number >= 100 ? count(Math.round(number)) : number >= 10 ? number.toFixed(1) : number.toFixed(2);

export function bytes(number) {
  if (number < 1024) return `${number} B`;
  if (number < 1 << 20) return `${(number / 1024).toFixed(1)} KiB`;
  if (number < 1 << 30) return `${(number / (1 << 20)).toFixed(1)} MiB`;
  return `${(number / (1 << 30)).toFixed(1)} GiB`;
}

// In UTC, as in the logs. `now` is the clock of the gate, not of this browser.
export function time(text, now) {
  if (!text) return null;
  const shown = text.replace("T", " ").replace(/\.\d+Z$/, " UTC");
  const away = now && (Date.parse(now) - Date.parse(text)) / 1000;
  const beside = !now ? "" : away >= 0 ? ` (${duration(away)} ago)` : ` (in ${duration(-away)})`;
  return h("span", {}, h("time", { datetime: text }, shown), beside);
}

export const recordLink = (id, text) => h("a", { href: `#/records/${id}`, class: "mono" }, text ?? `${id.slice(0, 16)}…`);

// Where there is a problem, its sentence.
export function problem(error) {
  return h("div", { class: "note bad" }, h("p", { class: "wrong" }, error.title ?? "The gate does not answer"),
    error.message && error.message !== error.title ? h("p", {}, error.message) : null);
}
