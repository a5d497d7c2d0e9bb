//! The path syntax of other routers: recognised in order to say what to write instead.
//!
//! Globs, `:id`, `<id>`, `{id:int}` and regular expressions consist of characters that a path may have, or nearly so. Taken
//! literally, they match no request, and a route that was meant to protect a path protects nothing.

use std::fmt;

use super::{Pattern, check_literal};

/// Syntax of another router.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Foreign {
    syntax: Syntax,
    /// The part of the path that has it.
    found: String,
    /// Paths that say the same, each for a route of its own; empty where no path does.
    pub instead: Vec<String>,
    /// What it takes all paths with, `/v1/charge` of `/v1/charge*`, where `instead` takes that path and those below it alone.
    pub beginning: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Syntax {
    /// `*`, `**`
    Glob,
    /// `:id`, `<id>`, `{id:int}`
    Parameter,
    /// `.*`, `[0-9]+`, `(a|b)`
    Regex,
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { found, .. } = self;
        match self.syntax {
            Syntax::Glob => f.write_str("`*` is not a wildcard in a path"),
            Syntax::Parameter => write!(f, "`{found}`: parameters are not written like this in a path"),
            Syntax::Regex => write!(f, "`{found}` looks like a regular expression, which a path cannot have"),
        }
    }
}

/// The most paths that are suggested in the place of one.
const MOST_INSTEAD: usize = 4;

/// Ends of regular expressions for a subtree.
const SUBTREES: [&str; 5] = ["(/|$)(.*)", "(?:/.*)?", "(/.*)?", "(/.+)?", "(/.*)"];

/// The first syntax of another router in the text of a path.
pub(super) fn find(text: &str) -> Option<Foreign> {
    let (syntax, found) = detect(text)?;
    let inner = without_anchors(text);
    let (instead, beginning) = (instead(inner), beginning(inner));
    let beginning = beginning.filter(|root| matches!(&instead[..], [path] if path.starts_with(&format!("{root}/{{*"))));
    Some(Foreign { syntax, found: found.to_owned(), instead, beginning: beginning.map(str::to_owned) })
}

/// What stands before a wildcard that ends a path in the middle of a segment.
fn beginning(path: &str) -> Option<&str> {
    let root = ANYTHING.iter().find_map(|end| path.strip_suffix(end))?;
    is_literal(split(root).last()?).then_some(root)
}

/// Ends of globs and expressions for all that begins like this.
const ANYTHING: [&str; 6] = ["**", "(.*)", "(.+)", ".*", ".+", "*"];

/// Which syntax that is, and the part of the path that has it.
fn detect(text: &str) -> Option<(Syntax, &str)> {
    if has_query(text) {
        return None;
    }
    let inner = without_anchors(text);
    let pieces = split(inner);
    match pieces.iter().find_map(|piece| Some((syntax(piece)?, *piece))) {
        Some((Syntax::Regex, _)) => Some((Syntax::Regex, text)),
        None if inner.len() < text.len() => Some((Syntax::Regex, text)),
        found => found,
    }
}

/// Without what says in other routers that an expression follows (`~` and `~*` of nginx, `~` of Kong), and without its anchors.
fn without_anchors(text: &str) -> &str {
    let text = match text.strip_prefix('~').map(|text| text.strip_prefix('*').unwrap_or(text).trim_start()) {
        // One that does not begin with a slash is for a part of the path.
        Some(expression) if expression.trim_start_matches(['^', '\\']).starts_with('/') => expression,
        _ => text,
    };
    let text = text.strip_prefix('^').unwrap_or(text);
    text.strip_suffix('$').unwrap_or(text)
}

/// Whether the path has a query or a fragment, which is another mistake. Behind a group, a class, a quantifier or a
/// parameter, `?` says that it is optional.
fn has_query(text: &str) -> bool {
    let mut segment = "";
    text.char_indices().any(|(at, char)| {
        let (before, after) = (&text[..at], &text[at + char.len_utf8()..]);
        match char {
            '#' => true,
            '/' => {
                segment = after;
                false
            }
            '?' => {
                let is_parameter = segment.starts_with(':') && (after.is_empty() || after.starts_with('/'));
                !(before.ends_with(['(', ')', ']', '*', '+']) || after.starts_with('}') || is_parameter)
            }
            _ => false,
        }
    })
}

