// Asks for a reason, and for a second look, before something is changed.

import { Problem } from "/page/api.js";
import { h, problem, put } from "/page/dom.js";

// The dialog, and what follows: the focus returns to what opened it, or goes to the heading of the view if something was done.
export async function change(opener, what, { element, load, announce }) {
  const said = await askTwice(what);
  if (said === null) {
    opener.focus();
    return;
  }
  await load();
  element.querySelector("h1").focus();
  announce(said);
}

// The form, then a second look at what will happen and to what. Gives what to say when it is done, or null.
// title and fields: of the form, above the reason. isRight(): whether the fields can be sent; it tells what is wrong with them.
// look(reason): reads it anew, and gives { name, isDanger, changed, parts } of the second look. act(reason): does it, and gives what to say.
function askTwice({ title, fields, isRight = () => true, look, act }) {
  return new Promise(resolve => {
    let said = null;
    const heading = h("h2", { id: "change-title", tabindex: "-1" });
    const place = h("div");
    const dialog = h("dialog", { "aria-labelledby": "change-title" }, heading, place);
    const close = () => dialog.close();
    dialog.addEventListener("close", () => { dialog.remove(); resolve(said); });

    const reason = h("textarea", { id: "reason", required: true, maxlength: "2000", "aria-describedby": "reason-hint" });
    const form = h("form", { onsubmit: again }, fields,
      h("label", { for: "reason" }, "Reason", h("span", { class: "hint", id: "reason-hint" }, "It stands in the audit log. Write no secret there.")), reason,
      h("div", { class: "buttons" }, h("button", { class: "main" }, "Look at it again"), h("button", { type: "button", onclick: close }, "Cancel")));
    const back = () => h("button", { type: "button", onclick: () => { first(); reason.focus(); } }, "Back");

    function first() {
      heading.textContent = title;
      put(place, form);
    }

    async function again(event) {
      event.preventDefault();
      if (reason.value.trim() === "") {
        reason.value = "";
        reason.reportValidity();
        return;
      }
      if (!isRight()) return;
      try {
        second(await look(reason.value));
      } catch (error) {
        failed(error, "Nothing was done");
      }
    }

    function second({ name, isDanger, changed, parts }) {
      heading.textContent = `${name}: look again`;
      const go = h("button", { type: "button", class: isDanger ? "danger" : "main", id: "confirm", onclick: carryOut }, name);
      put(place, changed ? h("p", { class: "wrong" }, changed) : null, parts,
        h("div", { class: "buttons" }, changed ? null : go, back(), h("button", { type: "button", onclick: close }, "Cancel")));
      heading.focus();
    }

    async function carryOut(event) {
      event.currentTarget.disabled = true;
      try {
        said = await act(reason.value);
        close();
      } catch (error) {
        failed(error);
      }
    }

    function failed(error, without = "It is not known whether it was done") {
      const isProblem = error instanceof Problem;
      heading.textContent = isProblem ? "It was not done" : without;
      put(place, problem(isProblem ? error : new Error("The gate did not answer. Load the view again before you try once more.")),
        h("div", { class: "buttons" }, back(), h("button", { type: "button", onclick: close }, "Close")));
      heading.focus();
    }

    first();
    document.body.append(dialog);
    dialog.showModal();
    form.querySelector("input, textarea").focus();
  });
}
