//! The bodies of requests that change many records.

use std::borrow::Cow;
use std::fmt;

use schemars::generate::SchemaGenerator;
use schemars::{JsonSchema, Schema, json_schema};
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::bad;
use crate::admin::answer::Problem;
use crate::admin::forms;
use crate::admin::records::MAX_REASON;
use crate::admin::resolve::{self, ACTIONS};
use crate::admin::wanted::Wanted;

/// The body of `POST /api/v1/records/purge` and `retry`.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(extend("allOf" = forms::bulk()))]
pub(in crate::admin) struct ChangeAllBody {
    #[serde(default, deserialize_with = "members")]
    #[schemars(with = "FilterBody")]
    pub(super) filter: FilterBody,
    #[serde(default)]
    pub(super) all: bool,
    #[serde(default)]
    pub(super) dry_run: bool,
    #[serde(default)]
    #[schemars(extend("pattern" = forms::REASON_OR_NONE, "maxLength" = MAX_REASON))]
    pub(super) reason: String,
    #[serde(default, deserialize_with = "given")]
    #[schemars(with = "String", extend("pattern" = forms::TIME))]
    pub(super) as_of: Option<String>,
    #[serde(default, deserialize_with = "given")]
    #[schemars(with = "String", extend("pattern" = forms::PLACE))]
    pub(super) after: Option<String>,
}

/// The body of `POST /api/v1/records/resolve`. One flat struct: serde cannot read exact numbers in a flattened one.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(extend("allOf" = forms::bulk_resolve()))]
pub(in crate::admin) struct ResolveAllBody {
    #[serde(default, deserialize_with = "members")]
    #[schemars(with = "FilterBody")]
    pub(super) filter: FilterBody,
    #[serde(default)]
    pub(super) all: bool,
    #[serde(default)]
    pub(super) dry_run: bool,
    #[serde(default)]
    #[schemars(extend("pattern" = forms::REASON_OR_NONE, "maxLength" = MAX_REASON))]
    pub(super) reason: String,
    #[serde(default, deserialize_with = "given")]
    #[schemars(with = "String", extend("pattern" = forms::TIME))]
    pub(super) as_of: Option<String>,
    #[serde(default, deserialize_with = "given")]
    #[schemars(with = "String", extend("pattern" = forms::PLACE))]
    pub(super) after: Option<String>,
    #[schemars(extend("enum" = ACTIONS))]
    pub(super) action: String,
    #[serde(default, deserialize_with = "resolve::whole")]
    #[schemars(schema_with = "forms::status")]
    pub(super) status: Option<u16>,
    #[schemars(schema_with = "resolve::headers_form")]
    pub(super) headers: Option<Vec<(String, String)>>,
    #[schemars(schema_with = "forms::base64")]
    pub(super) body_base64: Option<String>,
}

/// The members of [`Wanted`], as text.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct FilterBody {
    #[serde(deserialize_with = "given")]
    state: Option<String>,
    #[serde(deserialize_with = "given")]
    route: Option<String>,
    #[serde(deserialize_with = "given")]
    key: Option<String>,
    #[serde(deserialize_with = "given")]
    id: Option<String>,
    #[serde(deserialize_with = "given")]
    older_than: Option<String>,
    #[serde(deserialize_with = "given")]
    since: Option<String>,
    #[serde(deserialize_with = "given")]
    scope: Option<String>,
}

impl JsonSchema for FilterBody {
    fn schema_name() -> Cow<'static, str> {
        "FilterBody".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let members: Map<String, Value> =
            Wanted::NAMES.map(|name| (name.to_owned(), forms::member(name))).into_iter().collect();
        json_schema!({ "type": "object", "properties": members, "additionalProperties": false })
    }
}

/// A member that stands there is a text. `null`, as of a script's unset variable, would widen the filter.
fn given<'de, D: Deserializer<'de>>(value: D) -> Result<Option<String>, D::Error> {
    String::deserialize(value).map(Some)
}

/// An object: a struct could be read from an array, too.
fn members<'de, D: Deserializer<'de>>(value: D) -> Result<FilterBody, D::Error> {
    struct OnlyAnObject;
    impl<'de> Visitor<'de> for OnlyAnObject {
        type Value = FilterBody;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, members: A) -> Result<FilterBody, A::Error> {
            FilterBody::deserialize(MapAccessDeserializer::new(members))
        }
    }
    value.deserialize_map(OnlyAnObject)
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