/// The segments of a path. A slash in a character class is part of the class.
fn split(path: &str) -> Vec<&str> {
    let mut in_class = false;
    let ends_segment = |char: char| {
        in_class = match char {
            '[' => path.contains(']'),
            ']' => false,
            _ => in_class,
        };
        char == '/' && !in_class
    };
    path.strip_prefix('/').unwrap_or(path).split(ends_segment).collect()
}

fn syntax(segment: &str) -> Option<Syntax> {
    let braced = braced(segment);
    if let Some(inner) = braced {
        return named_in_braces(inner).map(|_| Syntax::Parameter);
    }
    if in_angles(segment).is_some() || after_colon(segment).is_some() {
        return Some(Syntax::Parameter);
    }
    let is_regex = is_unbalanced(segment)
        || segment.starts_with('(')
        || segment.ends_with('+')
        || segment.contains(['[', ']', '\\', '^', '|'])
        || [".*", ".+", "(?", ")?"].iter().any(|word| segment.contains(word));
    match segment {
        _ if is_regex => Some(Syntax::Regex),
        _ if segment.contains('*') => Some(Syntax::Glob),
        _ => None,
    }
}

/// Whether it is a part of a group that has a slash in it.
fn is_unbalanced(segment: &str) -> bool {
    segment.matches('(').count() != segment.matches(')').count()
}

/// The name of a parameter of another router, and whether it takes more than one segment.
type Parameter<'a> = (&'a str, bool);

/// The text between the braces of a segment.
fn braced(segment: &str) -> Option<&str> {
    let inner = segment.strip_prefix('{')?.strip_suffix('}')?;
    (!inner.contains(['{', '}'])).then_some(inner)
}

/// `{id:int}`, `{id?}`, `{proxy+}`, `{rest...}`, `{**rest}` and the like, without the braces. What is written as in this
/// gate is none of them.
fn named_in_braces(inner: &str) -> Option<Parameter<'_>> {
    if let Some(name) = inner.strip_prefix("**") {
        return is_name(name).then_some((name, true));
    }
    let (name, rest) = leading_name(inner)?;
    let takes_more = matches!(rest, "+" | "*" | "..." | "=**" | ":path" | ":.*" | ":.+");
    rest.starts_with([':', '=', '+', '*', '.', '?']).then_some((name, takes_more))
}

/// `<id>`, `<int:id>`, `<id:\d+>`, `<path:rest>`, `<rest..>`
fn in_angles(segment: &str) -> Option<Parameter<'_>> {
    let inner = segment.strip_prefix('<')?.strip_suffix('>')?;
    let (converter, name) = inner.split_once(':').unwrap_or(("", inner));
    let (name, dots) = name.strip_suffix("..").map_or((name, false), |name| (name, true));
    let name = if is_name(name) { name } else { converter };
    Some((if is_name(name) { name } else { "x" }, dots || converter == "path"))
}

/// `:id`, `:id(\d+)`, `:rest*`. A name begins with a letter or an underscore.
fn after_colon(segment: &str) -> Option<Parameter<'_>> {
    let inner = segment.strip_prefix(':')?;
    let begins = |name: &str| name.starts_with(|char: char| char.is_ascii_alphabetic() || char == '_');
    let (name, rest) = leading_name(inner).filter(|(name, _)| begins(name))?;
    Some((name.trim_end_matches('-'), matches!(rest, "*" | "+" | "(.*)" | "(.+)" | "(*)")))
}

fn leading_name(text: &str) -> Option<(&str, &str)> {
    let end = text.find(|char: char| !is_of_name(char)).unwrap_or(text.len());
    (end > 0).then(|| text.split_at(end))
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.chars().all(is_of_name)
}

fn is_of_name(char: char) -> bool {
    char.is_ascii_alphanumeric() || matches!(char, '_' | '-')
}

