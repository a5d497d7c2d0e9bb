// Asks the gate. The token stays in this tab: sessionStorage goes with it, and nothing else has it.

const PLACE = "oncegate-token";
const PATIENCE = 20000;

export class Problem extends Error {
  constructor(status, body) {
    super(body.detail ?? `The gate answered ${status}.`);
    this.status = status;
    this.title = body.title ?? "The request failed";
    this.code = body.code ?? "";
    this.body = body;
  }
}

let token = stored();
let refused = () => {};

function stored() {
  try { return sessionStorage.getItem(PLACE); } catch { return null; }
}

export const hasToken = () => token !== null;

export function setToken(value) {
  token = value;
  try {
    if (value === null) sessionStorage.removeItem(PLACE); else sessionStorage.setItem(PLACE, value);
  } catch { /* It is kept in memory. */ }
}

// Sets what is called when the gate demands a token.
export function onRefusal(tell) { refused = tell; }

// match: the `etag` of what is to be changed. Where another stands there by now, the gate does nothing.
export async function ask(path, { method = "GET", body, match, signal, patience = PATIENCE } = {}) {
  const headers = { "X-Requested-With": "oncegate-page" }, mine = token;
  if (token !== null) headers.Authorization = `Bearer ${token}`;
  if (match !== undefined) headers["If-Match"] = match;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const signals = [AbortSignal.timeout(patience), ...(signal ? [signal] : [])];
  const answer = await fetch(path, {
    method, headers, body: body === undefined ? undefined : JSON.stringify(body),
    signal: AbortSignal.any(signals), cache: "no-store", credentials: "omit", redirect: "error", referrerPolicy: "no-referrer",
  });
  const text = await answer.text();
  let read = {};
  try { read = text === "" ? {} : JSON.parse(text); } catch { /* Not of the gate: the status says it. */ }
  if (answer.ok) return read;
  const problem = new Problem(answer.status, read);
  // Another token may have come since it was asked.
  if (answer.status === 401 && token === mine) refused(problem);
  throw problem;
}

export function query(parameters) {
  const set = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const text = set.map(([name, value]) => `${encodeURIComponent(name)}=${encodeURIComponent(value)}`).join("&");
  return text === "" ? "" : `?${text}`;
}
