//! `[store]` where it is PostgreSQL: `postgres://USER:PASSWORD@HOST:PORT/DATABASE?PARAMETER=VALUE`

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::{ChannelBinding, Host, LoadBalanceHosts, TargetSessionAttrs};

use super::encryption::{self, Encryption};
use super::location::{Location, UrlGrammar, port_number, shown_address, take_apart};
use super::{Keys, Node, Table, Wrong};
use crate::store::postgres::Settings;

/// A PostgreSQL store.
#[derive(Clone)]
pub struct Postgres {
    /// What it is opened with.
    pub settings: Settings,
    /// Its URL without the password.
    pub url: String,
    /// The file that the password came from.
    pub password_file: Option<PathBuf>,
}

impl Postgres {
    /// Where it is, for people: `HOST:PORT`, several with commas between, and the database where the URL names it.
    #[must_use]
    pub fn servers(&self) -> String {
        let servers = &self.settings.servers;
        let server = |(host, port): (&Host, &u16)| match host {
            Host::Tcp(host) => shown_address(host, *port),
            Host::Unix(directory) => format!("{}:{port}", directory.display()),
        };
        let hosts: Vec<String> = servers.get_hosts().iter().zip(servers.get_ports()).map(server).collect();
        let database = servers.get_dbname().map_or_else(String::new, |database| format!("/{database}"));
        format!("{}{database}", hosts.join(","))
    }
}

impl fmt::Debug for Postgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Postgres");
        shown.field("url", &self.url).field("password_file", &self.password_file);
        shown.field("connections", &self.settings.connections).finish_non_exhaustive()
    }
}

/// How long opening a connection may take where the URL does not say: a host that is gone must not hold up the next one.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// When a silent connection is asked whether it lives, how often, and how many times: a server that went away without a
/// word is found out within a minute.
const KEEPALIVES: (Duration, Duration, u32) = (Duration::from_secs(30), Duration::from_secs(10), 3);

/// The password of `password_file`, which is that of all databases of a list.
pub(super) fn password_of_file(table: &Table<'_>, keys: &Keys) -> Option<Vec<u8>> {
    table.read_file(GRAMMAR.password_file, keys.password_file.as_deref(), super::password)
}

/// Reads the URL behind its scheme, which says PostgreSQL; reports what is wrong with it.
pub(super) fn read(
    table: &Table<'_>,
    node: &Node<'_>,
    keys: &Keys,
    from_file: Option<Vec<u8>>,
    (scheme, rest): (&str, &str),
) -> Option<Postgres> {
    let mut location = take_apart(&GRAMMAR, scheme, rest).map_err(|wrong| node.report(wrong)).ok()?;
    let mut wrong = Vec::new();
    let (mut servers, encryption) = servers(&mut location, &mut wrong);
    wrong.extend(location.unknown(&GRAMMAR));
    super::only_one_password(table, &GRAMMAR, &location);
    if !wrong.is_empty() {
        wrong.into_iter().for_each(|wrong| node.report(wrong));
        return None;
    }
    let from_environment = || node.context.password.as_ref().map(|password| password.clone().into_bytes());
    if let Some(password) = location.password.or(from_file).or_else(from_environment) {
        servers.password(password);
    }
    if let Some(advice) = encryption::advice(&servers, &encryption) {
        table.advise("url", advice);
    }
    let connections = keys.connections.unwrap_or(Settings::USUAL_CONNECTIONS);
    let settings = Settings { servers, tls: encryption.client, connections };
    Some(Postgres { settings, url: location.shown, password_file: keys.password_file.clone() })
}

