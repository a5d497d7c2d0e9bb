//! Merges file, environment and flags: the later of these wins, key by key.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::PathBuf;

use figment::value::{Dict, Map, Value};
use figment::{Figment, Metadata, Profile, Provider};

use super::context::{Context, Layer, Path, Variable};
use super::file::{self, Parsed};
use super::node::Wrong;
use super::problem::{Place, Problem, Problems};

/// Where a configuration comes from.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// The file; without one, environment, flags and defaults are everything.
    pub file: Option<PathBuf>,
    /// The environment. Of variables that do not start with `ONCEGATE_`, only
    /// `PGPASSWORD` matters.
    pub environment: Vec<(String, String)>,
    /// The flags.
    pub flags: Flags,
}

/// What flags can set.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    /// `--upstream`: the URL of the only upstream, which is named `default` where none is configured.
    pub upstream: Option<String>,
    /// `--listen`: `server.listen`
    pub listen: Option<String>,
    /// `--admin`: `admin.listen`
    pub admin: Option<String>,
    /// `--store`: `store.url`
    pub store: Option<String>,
}

impl Sources {
    /// Takes the environment of this process.
    #[must_use]
    pub fn of_process(file: Option<PathBuf>, flags: Flags) -> Self {
        let text = |os: std::ffi::OsString| os.to_string_lossy().into_owned();
        let environment = std::env::vars_os().map(|(name, value)| (text(name), text(value)));
        Self { file, environment: environment.collect(), flags }
    }
}

const PREFIX: &str = "ONCEGATE_";

/// The password of a PostgreSQL store, as for every other client of it.
const PASSWORD: &str = "PGPASSWORD";

/// Variables of ours that are not keys: the file itself, and what tests are told by.
const NOT_KEYS: [&str; 7] = [
    "ONCEGATE_CONFIG",
    "ONCEGATE_BLESS",
    "ONCEGATE_SIM_SEED",
    "ONCEGATE_SIM_SEEDS",
    "ONCEGATE_TEST_STORE",
    "ONCEGATE_TEST_POSTGRES",
    "ONCEGATE_TEST_PGBOUNCER",
];

/// Reads and merges all layers. Fails where the file cannot be read as TOML: then nothing else can be said.
pub(super) fn merge(sources: Sources) -> Result<Context, Problems> {
    let parsed = match &sources.file {
        Some(file) => read(file)?,
        None => Parsed::default(),
    };
    Ok(layered(parsed, sources))
}

/// The layer of a file alone, given what it holds.
pub(super) fn only(file: PathBuf, text: &str) -> Result<Context, Problems> {
    let parsed = parse(&file, text)?;
    Ok(layered(parsed, Sources { file: Some(file), ..Sources::default() }))
}

fn layered(parsed: Parsed, sources: Sources) -> Context {
    let Parsed { mut values, lines } = parsed;
    name_urls(&mut values);
    let mut problems = Vec::new();
    let (environment, variables) = environment(&sources.environment, &values, &mut problems);
    let figment = Figment::from(Provided(Layer::File, values)).merge(Provided(Layer::Environment, environment));
    let configured = upstream_names(&figment);
    let password = sources.environment.iter().find(|(name, _)| name == PASSWORD).map(|(_, value)| value.clone());
    let figment = figment.merge(Provided(Layer::Flags, flags(sources.flags, &configured, &mut problems)));
    Context {
        // Providers that hold a table cannot fail, and the top level is always found.
        values: figment.find_value("").unwrap_or_else(|_| Value::from(Dict::new())),
        figment,
        file: sources.file.map(|file| (file, lines)),
        variables,
        password: password.filter(|password| !password.is_empty()),
        problems: RefCell::new(problems),
        advice: RefCell::default(),
    }
}

fn read(file: &std::path::Path) -> Result<Parsed, Problems> {
    let bytes = std::fs::read(file).map_err(|error| {
        let wrong = Wrong::new(format!("cannot be read: {error}"));
        unreadable(file, None, wrong.hint("`oncegate config default` prints a file to start from"))
    })?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let before = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = before.iter().filter(|&&byte| byte == b'\n').count() + 1;
        unreadable(file, Some(line), Wrong::new("not UTF-8").hint("save the file as UTF-8"))
    })?;
    parse(file, &text)
}

