//! Merges file, environment and flags: the later of these wins, key by key.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use figment::value::{Dict, Map, Value};
use figment::{Figment, Metadata, Profile, Provider};

use super::context::{Context, Layer, Path, Variable};
use super::file::{self, Parsed};
use super::node::{Table, Wrong};
use super::problem::{Advice, Place, Problem, Problems};
use super::{keys, logging};
use crate::telemetry::logs::Format;

/// Where a configuration comes from.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// The file; without one, environment, flags and defaults are everything.
    pub file: Option<PathBuf>,
    /// The environment. Of variables that do not start with `ONCEGATE_`, only
    /// `PGPASSWORD` matters.
    pub environment: Vec<(String, String)>,
    /// The variables that are not in `environment`, since they are not UTF-8.
    pub not_utf8: Vec<String>,
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
    pub store: Vec<String>,
}

impl Sources {
    /// Takes the environment of this process.
    #[must_use]
    pub fn of_process(file: Option<PathBuf>, flags: Flags) -> Self {
        let mut sources = Self { file, flags, ..Self::default() };
        for (name, value) in std::env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            match value.into_string() {
                Ok(value) => sources.environment.push((name, value)),
                Err(_) => sources.not_utf8.push(name),
            }
        }
        sources
    }
}

const PREFIX: &str = "ONCEGATE_";

/// The password of a PostgreSQL store, as for every other client of it.
const PASSWORD: &str = "PGPASSWORD";

/// Variables of oncegate that are not keys: those that commands read, and those of its tests.
const NOT_KEYS: [&str; 11] = [
    "ONCEGATE_CONFIG",
    "ONCEGATE_ADMIN_CA",
    "ONCEGATE_ADMIN_CERT",
    "ONCEGATE_ADMIN_KEY",
    "ONCEGATE_BLESS",
    "ONCEGATE_SIM_SEED",
    "ONCEGATE_SIM_SEEDS",
    "ONCEGATE_TEST_STORE",
    "ONCEGATE_TEST_POSTGRES",
    "ONCEGATE_TEST_PGBOUNCER",
    "ONCEGATE_TEST_RABBITMQ",
];

/// Reads and merges all layers. Fails where the file cannot be read as TOML: then nothing else can be said.
pub(super) fn merge(sources: Sources) -> Result<Context, Problems> {
    let parsed = match &sources.file {
        // How logs are written, the environment alone may say.
        Some(file) => read(file).map_err(|problems| Problems { log_format: log_format(&sources), ..problems })?,
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
    let advice = sources.environment.iter().filter_map(|(name, value)| on_ignored(name, value)).collect();
    let figment = Figment::from(Provided(Layer::File, values)).merge(Provided(Layer::Environment, environment));
    let configured = upstream_names(&figment);
    let is_read = |name: &&String| match name.as_str() {
        PASSWORD => has_postgres(&figment),
        name => purpose(name, "") == Some(Purpose::Setting),
    };
    problems.extend(sources.not_utf8.iter().filter(is_read).map(|name| not_utf8(name)));
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
        advice: RefCell::new(advice),
        printed: RefCell::default(),
    }
}

/// Whether the store is one that may need a password.
fn has_postgres(figment: &Figment) -> bool {
    let Ok(url) = figment.find_value("store.url") else { return false };
    let is_postgres = |url: &Value| url.as_str().is_some_and(|url| url.starts_with("postgres"));
    is_postgres(&url) || url.as_array().is_some_and(|urls| urls.iter().any(is_postgres))
}

/// A value that was read all the same would be another one.
fn not_utf8(name: &str) -> Problem {
    Problem {
        place: Place::Environment(name.to_owned()),
        key: String::new(),
        message: "its value is not UTF-8".to_owned(),
        hint: Some(match name {
            PASSWORD => {
                "set it in UTF-8, or write the password to a file, and name that as store.password_file".to_owned()
            }
            _ => "set it in UTF-8, or set its key in the file".to_owned(),
        }),
    }
}

/// The format of logs where the file says nothing.
fn log_format(sources: &Sources) -> Format {
    let alone = Sources { file: None, flags: Flags::default(), ..sources.clone() };
    logging::read(&Table::open(layered(Parsed::default(), alone).root(), keys::ROOT)).format
}

