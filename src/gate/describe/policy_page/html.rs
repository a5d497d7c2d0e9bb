//! The policy page for people.

use std::fmt::{self, Display, Write as _};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest as _, Sha256};

use super::document::{Accepts, Document, NewKeys, RoutePolicy};

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}\
    table{border-collapse:collapse}td,th{border:1px solid #8884;padding:.3rem .6rem;text-align:left;vertical-align:top}\
    code{font-family:ui-monospace,monospace}:root{color-scheme:light dark}";

/// What a browser may do with the page: use its one style sheet, and nothing else.
pub(super) fn security() -> String {
    let digest = STANDARD.encode(Sha256::digest(STYLE));
    format!(
        "default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
}

/// The whole page.
pub(super) fn page(document: &Document) -> String {
    let mut page = String::new();
    let _ = write!(
        page,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>Idempotency policy</title>\n\
         <style>{STYLE}</style>\n</head>\n<body>\n<h1>Idempotency policy</h1>\n\
         <p>A request with an idempotency key runs once. A retry with the same key gets the first answer again.</p>\n"
    );
    if document.routes.is_empty() {
        page.push_str("<p>No request is protected here.</p>\n");
    }
    for route in &document.routes {
        let _ = section(&mut page, route);
    }
    page.push_str("</body>\n</html>\n");
    page
}

fn section(page: &mut String, route: &RoutePolicy) -> fmt::Result {
    let methods = route.methods.join(", ");
    writeln!(page, "<h2><code>{} {}</code></h2>\n<table>", Text(&methods), Text(&route.path))?;
    let mut row = |name: &str, value: &dyn Display| writeln!(page, "<tr><th>{name}</th><td>{value}</td></tr>");
    if route.host != "*" {
        row("Host", &Codes(std::slice::from_ref(&route.host)))?;
    }
    row("Key", &Codes(&route.key.from))?;
    row("Key required", &if route.key.required { "yes" } else { "no; a request without a key is not protected" })?;
    row("Longest key", &format_args!("{} characters", route.key.max_length))?;
    row("A key belongs to", &Codes(&route.scope))?;
    row("An answer is kept for", &Span(route.ttl_seconds))?;
    row("An unknown outcome is kept for", &Span(route.unknown_ttl_seconds))?;
    if route.wait_seconds > 0.0 {
        row("A duplicate waits for", &Span(route.wait_seconds))?;
    }
    if let Some(NewKeys { new_keys, per_seconds, by }) = &route.quota {
        row("New keys", &format_args!("{new_keys} in {}, by {}", Span(*per_seconds), Text(by)))?;
    }
    row("Largest request body", &format_args!("{} bytes", route.max_request_body_bytes))?;
    row("Largest answer that is kept", &format_args!("{} bytes", route.max_response_body_bytes))?;
    if let Some(accepts) = route.accepts {
        let which = match accepts {
            Accepts::Always => "every request",
            Accepts::RespondAsync => "a request with Prefer: respond-async",
        };
        row("Answered with 202, and delivered later", &which)?;
    }
    for rule in &route.outcomes {
        row(rule.meaning, &Codes(&rule.of))?;
    }
    for rule in &route.outcomes_by_body {
        row(
            "Otherwise, by a value in a JSON answer",
            &format_args!("<code>{}</code>: {}", Text(&rule.pointer), rule.then),
        )?;
    }
    if !route.not_replayed.is_empty() {
        row("Headers that no retry gets", &Codes(&route.not_replayed))?;
    }
    writeln!(page, "</table>\n<h3>Problems</h3>\n<table>")?;
    writeln!(page, "<tr><th>Status</th><th>Code</th><th>Title</th><th>Send it again?</th></tr>")?;
    for problem in &route.problems {
        let code = Text(problem.code);
        write!(page, "<tr><td>{}</td><td><code>", problem.status)?;
        match problem.r#type.strip_prefix("http") {
            Some(_) => write!(page, "<a href=\"{}\">{code}</a>", Text(&problem.r#type))?,
            None => write!(page, "{code}")?,
        }
        let again = if problem.retryable { "yes" } else { "no" };
        writeln!(page, "</code></td><td>{}</td><td>{again}</td></tr>", Text(problem.title))?;
    }
    writeln!(page, "</table>")
}

/// Text, in which nothing is markup.
struct Text<'a>(&'a str);

impl Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|char| match char {
            '&' => f.write_str("&amp;"),
            '<' => f.write_str("&lt;"),
            '>' => f.write_str("&gt;"),
            '"' => f.write_str("&quot;"),
            '\'' => f.write_str("&#39;"),
            char => f.write_char(char),
        })
    }
}

/// Words as they are written in requests and configurations.
struct Codes<'a>(&'a [String]);

impl Display for Codes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().enumerate().try_for_each(|(place, code)| {
            let comma = if place > 0 { ", " } else { "" };
            write!(f, "{comma}<code>{}</code>", Text(code))
        })
    }
}

/// Seconds in the largest unit that leaves none over.
struct Span(f64);

impl Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(86_400.0, "day"), (3600.0, "hour"), (60.0, "minute"), (1.0, "second")];
        let fits = |unit: &&(f64, &str)| self.0 >= unit.0 && self.0 % unit.0 == 0.0;
        let (length, name) = units.iter().find(fits).unwrap_or(&(1.0, "second"));
        let count = self.0 / length;
        write!(f, "{count} {name}{}", if count == 1.0 { "" } else { "s" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_have_the_largest_unit_that_fits() {
        let shown = [86_400.0, 172_800.0, 5400.0, 90.0, 1.0, 0.5].map(|seconds| Span(seconds).to_string());
        assert_eq!(shown, ["1 day", "2 days", "90 minutes", "90 seconds", "1 second", "0.5 seconds"]);
    }
}
