// Asks for a reason, and for a second look, before something is changed.

import { h, problem, put, refuse } from "/page/dom.js";

// In bytes.
const MAX_REASON = 2000;

// A gate that refuses does nothing. One that fails may have done it, unless it says otherwise, and so may one that does not answer.
const isNotDone = ({ status, code, message }) => status < 500 || code === "overloaded" || (code === "store-unavailable" && /nothing was (done|changed)$/.test(message));

// The dialog, and what follows: the view is loaded again if something may have been done. The focus goes to the heading of the view if
// it was done, and else returns to what opened it. signal: aborted when the view is left, which closes the dialog.
export async function change(opener, what, { element, load, say, signal }) {
  const { wasTried, wasDone, said } = await askTwice(what, signal);
  if (wasTried && !signal.aborted) await load();
  if (said) say(said);
  if (signal.aborted) return;
  // What opened it may have been made anew.
  const isOpener = button => button.ariaLabel === opener.ariaLabel && button.textContent === opener.textContent;
  const back = wasDone ? null : [...element.querySelectorAll("button")].find(isOpener);
  // A hidden button takes no focus.
  (back?.offsetParent ? back : element.querySelector("h1")).focus();
}

// The form, then a second look at what will happen and to what. Gives whether it was tried and done, and what to say of it.
// title and fields: of the form, above the reason. isRight(): whether the fields can be sent; it tells what is wrong with them.
// look(reason): reads it anew, and gives { name, isDanger, changed, parts } of the second look. act(reason): does it, and gives what to say.
function askTwice({ title, fields, isRight = () => true, look, act }, signal) {
  return new Promise(resolve => {
    let wasTried = false, wasDone = false, said = "", isLooking = false, isRunning = false;
    const heading = h("h2", { id: "change-title", tabindex: "-1" });
    const place = h("div");
    const dialog = h("dialog", { "aria-labelledby": "change-title" }, heading, place);
    const close = () => dialog.close();
    // While it is done, only the view can go. Escape is held back as a key, too: browsers close a dialog at the second one.
    const hold = event => { if (isRunning) event.preventDefault(); };
    const end = () => {
      if (dialog.open || isRunning) return;
      dialog.remove();
      resolve({ wasTried, wasDone, said });
    };
    dialog.addEventListener("cancel", hold);
    dialog.addEventListener("keydown", event => { if (event.key === "Escape") hold(event); });
    dialog.addEventListener("close", end);
    signal.addEventListener("abort", close);

    const reason = h("textarea", { id: "reason", required: true, maxlength: `${MAX_REASON}`, "aria-describedby": "reason-hint" });
    const form = h("form", { onsubmit: again }, fields,
      h("label", { for: "reason" }, "Reason", h("span", { class: "hint", id: "reason-hint" }, "It stands in the audit log. Write no secret there.")), reason,
      h("div", { class: "buttons" }, h("button", { class: "main" }, "Look at it again"), h("button", { type: "button", onclick: close }, "Cancel")));
    const back = () => h("button", { type: "button", onclick: () => { first(); reason.focus(); } }, "Back");

    function first() {
      heading.textContent = title;
      put(place, form);
    }

    function turn(text, ...parts) {
      heading.textContent = text;
      put(place, parts);
      heading.focus();
    }

    async function again(event) {
      event.preventDefault();
      if (reason.value.trim() === "") return refuse(reason, "Say why.");
      if (new TextEncoder().encode(reason.value).length > MAX_REASON) return refuse(reason, `Say it in ${MAX_REASON} bytes. Letters beyond ASCII have two or more.`);
      if (isLooking || !isRight()) return;
      isLooking = true;
      try {
        second(await look(reason.value));
      } catch (error) {
        failed(error, "It was not done");
      }
      isLooking = false;
    }

    function second({ name, isDanger, changed, parts }) {
      const go = h("button", { type: "button", class: isDanger ? "danger" : "main", id: "confirm", onclick: confirm }, name);
      // This button may appear where "Look at it again" was: the second click of a double-click must not press it. A key press has the detail 0.
      const shown = performance.now();
      function confirm({ detail }) { if (detail === 0 || performance.now() - shown > 500) carryOut(name); }
      turn(`${name}: look again`, changed ? h("p", { class: "wrong" }, changed) : null, parts,
        h("div", { class: "buttons" }, changed ? null : go, back(), h("button", { type: "button", onclick: close }, "Cancel")));
    }

    async function carryOut(name) {
      isRunning = wasTried = true;
      turn(`${name}: it is being done`, h("p", {}, "Wait for the answer of the gate."));
      try {
        said = await act(reason.value);
        wasDone = true;
        close();
      } catch (error) {
        failed(error, error.soFar ? "It broke off" : isNotDone(error) ? "It was not done" : "It is not known whether it was done");
      }
      isRunning = false;
      end();
    }

    function failed(error, what) {
      const known = error.status ? error : new Error("The gate did not answer. Look at the view before you try once more.");
      // Where the dialog is gone, it is said in another view.
      if (!dialog.open) said = [`${title} ${what}.`, error.soFar, known.message].filter(part => part).join(" ");
      turn(what, error.soFar ? h("p", { class: "say" }, error.soFar) : null, problem(known),
        h("div", { class: "buttons" }, back(), h("button", { type: "button", onclick: close }, "Close")));
    }

    first();
    document.body.append(dialog);
    dialog.showModal();
    form.querySelector("input, textarea").focus();
  });
}
