//! `fingerprint` of a policy.

use http::HeaderName;

use super::{STEPS, TOKEN, hinted};
use crate::config::declare::{Keys as _, keys};
use crate::config::kinds::{Kind, list, nested, set, text, words};
use crate::config::node::{Node, Table, Wrong};
use crate::idempotency::fingerprint::{BodyForm, Pointer, Recipe};

keys! {
    /// `fingerprint`
    pub(super) struct Fingerprint "fingerprint" {
        /// What counts: "method", "path", "query", "body", "header:NAME". At least one.
        of: Vec<Ingredient> = ingredients(&Recipe::default()) => set(
            "write [\"method\", \"path\", \"query\", \"body\"], or remove it",
            text(format!("^(method|path|query|body|header:{TOKEN})$"), ingredient)
        );
        /// How the body counts: "auto" (JSON, by its Content-Type, without regard to white space and the order of
        /// names; multipart without its boundary; anything else byte for byte), "bytes", "json" (as JSON whatever its
        /// Content-Type; byte for byte if it is none), or "none" (not at all).
        body: BodyForm = Recipe::default().form => words(&[
            ("auto", BodyForm::Auto), ("bytes", BodyForm::Bytes), ("json", BodyForm::Json), ("none", BodyForm::None),
        ]);
        /// The parts of a JSON body that count, as JSON pointers; all of it if the list is empty, or if the body has none of
        /// them.
        include: Vec<Pointer> = Vec::new() => list(text(format!("^({STEPS})?$"), pointer));
        /// The parts of a JSON body that do not count, such as ["/sent_at"].
        exclude: Vec<Pointer> = Vec::new() => list(text(format!("^{STEPS}$"), excluded));
    }
}

/// The table as a recipe.
pub(super) fn recipe() -> Kind<Recipe> {
    let keys = nested::<Fingerprint>().map(|keys| Ok(keys.into_recipe()), Fingerprint::of_recipe);
    keys.merged(|node, base| {
        let table = Table::open(node.clone(), Fingerprint::SECTION);
        Fingerprint::read(&table, Fingerprint::of_recipe(&base)).into_recipe()
    })
}

/// What several keys show.
pub(super) fn check(table: &Table<'_>, recipe: &Recipe) {
    let reads_json = recipe.body && matches!(recipe.form, BodyForm::Auto | BodyForm::Json);
    for (key, pointers) in [("include", &recipe.include), ("exclude", &recipe.exclude)] {
        if !reads_json && !pointers.is_empty() {
            let wrong = Wrong::new("it has no effect: the body does not count as JSON");
            let remove = match table.get(key) {
                Some(_) => "remove it".to_owned(),
                None => format!("it comes from the preset or [defaults]: write {key} = []"),
            };
            let hint = format!("{remove}, or let `of` have \"body\" and `body` be \"auto\" or \"json\"");
            table.report(key, wrong.hint(hint));
        }
    }
    let left_out = recipe.include.iter().find(|part| recipe.exclude.iter().any(|whole| part.is_within(whole)));
    if let Some(part) = left_out {
        let wrong = Wrong::new(format!("`{part}` does not count: `exclude` leaves it out"));
        table.report("include", wrong.hint("remove it from one of them"));
    }
}

impl Fingerprint {
    fn of_recipe(recipe: &Recipe) -> Self {
        let (include, exclude) = (recipe.include.clone(), recipe.exclude.clone());
        Self { of: ingredients(recipe), body: recipe.form, include, exclude }
    }

    fn into_recipe(self) -> Recipe {
        Recipe {
            method: self.of.contains(&Ingredient::Method),
            path: self.of.contains(&Ingredient::Path),
            query: self.of.contains(&Ingredient::Query),
            body: self.of.contains(&Ingredient::Body),
            headers: self.of.into_iter().filter_map(Ingredient::header).collect(),
            form: self.body,
            include: self.include,
            exclude: self.exclude,
        }
    }
}

fn ingredients(recipe: &Recipe) -> Vec<Ingredient> {
    let parts = [
        (recipe.method, Ingredient::Method),
        (recipe.path, Ingredient::Path),
        (recipe.query, Ingredient::Query),
        (recipe.body, Ingredient::Body),
    ];
    let parts = parts.into_iter().filter(|(counts, _)| *counts).map(|(_, part)| part);
    parts.chain(recipe.headers.iter().cloned().map(Ingredient::Header)).collect()
}

/// One of `fingerprint.of`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ingredient {
    Method,
    Path,
    Query,
    Body,
    Header(HeaderName),
}

impl Ingredient {
    fn header(self) -> Option<HeaderName> {
        match self {
            Self::Header(name) => Some(name),
            Self::Method | Self::Path | Self::Query | Self::Body => None,
        }
    }
}

impl std::fmt::Display for Ingredient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Method => f.write_str("method"),
            Self::Path => f.write_str("path"),
            Self::Query => f.write_str("query"),
            Self::Body => f.write_str("body"),
            Self::Header(name) => write!(f, "header:{name}"),
        }
    }
}

fn ingredient(node: &Node<'_>) -> Result<Ingredient, Wrong> {
    let text = node.filled()?;
    match text.split_once(':') {
        Some(("header", name)) => HeaderName::from_bytes(name.as_bytes())
            .map(Ingredient::Header)
            .map_err(|_| Wrong::new(format!("`{name}` is not a header name")).hint("such as \"header:X-Tenant\"")),
        None if text == "method" => Ok(Ingredient::Method),
        None if text == "path" => Ok(Ingredient::Path),
        None if text == "query" => Ok(Ingredient::Query),
        None if text == "body" => Ok(Ingredient::Body),
        _ => {
            let wrong = Wrong::new(format!("`{text}` is not a part of a request"));
            Err(wrong.hint("use \"method\", \"path\", \"query\", \"body\" or \"header:NAME\""))
        }
    }
}

/// Without the whole document, all JSON bodies would be equal.
fn excluded(node: &Node<'_>) -> Result<Pointer, Wrong> {
    if node.text()?.is_empty() {
        let wrong = Wrong::new("\"\" is the whole document: without it all JSON bodies are equal");
        return Err(wrong.hint("name parts such as \"/sent_at\", or let no body count with body = \"none\""));
    }
    pointer(node)
}

fn pointer(node: &Node<'_>) -> Result<Pointer, Wrong> {
    let hint = "write a JSON pointer (RFC 6901) such as \"/payment/amount\"";
    Pointer::parse(node.text()?).map_err(|message| hinted(&message, hint))
}
