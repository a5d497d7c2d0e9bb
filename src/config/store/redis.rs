//! Where `[store]` names Redis: `redis://USER:PASSWORD@HOST:PORT,HOST:PORT/DATABASE?PARAMETER=VALUE`, or `rediss://`

use std::fmt;
use std::path::{Path, PathBuf};

use super::location::{Location, UrlGrammar, is_loopback, shown_address, take_apart};
use super::{Table, Wrong};
use crate::config::pem;
use crate::store::redis::{Certificates, Servers, Topology};
use crate::tls::Trust;

/// Redis, as a store or as a cache.
#[derive(Clone)]
pub struct Redis {
    /// The address, and the user to connect as.
    pub servers: Servers,
    /// Its URL without the password.
    pub url: String,
    /// The file that the password came from.
    pub password_file: Option<PathBuf>,
}

impl Redis {
    /// Where it is, for people: `HOST:PORT`, several with commas between, the database unless it is 0, and how the
    /// servers belong together.
    #[must_use]
    pub fn servers(&self) -> String {
        let Servers { hosts, database, topology, .. } = &self.servers;
        let hosts: Vec<String> = hosts.iter().map(|(host, port)| shown_address(host, *port)).collect();
        let database = if *database == 0 { String::new() } else { format!("/{database}") };
        let topology = match topology {
            Topology::Standalone => String::new(),
            Topology::Sentinel { primary, .. } => format!(" (Sentinels of {primary})"),
            Topology::Cluster => " (cluster)".to_owned(),
        };
        format!("{}{database}{topology}", hosts.join(","))
    }
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Redis");
        shown.field("url", &self.url).field("password_file", &self.password_file).finish_non_exhaustive()
    }
}

/// A key of `[store]` whose value is the URL of a Redis.
pub(super) struct Key {
    /// Its name.
    pub name: &'static str,
    /// What is particular to these URLs.
    pub grammar: UrlGrammar,
}

/// `url`
pub(super) const STORE: Key = Key { name: "url", grammar: grammar("password_file") };

/// `cache`
pub(super) const CACHE: Key = Key { name: "cache", grammar: grammar("cache_password_file") };

const fn grammar(password_file: &'static str) -> UrlGrammar {
    UrlGrammar {
        kind: "redis:",
        form: "write \"redis://HOST:PORT\" or \"redis://USER:PASSWORD@HOST:PORT/DATABASE\"",
        hidden_password: ":",
        parameters: "cacert cert cluster key password sentinel sentinel_auth",
        otherwise: "remove it; there are cluster, sentinel, sentinel_auth, cacert, cert, key and password, and the \
                    number of a database stands behind the hosts: redis://HOST/NUMBER",
        password_file,
    }
}

/// The default ports of Redis and of its Sentinels.
const PORTS: (u16, u16) = (6379, 26379);

/// The words for yes and no.
const FLAGS: [(&str, bool); 2] = [("true", true), ("false", false)];

/// The scheme of a URL and what stands behind its colon, where it is one of Redis.
pub(super) fn split(url: &str) -> Option<(&str, &str)> {
    url.split_once(':').filter(|(scheme, _)| matches!(*scheme, "redis" | "rediss"))
}

/// Reads the URL behind its scheme, which says Redis; reports what is wrong with it.
pub(super) fn read(
    table: &Table<'_>,
    key: &Key,
    password_file: Option<&Path>,
    (scheme, rest): (&str, &str),
) -> Option<Redis> {
    let grammar = &key.grammar;
    let from_file = table.read_file(grammar.password_file, password_file, |path| {
        super::password_text(super::password(path)?, &path.display().to_string())
    });
    let report = |wrong| table.report(key.name, wrong);
    let mut location = take_apart(grammar, scheme, rest).map_err(report).ok()?;
    super::only_one_password(table, grammar, &location);
    let is_encrypted = scheme == "rediss";
    let mut wrong = Vec::new();
    if location.is_user_alone && location.password.is_none() && table.get(grammar.password_file).is_none() {
        // As other clients of Redis have it, that is a password; it is not to be shown as a user.
        let either = Wrong::new("what stands before the `@` has no colon: it could be a user or a password");
        wrong.push(either.hint("write USER:PASSWORD@, or :PASSWORD@ for the default user"));
    }
    let password = location.password.take().map(|password| super::password_text(password, "the password"));
    let password = password.and_then(|password| password.map_err(|error| wrong.push(error)).ok());
    let mut servers = servers(&mut location, is_encrypted, &mut wrong);
    wrong.extend(location.unknown(grammar));
    if !wrong.is_empty() {
        wrong.into_iter().for_each(report);
        return None;
    }
    servers.password = password.or(from_file);
    advise(table, key, &servers);
    Some(Redis { servers, url: location.shown, password_file: password_file.map(Path::to_path_buf) })
}

/// Puts everything but the password into the store's form. What is left in `location` afterwards is unknown.
fn servers(location: &mut Location, is_encrypted: bool, wrong: &mut Vec<Wrong>) -> Servers {
    let topology = topology(location, wrong);
    let usual_port = if matches!(topology, Topology::Sentinel { .. }) { PORTS.1 } else { PORTS.0 };
    Servers {
        hosts: hosts(location, usual_port, wrong),
        user: location.user.take(),
        password: None,
        database: database(location, &topology, wrong),
        tls: certificates(location, is_encrypted, wrong),
        topology,
    }
}