/// The paths that say the same as one of another router, without its anchors.
fn instead(path: &str) -> Vec<String> {
    let path = path.replace("\\/", "/");
    let (path, below) = match SUBTREES.iter().find_map(|end| path.strip_suffix(end)) {
        Some(root) => (root, true),
        None => (&*path, false),
    };
    let mut names = Names::default();
    let mut pieces = split(path);
    // `/v1/(/.*)?` leaves an empty segment.
    if below && pieces.last() == Some(&"") {
        pieces.pop();
    }
    let mut paths = vec![String::new()];
    for (place, piece) in pieces.iter().enumerate() {
        let is_last = place + 1 == pieces.len() && !below;
        let Some(choices) = translated(piece, is_last, &mut names) else { return Vec::new() };
        let longer = paths.iter().flat_map(|path| choices.iter().map(move |choice| format!("{path}/{choice}")));
        paths = longer.collect();
        if paths.len() > MOST_INSTEAD {
            return Vec::new();
        }
    }
    if below {
        let rest = names.rest("rest");
        paths.iter_mut().for_each(|path| *path = format!("{path}/{rest}"));
    }
    let is_path = |path: &String| detect(path).is_none() && Pattern::read(path).is_ok();
    if paths.iter().all(is_path) { paths } else { Vec::new() }
}

/// The segments that say the same as one of another router; nothing where none does.
fn translated(segment: &str, is_last: bool, names: &mut Names) -> Option<Vec<String>> {
    let parameter = braced(segment).and_then(named_in_braces).or_else(|| in_angles(segment));
    if let Some((name, takes_more)) = parameter.or_else(|| after_colon(segment)) {
        return names.parameter(name, takes_more, is_last).map(one);
    }
    let Some(syntax) = syntax(segment) else {
        names.note(segment);
        return Some(one(segment.to_owned()));
    };
    if is_unbalanced(segment) {
        return None;
    }
    if let Some(name) = segment.strip_prefix('*').filter(|name| is_name(name)) {
        return names.parameter(name, true, is_last).map(one);
    }
    let (group, inner) = ungrouped(segment);
    if matches!(inner, "*" | ".*" | ".+" | ".*?" | ".+?") {
        return names.parameter(group.unwrap_or(if is_last { "rest" } else { "x" }), is_last, is_last).map(one);
    }
    if inner == "**" {
        return names.parameter("rest", true, is_last).map(one);
    }
    let alternatives: Vec<&str> = inner.split('|').collect();
    if alternatives.len() > 1 && alternatives.iter().all(|word| is_literal(word)) {
        return Some(alternatives.into_iter().map(str::to_owned).collect());
    }
    let root = ANYTHING.iter().find_map(|end| segment.strip_suffix(end));
    let begins_more = |root: &&str| segment.len() == root.len() + 1 && root.ends_with(['-', '_', '.', '~']);
    if let Some(root) = root.filter(|root| is_last && is_literal(root) && !begins_more(root)) {
        return Some(one(format!("{root}/{}", names.rest("rest"))));
    }
    let unescaped = segment.replace("\\.", ".").replace("\\-", "-");
    if syntax == Syntax::Regex && is_literal(&unescaped) {
        return Some(one(unescaped));
    }
    names.parameter(group.unwrap_or("x"), false, is_last).map(one)
}

/// The name of a group that is the whole segment, and what stands in it; else the segment.
fn ungrouped(segment: &str) -> (Option<&str>, &str) {
    let group = segment.strip_suffix('?').unwrap_or(segment);
    let Some(inner) = group.strip_prefix('(').and_then(|group| group.strip_suffix(')')) else {
        return (None, segment);
    };
    if inner.contains(['(', ')']) {
        return (None, segment);
    }
    if let Some(inner) = inner.strip_prefix("?:") {
        return (None, inner);
    }
    let named = inner.strip_prefix("?P<").or_else(|| inner.strip_prefix("?<"));
    match named.and_then(|named| named.split_once('>')) {
        Some((name, inner)) if is_name(name) => (Some(name), inner),
        _ => (None, inner),
    }
}

/// Whether it is a segment of a path as it stands.
fn is_literal(segment: &str) -> bool {
    !segment.is_empty() && syntax(segment).is_none() && check_literal(segment).is_ok()
}

fn one(segment: String) -> Vec<String> {
    vec![segment]
}

/// The names of a path's parameters: each stands once.
#[derive(Default)]
struct Names(Vec<String>);

impl Names {
    /// Takes up the name of a segment that is a parameter already.
    fn note(&mut self, segment: &str) {
        self.0.extend(braced(segment).map(|inner| inner.trim_start_matches('*').to_owned()));
    }

