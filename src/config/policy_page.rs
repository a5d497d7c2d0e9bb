//! `[policy_page]`

use std::sync::Arc;

use super::declare::Shown::Example;
use super::declare::{Keys as _, keys};
use super::kinds::text;
use super::node::{Node, Table, Wrong};
use crate::route::{Pattern, Router};

keys! {
    /// A page for clients, on every listener of `server`: for each protected route its methods and path, where its key is
    /// read, how long answers are kept, and every problem that it can answer. JSON, or HTML to browsers. It names no
    /// upstream, no secret and no text of a `const:` scope. Everyone who reaches the listener can read it.
    pub(super) struct PolicyPage "[policy_page]" {
        /// Where the page is, for any host. If omitted, there is none. A route that matches this path does not get its
        /// requests.
        path: Option<Arc<str>> = None => text(PATH, path).optional(), Example("\"/.well-known/idempotency\"");
    }
}

/// One path, and no pattern.
const PATH: &str = r"^/[^{}?#\s]*$";

/// Reads `[policy_page]`: the path of the page, if there is one.
pub(super) fn read(root: &Table<'_>) -> Option<Arc<str>> {
    let page = PolicyPage::read(&root.table("policy_page", PolicyPage::SECTION), PolicyPage::default());
    root.print("policy_page", page.print_table());
    page.path
}

/// Says which routes lose a request to the page. One for everything is not meant for it.
pub(super) fn advise(root: &Table<'_>, page: Option<&str>, router: &Router) {
    let Some(page) = page else { return };
    let matches = |pattern: &Pattern| pattern.matches(page) && pattern.to_string() != "/{*rest}";
    for route in router.routes().iter().filter(|route| matches(&route.path)) {
        root.table("policy_page", PolicyPage::SECTION).advise(
            "path",
            format!(
                "route `{}` ({}) matches {page}, and does not get its requests: the policy page answers them; choose \
                 another path for the page if the upstream needs this one",
                route.name, route.path
            ),
        );
    }
}

fn path(node: &Node<'_>) -> Result<Arc<str>, Wrong> {
    let text = node.filled()?;
    let wrong = Wrong::new(format!("`{text}` is not the path of a page"));
    let hint = "write one whole path, such as \"/.well-known/idempotency\"";
    match Pattern::parse(text) {
        Ok(_) if !text.contains('{') => Ok(text.into()),
        _ => Err(wrong.hint(hint)),
    }
}

#[cfg(test)]
mod tests {
    use crate::config::load_text;

    #[test]
    fn a_route_that_loses_requests_to_the_page_is_named() {
        let advice = |path: &str| {
            let text = format!(
                "[upstreams]\na = \"http://127.0.0.1\"\n[policy_page]\npath = \"/docs/policy\"\n\
                 [[routes]]\nname = \"x\"\npath = \"{path}\"\n"
            );
            let config = load_text("page.toml".into(), &text).unwrap();
            config.advice.into_iter().any(|advice| advice.key == "policy_page.path" && advice.message.contains("`x`"))
        };
        assert!(advice("/docs/{page}") && advice("/docs/policy") && advice("/docs/{*rest}"));
        assert!(!advice("/{*rest}") && !advice("/docs") && !advice("/docs/policy/x"));
    }
}