/// What is particular to these URLs.
pub(super) const GRAMMAR: UrlGrammar = UrlGrammar {
    kind: "postgres:",
    form: "write \"postgres://USER@HOST:PORT/DATABASE\"",
    hidden_password: "",
    parameters: "application_name channel_binding connect_timeout dbname host hostaddr keepalives \
                 keepalives_count keepalives_idle keepalives_interval keepalives_retries load_balance_hosts \
                 options password port sslcert sslkey sslmode sslnegotiation sslrootcert target_session_attrs \
                 tcp_user_timeout user",
    otherwise: "remove it; settings of the server's sessions are written options=-c%20NAME%3DVALUE",
    password_file: "password_file",
};

/// Puts everything but the password into the driver's form. What is left in `location` afterwards is unknown.
fn servers(location: &mut Location, wrong: &mut Vec<Wrong>) -> (Config, Encryption) {
    let mut servers = Config::new();
    addresses(location, &mut servers, wrong);
    if let Some(user) = either(location, "user", |location| location.user.take(), wrong) {
        servers.user(user);
    }
    if let Some(database) = either(location, "dbname", |location| location.database.take(), wrong) {
        servers.dbname(database);
    }
    if let Some(options) = location.take("options") {
        servers.options(options);
    }
    servers.application_name(location.take("application_name").unwrap_or_else(|| "oncegate".to_owned()));
    patience(location, &mut servers, wrong);
    // A gate writes. A primary is what takes writes; of the others, there is no use for any.
    let writable = TargetSessionAttrs::ReadWrite;
    let targets = [("read-write", writable), ("primary", writable), ("any", TargetSessionAttrs::Any)];
    servers.target_session_attrs(location.choice("target_session_attrs", &targets, wrong).unwrap_or(writable));
    let bindings = [
        ("prefer", ChannelBinding::Prefer),
        ("require", ChannelBinding::Require),
        ("disable", ChannelBinding::Disable),
    ];
    if let Some(binding) = location.choice("channel_binding", &bindings, wrong) {
        servers.channel_binding(binding);
    }
    let orders = [("disable", LoadBalanceHosts::Disable), ("random", LoadBalanceHosts::Random)];
    if let Some(order) = location.choice("load_balance_hosts", &orders, wrong) {
        servers.load_balance_hosts(order);
    }
    let encryption = encryption::read(location, &mut servers, wrong);
    (servers, encryption)
}

/// What stands in its place in the URL or is a parameter, but not both.
fn either(
    location: &mut Location,
    name: &str,
    in_place: fn(&mut Location) -> Option<String>,
    wrong: &mut Vec<Wrong>,
) -> Option<String> {
    match (in_place(location), location.take(name)) {
        (Some(_), Some(_)) => {
            wrong.push(
                Wrong::new(format!("`{name}` stands twice: before the `?` and behind it")).hint("remove one of them"),
            );
            None
        }
        (in_place, parameter) => in_place.or(parameter),
    }
}

/// Reads hosts and ports, one port for each host.
fn addresses(location: &mut Location, servers: &mut Config, wrong: &mut Vec<Wrong>) {
    let in_place =
        |location: &mut Location| Some(std::mem::take(&mut location.hosts)).filter(|hosts| !hosts.is_empty());
    let named = location.take("host");
    let mut hosts = match (in_place(location), named) {
        (Some(_), Some(_)) => {
            wrong.push(Wrong::new("`host` stands twice: before the `?` and behind it").hint("remove one of them"));
            return;
        }
        (Some(hosts), None) => hosts,
        (None, named) => named.iter().flat_map(|hosts| hosts.split(',')).map(|host| (host.to_owned(), None)).collect(),
    };
    let addresses = numeric_addresses(location, wrong);
    if hosts.is_empty() {
        // A certificate is then looked at for the address.
        hosts = addresses.iter().map(|address| (address.to_string(), None)).collect();
    } else if !addresses.is_empty() && addresses.len() != hosts.len() {
        wrong.push(Wrong::new("`hostaddr` has another number of addresses than there are hosts").hint("write as many"));
    } else if !addresses.is_empty() && hosts.iter().any(|(host, _)| host.starts_with('/')) {
        wrong.push(Wrong::new("`hostaddr` is not for sockets").hint("remove it"));
    } else {
        addresses.into_iter().for_each(|address| _ = servers.hostaddr(address));
    }
    if hosts.is_empty() {
        let none = Wrong::new("no host is named");
        wrong.push(none.hint("write postgres://USER@HOST/DATABASE; for a socket, ?host=/run/postgresql"));
    }
    if hosts.iter().any(|(host, _)| host.trim().is_empty()) {
        wrong.push(Wrong::new("a host is missing").hint("write a name between two commas, or remove one of them"));
    }
    ports(location, &mut hosts, wrong);
    for (host, port) in hosts {
        servers.host(host).port(port.unwrap_or(5432));
    }
}