    /// A parameter; nothing where it would take more than one segment and something follows it.
    fn parameter(&mut self, name: &str, takes_more: bool, is_last: bool) -> Option<String> {
        match (takes_more, is_last) {
            (true, true) => Some(self.rest(name)),
            (true, false) => None,
            (false, _) => Some(format!("{{{}}}", self.fresh(name))),
        }
    }

    fn rest(&mut self, name: &str) -> String {
        format!("{{*{}}}", self.fresh(name))
    }

    /// The name, with a number where it is taken.
    fn fresh(&mut self, name: &str) -> String {
        let numbered = (2..).map(|number| format!("{name}{number}"));
        let fresh = std::iter::once(name.to_owned()).chain(numbered).find(|name| !self.0.contains(name));
        let fresh = fresh.unwrap_or_default();
        self.0.push(fresh.clone());
        fresh
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::Invalid;
    use super::*;

    /// The syntax found, and what is to be written instead.
    fn told(path: &str) -> (Syntax, Vec<String>) {
        match Pattern::parse(path) {
            Err(Invalid::Foreign(Foreign { syntax, instead, .. })) => (syntax, instead),
            other => panic!("{path}: {other:?}"),
        }
    }

    #[test]
    fn what_a_wildcard_takes_beyond_a_segment_is_known() {
        for (path, beginning) in [
            ("/v1/charge*", Some("/v1/charge")),
            ("/v1/charge.*", Some("/v1/charge")),
            ("^/v1/charge", None),
            ("/v1/charge/*", None),
            ("/v1/charge(/.*)?", None),
            ("/v1/:id/charge*", None),
            ("/*", None),
        ] {
            assert_eq!(Pattern::parse(path).unwrap_err().beginning(), beginning, "{path}");
        }
    }

    #[test]
    fn foreign_syntax_has_an_equivalent_path() {
        use Syntax::{Glob, Parameter, Regex};
        for (path, syntax, instead) in [
            ("/v1/orders/*", Glob, "/v1/orders/{*rest}"),
            ("/v1/orders/**", Glob, "/v1/orders/{*rest}"),
            ("/v1/orders*", Glob, "/v1/orders/{*rest}"),
            ("/v1/orders-*", Glob, "/v1/{x}"),
            ("/v1/*/capture", Glob, "/v1/{x}/capture"),
            ("/*/*/*", Glob, "/{x}/{x2}/{*rest}"),
            ("/v1/{rest}/*", Glob, "/v1/{rest}/{*rest2}"),
            ("/v1/*.json", Glob, "/v1/{x}"),
            ("/v1/*path", Glob, "/v1/{*path}"),
            ("/*", Glob, "/{*rest}"),
            ("*", Glob, "/{*rest}"),
            ("v1/*", Glob, "/v1/{*rest}"),
            ("/v1/:id", Parameter, "/v1/{id}"),
            ("/v1/:id/capture", Parameter, "/v1/{id}/capture"),
            ("/:id/:id", Parameter, "/{id}/{id2}"),
            ("/v1/:id?", Parameter, "/v1/{id}"),
            ("/v1/:id(\\d+)", Parameter, "/v1/{id}"),
            ("/v1/:path*", Parameter, "/v1/{*path}"),
            ("/v1/:order_id.json", Parameter, "/v1/{order_id}"),
            ("/v1/<id>", Parameter, "/v1/{id}"),
            ("/v1/<int:id>/capture", Parameter, "/v1/{id}/capture"),
            ("/v1/<id:\\d+>", Parameter, "/v1/{id}"),
            ("/v1/<path:rest>", Parameter, "/v1/{*rest}"),
            ("/v1/<rest..>", Parameter, "/v1/{*rest}"),
            ("/v1/{id:int}", Parameter, "/v1/{id}"),
            ("/v1/{id:[0-9]+}/a", Parameter, "/v1/{id}/a"),
            ("/v1/{id?}", Parameter, "/v1/{id}"),
            ("/v1/{proxy+}", Parameter, "/v1/{*proxy}"),
            ("/v1/{rest...}", Parameter, "/v1/{*rest}"),
            ("/v1/{**rest}", Parameter, "/v1/{*rest}"),
            ("/v1/{name=**}", Parameter, "/v1/{*name}"),
            ("/v1/.*", Regex, "/v1/{*rest}"),
            ("/v1/.+", Regex, "/v1/{*rest}"),
            ("/v1/(.*)", Regex, "/v1/{*rest}"),
            ("/v1/.*/capture", Regex, "/v1/{x}/capture"),
            ("/v1/orders.*", Regex, "/v1/orders/{*rest}"),
            ("/v1/orders(/.*)?", Regex, "/v1/orders/{*rest}"),
            ("/v1/orders(/|$)(.*)", Regex, "/v1/orders/{*rest}"),
            ("^/v1/orders/(.*)$", Regex, "/v1/orders/{*rest}"),
            ("^/v1/orders$", Regex, "/v1/orders"),
            ("~ ^/v1/orders$", Regex, "/v1/orders"),
            ("/v1/orders-.*", Regex, "/v1/orders-/{*rest}"),
            ("~* ^/v1/orders/.*", Regex, "/v1/orders/{*rest}"),
            ("~/v1/orders/(?<id>\\d+)$", Regex, "/v1/orders/{id}"),
            ("^/v1/orders", Regex, "/v1/orders"),
            ("/v1/orders$", Regex, "/v1/orders"),
            ("/v1/orders/[0-9]+", Regex, "/v1/orders/{x}"),
            ("/v1/orders/[^/]+/lines", Regex, "/v1/orders/{x}/lines"),
            ("/v1/orders/[0-9]{3}", Regex, "/v1/orders/{x}"),
            ("/v1/orders/\\d+", Regex, "/v1/orders/{x}"),
            ("/v1/orders/(\\d+)/lines", Regex, "/v1/orders/{x}/lines"),
            ("/v1/(?P<id>[a-z]+)", Regex, "/v1/{id}"),
            ("/v1/(?<id>[a-z]+)", Regex, "/v1/{id}"),
            ("/v1/(?:[a-z]+)", Regex, "/v1/{x}"),
            ("\\/v1\\/orders", Regex, "/v1/orders"),
            ("/v1/orders\\.json", Regex, "/v1/orders.json"),
            ("/v1/(orders|charges)", Regex, "/v1/orders /v1/charges"),
            ("/v1/orders|charges", Regex, "/v1/orders /v1/charges"),
            ("/v1/c++", Regex, "/v1/{x}"),
            ("/v1/id+", Regex, "/v1/{x}"),
            // Nothing may follow a rest, and a route for each of many paths is not suggested.
            ("/v1/**/capture", Glob, ""),
            ("/v1/<path:rest>/capture", Parameter, ""),
            ("/(a|b|c)/(d|e|f)", Regex, ""),
            ("/v1/orders(/[a-z]+", Regex, ""),
        ] {
            let instead: Vec<String> = instead.split_whitespace().map(str::to_owned).collect();
            assert_eq!(told(path), (syntax, instead), "{path}");
        }
    }

    #[test]
    fn valid_path_characters_are_literal() {
        for path in [
            "/v1/charges:capture",
            "/v1/:",
            "/v1/:7",
            "/v1/a+b",
            "/odata/$batch",
            "/odata/Orders(7)",
            "/odata/Orders('a.b')/Approve",
            "/v1/a,b;c=d&e!",
            "/v1/.well-known",
            "/v1/{id}/{*rest}",
            "/@user/~home",
            "/v1/%2A",
        ] {
            assert!(Pattern::parse(path).is_ok(), "{path}");
        }
        for path in ["/v1?expand=*", "/v1#*", "/v1/orders/?", "/*#top"] {
            assert!(matches!(Pattern::parse(path), Err(Invalid::NotPath(_))), "{path}");
        }
    }

    proptest! {
        /// In particular, what is suggested is a path.
        #[test]
        fn whatever_is_written_has_an_end(text in "[/a:{}<>*.?$^()+|\\[\\]\\\\%#é-]{0,12}") {
            if let Err(Invalid::Foreign(foreign)) = Pattern::parse(&text) {
                prop_assert!(!foreign.to_string().is_empty() && foreign.instead.len() <= MOST_INSTEAD);
                for path in foreign.instead {
                    prop_assert!(Pattern::parse(&path).is_ok(), "{} for {}", path, text);
                }
            }
        }
    }
}