fn topology(location: &mut Location, wrong: &mut Vec<Wrong>) -> Topology {
    let is_cluster = location.choice("cluster", &FLAGS, wrong).unwrap_or(false);
    let is_guarded = location.choice("sentinel_auth", &FLAGS, wrong);
    let primary = location.take("sentinel");
    let is_name = |text: &str| !text.is_empty() && text.chars().all(is_of_a_name);
    if let Some(primary) = primary {
        if is_cluster {
            let both = Wrong::new("`cluster` and `sentinel` exclude each other");
            wrong.push(both.hint("a cluster does without Sentinels: remove one of them"));
        }
        if !is_name(&primary) {
            let no_name = Wrong::new("`sentinel` is the name of a primary: letters, digits, `.`, `_` and `-`");
            wrong.push(no_name.hint("write sentinel=NAME, with the name that `sentinel monitor` gives it"));
        }
        return Topology::Sentinel { primary, is_guarded: is_guarded.unwrap_or(false) };
    }
    if is_guarded.is_some() {
        let useless = Wrong::new("`sentinel_auth` is of no use without `sentinel`");
        wrong.push(useless.hint("name the primary that the Sentinels know, sentinel=NAME, or remove it"));
    }
    if is_cluster { Topology::Cluster } else { Topology::Standalone }
}

fn is_of_a_name(char: char) -> bool {
    char.is_ascii_alphanumeric() || matches!(char, '.' | '_' | '-')
}

fn hosts(location: &mut Location, usual_port: u16, wrong: &mut Vec<Wrong>) -> Vec<(String, u16)> {
    let hosts = std::mem::take(&mut location.hosts);
    let is_host = |host: &str| host.parse::<std::net::IpAddr>().is_ok() || host.chars().all(is_of_a_name);
    if hosts.is_empty() {
        wrong.push(Wrong::new("no host is named").hint("write redis://HOST:PORT"));
    }
    if !hosts.iter().all(|(host, _)| is_host(host)) {
        let none = Wrong::new("a host is neither a name nor an address");
        wrong.push(none.hint("write redis://HOST:PORT; sockets of the file system are not for Redis here"));
    }
    hosts.into_iter().map(|(host, port)| (host, port.unwrap_or(usual_port))).collect()
}

fn database(location: &mut Location, topology: &Topology, wrong: &mut Vec<Wrong>) -> i64 {
    let Some(text) = location.database.take() else { return 0 };
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse::<i32>().ok().filter(|_| is_number) {
        Some(number) if number > 0 && *topology == Topology::Cluster => {
            wrong.push(Wrong::new("a cluster has database 0 only").hint("remove what stands behind the slash"));
            0
        }
        Some(number) => number.into(),
        None => {
            let hint = "write redis://HOST/NUMBER, or nothing behind the hosts for database 0";
            wrong.push(Wrong::new("the database is not a number").hint(hint));
            0
        }
    }
}

fn certificates(location: &mut Location, is_encrypted: bool, wrong: &mut Vec<Wrong>) -> Option<Certificates> {
    let [root, certificate, key] = ["cacert", "cert", "key"].map(|name| (name, location.take(name)));
    if !is_encrypted {
        for (name, _) in [root, certificate, key].iter().filter(|(_, file)| file.is_some()) {
            let useless = Wrong::new(format!("`{name}` is of no use where nothing is encrypted"));
            wrong.push(useless.hint("write rediss:// instead of redis://, or remove it"));
        }
        return None;
    }
    let roots = match root {
        (name, Some(file)) => pem::roots(name, &file, wrong).map(|(_, content)| content),
        (name, None) => {
            pem::system_roots(name, wrong);
            None
        }
    };
    let names = (certificate.0, key.0);
    let identity = pem::identity(certificate, key, wrong).map(|(identity, content)| {
        // Only to see whether they are of each other.
        pem::client(Trust::Anybody, Some(identity), names, wrong);
        content
    });
    Some(Certificates { roots, identity })
}

/// Says what is better known of servers that are as they should be.
fn advise(table: &Table<'_>, key: &Key, servers: &Servers) {
    let file = key.grammar.password_file;
    let far = servers.hosts.iter().find(|(host, _)| !is_loopback(host));
    if let (Some((host, _)), None, Some(_)) = (far, &servers.tls, &servers.password) {
        let advice = format!("the password goes to {host} unencrypted, and so does all that is kept there");
        table.advise(key.name, format!("{advice}: write rediss://, with cacert=FILE unless the system knows its root"));
    }
    let is_guarded = matches!(servers.topology, Topology::Sentinel { is_guarded: true, .. });
    if servers.password.is_none() && (servers.user.is_some() || is_guarded) {
        let advice = "without a password, connections are those of the default user, to Sentinels too";
        table.advise(key.name, format!("{advice}: name a file with the password, {file} = \"...\", if there is one"));
    }
}

#[cfg(test)]
mod tests;
