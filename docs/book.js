"use strict";

(() => {
    // What scrolls sideways can be reached by the keyboard.
    const boxes = document.querySelectorAll("pre > code, .table-wrapper");
    const mark = () => {
        for (const box of boxes) {
            if (box.scrollWidth > box.clientWidth) {
                box.tabIndex = 0;
            } else {
                box.removeAttribute("tabindex");
            }
        }
    };
    mark();
    window.addEventListener("load", mark);
    window.addEventListener("resize", mark);

    // The button of the table of contents is a button (docs/build makes it one), and moves mdBook's checkbox.
    const button = document.getElementById("mdbook-sidebar-toggle");
    const state = document.getElementById("mdbook-sidebar-toggle-anchor");
    if (button && state && button.localName === "button") {
        button.addEventListener("click", () => state.click());
    }
})();