fn read(file: &std::path::Path) -> Result<Parsed, Problems> {
    let bytes = std::fs::read(file).map_err(|error| {
        let hint = match error.kind() {
            io::ErrorKind::NotFound => "`oncegate config default` prints a file to start from",
            io::ErrorKind::IsADirectory => "name the file in it",
            _ => "the user that runs oncegate must be able to read it",
        };
        unreadable(file, None, Wrong::new(format!("cannot be read: {error}")).hint(hint))
    })?;
    let text = file::text(bytes).map_err(|(line, wrong)| unreadable(file, Some(line), wrong))?;
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
    let is_setting = |(name, value): &&(String, String)| purpose(name, value) == Some(Purpose::Setting);
    let mut ours: Vec<&(String, String)> = environment.iter().filter(is_setting).collect();
    ours.sort();
    let mut values = Dict::new();
    let mut variables = BTreeMap::new();
    for (name, raw) in ours {
        let mut keys: Vec<String> = name[PREFIX.len()..].split("__").map(key_of).collect();
        let value = variable(raw);
        if let [section, upstream, rest @ ..] = &mut *keys
            && section == "upstreams"
        {
            as_in_file(upstream, file);
            if rest.is_empty() && value.as_dict().is_none() {
                keys.push("url".to_owned());
            }
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

/// Variables have no small letters, keys have no others; but the names of statuses of gRPC stand as they are.
fn key_of(word: &str) -> String {
    let key = word.to_lowercase();
    match key.strip_prefix(GRPC) {
        Some(_) => format!("{GRPC}{}", &word[GRPC.len()..]),
        None => key,
    }
}

/// How entries of `outcomes` for statuses of gRPC begin.
const GRPC: &str = "grpc:";

/// Reads the value of a variable: a list or a table as a file has it, and anything else bare.
fn variable(raw: &str) -> Value {
    let text = raw.trim();
    let written = if text.starts_with(['[', '{']) { file::value(text) } else { None };
    written.unwrap_or_else(|| {
        let Ok(value) = raw.parse();
        value
    })
}

/// What a variable that begins with [`PREFIX`] is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// It sets a key, or tries to.
    Setting,
    /// A container platform set it, for a service named `oncegate` or `oncegate-NAME`.
    Platform,
    /// Its name is of the platform's, its value is not.
    Doubtful,
}

/// What a variable is there for; nothing where it is none of ours.
fn purpose(name: &str, value: &str) -> Option<Purpose> {
    let key = name.strip_prefix(PREFIX).filter(|_| !NOT_KEYS.contains(&name))?;
    // Two underscores are ours alone.
    let purpose = if key.contains("__") { Purpose::Setting } else { of_service(key, value) };
    Some(purpose)
}

/// Tells what Kubernetes and links of Docker set for the services beside a container from attempts at a setting. `key` is
/// what follows [`PREFIX`], which may be the first word of a service's name only.
///
/// Both set `NAME_PORT` and `NAME_PORT_80_TCP` with `_ADDR`, `_PORT` and `_PROTO`; Kubernetes sets `NAME_SERVICE_HOST`,
/// `NAME_SERVICE_PORT` and `NAME_SERVICE_PORT_PORTNAME`; Docker sets `_START` and `_END` for ranges of ports, `NAME_NAME`,
/// and `NAME_ENV_VARIABLE` for each variable of the other container.
fn of_service(key: &str, value: &str) -> Purpose {
    // A service's name that goes on behind the prefix ends with an underscore.
    let key = format!("_{key}");
    let has_number = key.match_indices("_PORT_").any(|(at, word)| is_port_and_protocol(&key[at + word.len()..]));
    if key.ends_with("_PORT") && !key.ends_with("_SERVICE_PORT") && !has_number {
        // A URL such as tcp://10.0.0.1:8080
        return if value.contains("://") { Purpose::Platform } else { Purpose::Doubtful };
    }
    let is_service = key.ends_with("_SERVICE_HOST")
        || key.ends_with("_SERVICE_PORT")
        || key.contains("_SERVICE_PORT_")
        || has_number
        || key.contains("_ENV_")
        // The path of a link: /gate/oncegate
        || key.ends_with("_NAME") && value.starts_with('/');
    if is_service { Purpose::Platform } else { Purpose::Setting }
}

/// Whether it is `80_TCP`, alone or with one of the ends that such variables have.
fn is_port_and_protocol(text: &str) -> bool {
    let mut words = text.splitn(3, '_');
    words.next().is_some_and(|number| number.parse::<u16>().is_ok())
        && words.next().is_some_and(|protocol| matches!(protocol, "TCP" | "UDP" | "SCTP"))
        && words
            .next()
            .is_none_or(|end| matches!(end, "ADDR" | "PORT" | "PROTO" | "START" | "END" | "PORT_START" | "PORT_END"))
}

/// What to know of a variable that is ignored and may have been meant as a setting.
fn on_ignored(name: &str, value: &str) -> Option<Advice> {
    let is_doubtful = purpose(name, value) == Some(Purpose::Doubtful);
    is_doubtful.then(|| Advice {
        place: Place::Environment(name.to_owned()),
        key: String::new(),
        message:
            "it is ignored, as container platforms set variables of this name for a service; an address is set with \
                  ONCEGATE_SERVER__LISTEN or ONCEGATE_ADMIN__LISTEN"
                .to_owned(),
    })
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
    let urls: Vec<Value> = flags.store.into_iter().map(Value::from).collect();
    let mut set = |keys: &[&str], value: Option<Value>| {
        if let Some(value) = value {
            let keys: Vec<String> = keys.iter().map(|key| (*key).to_owned()).collect();
            insert(&mut values, &keys, value);
        }
    };
    set(&["server", "listen"], flags.listen.map(Value::from));
    set(&["admin", "listen"], flags.admin.map(Value::from));
    set(&["store", "url"], if urls.len() > 1 { Some(Value::from(urls)) } else { urls.into_iter().next() });
    match configured {
        [] => set(&["upstreams", "default", "url"], flags.upstream.map(Value::from)),
        [name] => set(&["upstreams", name, "url"], flags.upstream.map(Value::from)),
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
    fn a_file_that_cannot_be_read_gets_a_hint_of_its_own() {
        let directory = tempfile::tempdir().unwrap();
        let hint = |path: PathBuf| read(&path).map(|_| ()).unwrap_err().to_string();
        assert!(hint(directory.path().join("absent.toml")).contains("hint: `oncegate config default` prints"));
        assert!(hint(directory.path().to_owned()).contains("hint: name the file in it"));
        std::fs::write(directory.path().join("file"), "").unwrap();
        let behind = hint(directory.path().join("file/gate.toml"));
        assert!(behind.contains("hint: the user that runs oncegate must be able to read it"), "{behind}");
    }

    #[test]
    fn what_a_platform_sets_is_told_from_settings() {
        use Purpose::{Doubtful, Platform, Setting};
        for (key, value, expected) in [
            // Kubernetes, of a service `oncegate`
            ("SERVICE_HOST", "10.0.0.1", Platform),
            ("SERVICE_PORT", "8080", Platform),
            ("SERVICE_PORT_HTTP", "8080", Platform),
            ("SERVICE_PORT_HTTP_2", "8081", Platform),
            ("PORT", "tcp://10.0.0.1:8080", Platform),
            ("PORT_8080_TCP", "tcp://10.0.0.1:8080", Platform),
            ("PORT_8080_TCP_PROTO", "tcp", Platform),
            ("PORT_8080_TCP_PORT", "8080", Platform),
            ("PORT_8080_TCP_ADDR", "10.0.0.1", Platform),
            ("PORT_53_UDP_ADDR", "10.0.0.1", Platform),
            ("PORT_9_SCTP", "sctp://10.0.0.1:9", Platform),
            // Of `oncegate-admin` and `oncegate-a-b-port-1`
            ("ADMIN_SERVICE_HOST", "10.0.0.1", Platform),
            ("ADMIN_SERVICE_PORT", "9090", Platform),
            ("ADMIN_SERVICE_PORT_METRICS", "9090", Platform),
            ("ADMIN_PORT", "tcp://10.0.0.1:9090", Platform),
            ("ADMIN_PORT_9090_TCP_ADDR", "10.0.0.1", Platform),
            ("A_B_PORT_1_PORT_9090_TCP", "tcp://10.0.0.1:9090", Platform),
            // Links of Docker
            ("PORT_8080_TCP_START", "tcp://172.17.0.5:8080", Platform),
            ("PORT_8080_TCP_END", "tcp://172.17.0.5:8082", Platform),
            ("PORT_8080_TCP_PORT_START", "8080", Platform),
            ("PORT_8080_TCP_PORT_END", "8082", Platform),
            ("NAME", "/shop/oncegate", Platform),
            ("ADMIN_NAME", "/shop/oncegate-admin", Platform),
            ("ENV_PATH_INFO", "/", Platform),
            ("ADMIN_ENV_RUST_LOG", "info", Platform),
            // An operator may mean them as settings, and they are none.
            ("PORT", "8080", Doubtful),
            ("SERVER_PORT", "8080", Doubtful),
            ("ADMIN_PORT", "", Doubtful),
            // Settings, and attempts at them
            ("SERVER", "{}", Setting),
            ("SERVER__LISTEN", "127.0.0.1:1", Setting),
            ("SERVER_LISTEN", "127.0.0.1:1", Setting),
            ("LISTEN", "127.0.0.1:1", Setting),
            ("DEFAULT_UPSTREAM", "app", Setting),
            ("UPSTREAMS__APP_SERVICE_HOST", "http://app", Setting),
            ("UPSTREAMS__APP_PORT", "http://app", Setting),
            ("UPSTREAMS__PORT_80_TCP", "http://app", Setting),
            ("UPSTREAMS__A_ENV_B", "http://app", Setting),
            ("SERVICE", "x", Setting),
            ("SERVICE_HOSTS", "x", Setting),
            ("NAME", "charges", Setting),
            ("ENVIRONMENT", "x", Setting),
            ("REPORT", "x", Setting),
            ("SUPPORT_LEVEL", "x", Setting),
            ("PORT_HTTP", "x", Setting),
            ("PORT_8080", "x", Setting),
            ("PORT_8080_QUIC", "x", Setting),
            ("PORT_99999_TCP", "x", Setting),
            ("PORT_8080_TCP_HOST", "x", Setting),
        ] {
            assert_eq!(purpose(&format!("{PREFIX}{key}"), value), Some(expected), "{key} {value}");
        }
        for name in ["PATH", "PORT", "ONCEGATE", "ONCEGATE_CONFIG", "ONCEGATE_ADMIN_CERT", "XONCEGATE_PORT"] {
            assert_eq!(purpose(name, "x"), None, "{name}");
        }
    }

    /// A variable holds a list or a table in TOML, as a file does. The gate reads all else by laxer rules, or as text.
    #[test]
    fn lists_and_tables_of_variables_are_toml() {
        for text in [
            r#"["host", "header:X-A"]"#,
            "['host']",
            "[ \"host\", ]",
            "[\n\"a\"\n]",
            r#"['const:a"b', "const:a\\b", "const:é,]"]"#,
            "[{ pointer = '/a', equals = 1e3 }, { equals = 0x10 }, { equals = 1_000 }, { equals = true }]",
            "{ probe = '/x/{key}', headers = { Authorization = \"file:/a\" } }",
        ] {
            let file = parse(std::path::Path::new("gate.toml"), &format!("a = {text}")).unwrap();
            assert_eq!(variable(text), file.values["a"], "{text}");
        }
        assert_eq!(variable("[host]"), Value::from(vec!["host"]));
        assert_eq!(variable("[\"host\""), Value::from("[\"host\""));
        assert_eq!(variable("0042"), Value::from(42_usize));
    }

    /// Of no key is the variable one that a platform sets.
    #[test]
    fn every_key_can_be_set_by_its_variable() {
        let mut count = 0;
        for (section, key) in super::super::keys::all() {
            let path: Vec<String> = section.into_iter().chain([key]).map(str::to_uppercase).collect();
            let name = format!("{PREFIX}{}", path.join("__"));
            for value in ["x", "8080", "tcp://10.0.0.1:80", "/a/b"] {
                assert_eq!(purpose(&name, value), Some(Purpose::Setting), "{name}");
            }
            count += 1;
        }
        assert!(count > 60, "{count}");
    }
}