fn parse(file: &std::path::Path, text: &str) -> Result<Parsed, Problems> {
    file::parse(text).map_err(|(line, wrong)| unreadable(file, Some(line), wrong))
}

fn unreadable(file: &std::path::Path, line: Option<usize>, wrong: Wrong) -> Problems {
    let place = Place::File(file.to_owned(), line);
    Problems::new(vec![Problem { place, key: String::new(), message: wrong.message, hint: wrong.hint }])
}

/// One layer as [`Figment`] wants it.
struct Provided(Layer, Dict);

impl Provider for Provided {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.0.name())
    }

    fn data(&self) -> figment::Result<Map<Profile, Dict>> {
        Ok(Map::from([(Profile::Default, self.1.clone())]))
    }
}

/// An upstream that is only a URL is the table with that URL, so that layers can be merged key by key.
fn name_urls(values: &mut Dict) {
    let Some(Value::Dict(_, upstreams)) = values.get_mut("upstreams") else { return };
    for upstream in upstreams.values_mut().filter(|upstream| upstream.as_dict().is_none()) {
        let url = std::mem::replace(upstream, Value::from(Dict::new()));
        *upstream = Value::from(Dict::from([("url".to_owned(), url)]));
    }
}

fn environment(
    environment: &[(String, String)],
    file: &Dict,
    problems: &mut Vec<Problem>,
) -> (Dict, BTreeMap<Path, Variable>) {
    let mut ours: Vec<&(String, String)> = environment.iter().filter(|(name, _)| is_key(name, environment)).collect();
    ours.sort();
    let mut values = Dict::new();
    let mut variables = BTreeMap::new();
    for (name, raw) in ours {
        let mut keys: Vec<String> = name[PREFIX.len()..].split("__").map(str::to_lowercase).collect();
        let Ok(value) = raw.parse::<Value>();
        if let [section, upstream] = &mut *keys
            && section == "upstreams"
        {
            as_in_file(upstream, file);
            if value.as_dict().is_none() {
                keys.push("url".to_owned());
            }
        } else if let [section, upstream, ..] = &mut *keys
            && section == "upstreams"
        {
            as_in_file(upstream, file);
        }
        let path = Path::of(keys.iter().map(String::as_str));
        if insert(&mut values, &keys, value) {
            variables.insert(path, Variable { name: name.clone(), raw: raw.clone() });
        } else {
            problems.push(Problem {
                place: Place::Environment(name.clone()),
                key: path.to_string(),
                message: "another variable gives a value to the table that this key stands in".to_owned(),
                hint: Some("set either the table or its keys".to_owned()),
            });
        }
    }
    (values, variables)
}

/// Whether a variable sets a key. Kubernetes gives a pod variables for each service beside it: where one is named
/// `oncegate` or `oncegate-admin`, they begin like ours.
fn is_key(name: &str, environment: &[(String, String)]) -> bool {
    let Some(key) = name.strip_prefix(PREFIX).filter(|_| !NOT_KEYS.contains(&name)) else { return false };
    let in_cluster = || environment.iter().any(|(name, _)| name == "KUBERNETES_SERVICE_HOST");
    !(is_service_link(key) && in_cluster())
}

/// Whether `key`, what follows [`PREFIX`], is of the form that Kubernetes names variables of services by:
/// `NAME_SERVICE_HOST`, `NAME_SERVICE_PORT`, `NAME_SERVICE_PORT_PORTNAME`, `NAME_PORT`, and `NAME_PORT_80_TCP` with
/// `_PROTO`, `_PORT` or `_ADDR` behind it or not. The start of the name is in the prefix.
fn is_service_link(key: &str) -> bool {
    // Two underscores are ours; a name that goes on behind the prefix starts with one.
    let name = format!("_{key}");
    let is_link = ["_SERVICE_HOST", "_SERVICE_PORT", "_PORT"].iter().any(|end| name.ends_with(end))
        || name.contains("_SERVICE_PORT_")
        || name.match_indices("_PORT_").any(|(at, word)| is_port(&name[at + word.len()..]));
    is_link && !key.contains("__")
}

