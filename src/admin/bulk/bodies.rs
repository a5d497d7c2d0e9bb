//! The bodies of requests that change many records.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::bad;
use crate::admin::answer::Problem;
use crate::admin::resolve::ACTIONS;
use crate::admin::wanted::Wanted;

/// The body of `POST /api/v1/records/purge`.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::admin) struct PurgeBody {
    #[serde(default)]
    pub(super) filter: FilterBody,
    #[serde(default)]
    pub(super) all: bool,
    #[serde(default)]
    pub(super) dry_run: bool,
    #[serde(default)]
    pub(super) reason: String,
    #[serde(default, deserialize_with = "given")]
    #[schemars(with = "String")]
    pub(super) as_of: Option<String>,
    #[serde(default, deserialize_with = "given")]
    #[schemars(with = "String")]
    pub(super) after: Option<String>,
}

/// The body of `POST /api/v1/records/resolve`. One flat struct: serde cannot read exact numbers in a flattened one.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::admin) struct ResolveAllBody {
    #[serde(default)]
    pub(super) filter: FilterBody,
    #[serde(default)]
    pub(super) all: bool,
    #[serde(default)]
    pub(super) dry_run: bool,
    #[serde(default)]
    pub(super) reason: String,
    #[serde(default, deserialize_with = "given")]
    #[schemars(with = "String")]
    pub(super) as_of: Option<String>,
    #[serde(default, deserialize_with = "given")]
    #[schemars(with = "String")]
    pub(super) after: Option<String>,
    #[schemars(extend("enum" = ACTIONS))]
    pub(super) action: String,
    pub(super) status: Option<u16>,
    pub(super) headers: Option<Vec<(String, String)>>,
    pub(super) body_base64: Option<String>,
}

/// The members of [`Wanted`], as text.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct FilterBody {
    #[serde(deserialize_with = "given")]
    #[schemars(with = "String")]
    state: Option<String>,
    #[serde(deserialize_with = "given")]
    #[schemars(with = "String")]
    route: Option<String>,
    #[serde(deserialize_with = "given")]
    #[schemars(with = "String")]
    key: Option<String>,
    #[serde(deserialize_with = "given")]
    #[schemars(with = "String")]
    id: Option<String>,
    #[serde(deserialize_with = "given")]
    #[schemars(with = "String")]
    older_than: Option<String>,
    #[serde(deserialize_with = "given")]
    #[schemars(with = "String")]
    since: Option<String>,
    #[serde(deserialize_with = "given")]
    #[schemars(with = "String")]
    scope: Option<String>,
}

/// A member that stands there is a text. `null`, as of a script's unset variable, would widen the filter.
fn given<'de, D: Deserializer<'de>>(value: D) -> Result<Option<String>, D::Error> {
    String::deserialize(value).map(Some)
}

impl FilterBody {
    /// What is given, by the names of the API.
    pub(super) fn given(&self, all: bool) -> Map<String, Value> {
        let Self { state, route, key, id, older_than, since, scope } = self;
        let values = [state, route, key, id, older_than, since, scope];
        let named = Wanted::NAMES.into_iter().zip(values);
        let given = named.filter_map(|(name, value)| Some((name.to_owned(), value.as_deref()?.into())));
        given.chain(all.then(|| ("all".to_owned(), true.into()))).collect()
    }

    /// What is wanted: something, or expressly everything.
    pub(super) fn wanted(self, all: bool) -> Result<Wanted, Problem> {
        let mut wanted = Wanted::default();
        let Self { state, route, key, id, older_than, since, scope } = self;
        let values = [state, route, key, id, older_than, since, scope];
        for (name, value) in Wanted::NAMES.into_iter().zip(values) {
            if let Some(value) = value {
                wanted.set(name, value).map_err(|what| bad(&format!("`{name}` {what}")))?;
            }
        }
        match (wanted.is_everything(), all) {
            (true, false) => Err(bad(&format!(
                "`filter` is empty; give one of {}, or \"all\": true for every record",
                Wanted::NAMES.join(", ")
            ))),
            (false, true) => Err(bad("`all` and `filter` do not go together")),
            _ => Ok(wanted),
        }
    }
}