fn numeric_addresses(location: &mut Location, wrong: &mut Vec<Wrong>) -> Vec<IpAddr> {
    let Some(addresses) = location.take("hostaddr") else { return Vec::new() };
    let parsed: Result<Vec<IpAddr>, _> = addresses.split(',').map(str::parse).collect();
    parsed.unwrap_or_else(|_| {
        let not_one = Wrong::new("`hostaddr` is not a list of IP addresses");
        wrong.push(not_one.hint("write hostaddr=192.0.2.1, or remove it: hosts are looked up by name"));
        Vec::new()
    })
}

fn ports(location: &mut Location, hosts: &mut [(String, Option<u16>)], wrong: &mut Vec<Wrong>) {
    let Some(ports) = location.take("port") else { return };
    if hosts.iter().any(|(_, port)| port.is_some()) {
        wrong.push(Wrong::new("`port` stands twice: before the `?` and behind it").hint("remove one of them"));
        return;
    }
    let ports: Option<Vec<u16>> =
        ports.split(',').map(|port| if port.is_empty() { Some(5432) } else { port_number(port) }).collect();
    match ports.as_deref() {
        None => wrong.push(Wrong::new("`port` is not a number from 1 to 65535").hint("write port=5432")),
        Some([port]) => hosts.iter_mut().for_each(|(_, one)| *one = Some(*port)),
        Some(ports) if ports.len() == hosts.len() => {
            hosts.iter_mut().zip(ports).for_each(|((_, one), port)| *one = Some(*port));
        }
        Some(_) => {
            wrong.push(
                Wrong::new("`port` has another number of ports than there are hosts").hint("write one, or as many"),
            );
        }
    }
}

/// Reads how long to wait for what.
fn patience(location: &mut Location, servers: &mut Config, wrong: &mut Vec<Wrong>) {
    let mut number = |name: &str, unit| {
        let value = location.take(name)?;
        let number = value.parse::<u32>().ok().filter(|number| *number > 0);
        if number.is_none() {
            let hint = format!("write a whole number of {unit}, at least 1, or remove it for the default");
            wrong.push(Wrong::new(format!("`{name}` is not a number of {unit}")).hint(hint));
        }
        number
    };
    let seconds = |number: u32| Duration::from_secs(number.into());
    servers.connect_timeout(number("connect_timeout", "seconds").map_or(CONNECT_TIMEOUT, seconds));
    servers.keepalives_idle(number("keepalives_idle", "seconds").map_or(KEEPALIVES.0, seconds));
    servers.keepalives_interval(number("keepalives_interval", "seconds").map_or(KEEPALIVES.1, seconds));
    // The one is libpq's word, the other the driver's.
    let count = number("keepalives_count", "probes").or(number("keepalives_retries", "probes"));
    servers.keepalives_retries(count.unwrap_or(KEEPALIVES.2));
    if let Some(millis) = number("tcp_user_timeout", "milliseconds") {
        servers.tcp_user_timeout(Duration::from_millis(millis.into()));
    }
    if let Some(keepalives) = location.choice("keepalives", &[("1", true), ("0", false)], wrong) {
        servers.keepalives(keepalives);
    }
}