/// Whether it is `80_TCP`, with more behind it or not.
fn is_port(text: &str) -> bool {
    let mut words = text.split('_');
    words.next().is_some_and(|number| number.parse::<u16>().is_ok())
        && words.next().is_some_and(|protocol| matches!(protocol, "TCP" | "UDP" | "SCTP"))
}

/// Variables have no small letters, names of upstreams may: take the one that the file has.
fn as_in_file(name: &mut String, file: &Dict) {
    let upstreams = file.get("upstreams").and_then(Value::as_dict);
    if let Some(same) = upstreams.and_then(|upstreams| upstreams.keys().find(|key| key.eq_ignore_ascii_case(name))) {
        name.clone_from(same);
    }
}

/// Puts a value at its place; false where a value stands above that place.
fn insert(values: &mut Dict, keys: &[String], value: Value) -> bool {
    match keys {
        [] => false,
        [key] => match values.get(key) {
            Some(_) => false,
            None => values.insert(key.clone(), value).is_none(),
        },
        [key, rest @ ..] => {
            let inner = values.entry(key.clone()).or_insert_with(|| Value::from(Dict::new()));
            match inner {
                Value::Dict(_, inner) => insert(inner, rest, value),
                _ => false,
            }
        }
    }
}

fn upstream_names(figment: &Figment) -> Vec<String> {
    let upstreams = figment.find_value("upstreams").ok();
    upstreams.and_then(|upstreams| Some(upstreams.as_dict()?.keys().cloned().collect())).unwrap_or_default()
}

fn flags(flags: Flags, configured: &[String], problems: &mut Vec<Problem>) -> Dict {
    let mut values = Dict::new();
    let mut set = |keys: &[&str], value: Option<String>| {
        if let Some(value) = value {
            let keys: Vec<String> = keys.iter().map(|key| (*key).to_owned()).collect();
            insert(&mut values, &keys, Value::from(value));
        }
    };
    set(&["server", "listen"], flags.listen);
    set(&["admin", "listen"], flags.admin);
    set(&["store", "url"], flags.store);
    match configured {
        [] => set(&["upstreams", "default", "url"], flags.upstream),
        [name] => set(&["upstreams", name, "url"], flags.upstream),
        several if flags.upstream.is_some() => problems.push(Problem {
            place: Place::Flag("--upstream"),
            key: "upstreams".to_owned(),
            message: format!(
                "several upstreams are configured ({}): it is not clear which is meant",
                several.join(", ")
            ),
            hint: Some("set the URL of one of them in the file, or with ONCEGATE_UPSTREAMS__NAME".to_owned()),
        }),
        _ => {}
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_of_services_are_told_from_keys() {
        for link in [
            "SERVICE_HOST",
            "SERVICE_PORT",
            "SERVICE_PORT_HTTP",
            "PORT",
            "PORT_8080_TCP",
            "PORT_8080_TCP_PROTO",
            "PORT_8080_TCP_PORT",
            "PORT_8080_TCP_ADDR",
            "PORT_53_UDP_ADDR",
            "PORT_9_SCTP",
            "ADMIN_SERVICE_HOST",
            "ADMIN_SERVICE_PORT",
            "ADMIN_SERVICE_PORT_METRICS",
            "ADMIN_PORT",
            "ADMIN_PORT_9090_TCP_ADDR",
            "A_B_PORT_1_PORT_9090_TCP",
        ] {
            assert!(is_service_link(link), "{link}");
        }
        for key in [
            "SERVER",
            "SERVER__LISTEN",
            "SERVER_LISTEN",
            "DEFAULT_UPSTREAM",
            "UPSTREAMS__APP_SERVICE_HOST",
            "UPSTREAMS__APP_PORT",
            "UPSTREAMS__PORT_80_TCP",
            "SERVICE",
            "SERVICE_HOSTS",
            "REPORT",
            "SUPPORT_LEVEL",
            "PORT_HTTP",
            "PORT_8080",
            "PORT_8080_QUIC",
            "PORT_99999_TCP",
        ] {
            assert!(!is_service_link(key), "{key}");
        }
    }
}
