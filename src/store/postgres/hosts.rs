//! The hosts of a database, one by one.
//!
//! The driver tries them by itself, but waits without limit for a host that accepts a connection and then hangs, and
//! uses a host that accepts a login but cannot commit.

use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::{Host, LoadBalanceHosts};

/// How many there are.
pub(super) fn count(servers: &Config) -> usize {
    servers.get_hosts().len().max(servers.get_hostaddrs().len()).max(1)
}

/// Their places, in the order in which they are to be tried.
pub(super) fn order(servers: &Config) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count(servers)).collect();
    if servers.get_load_balance_hosts() == LoadBalanceHosts::Random {
        fastrand::shuffle(&mut order);
    }
    order
}

/// The name and port of one.
pub(super) fn name(servers: &Config, place: usize) -> String {
    let host = match (servers.get_hosts().get(place), servers.get_hostaddrs().get(place)) {
        (Some(Host::Tcp(name)), _) => name.clone(),
        #[cfg(unix)]
        (Some(Host::Unix(path)), _) => return path.display().to_string(),
        (None, Some(address)) => address.to_string(),
        (None, None) => String::new(),
    };
    match port(servers, place) {
        Some(port) => format!("{host}:{port}"),
        None => host,
    }
}

/// Its name, where that is to be looked up.
pub(super) fn to_look_up(servers: &Config, place: usize) -> Option<&str> {
    match (servers.get_hosts().get(place)?, servers.get_hostaddrs().get(place)) {
        (Host::Tcp(name), None) => Some(name),
        _ => None,
    }
}

/// One port may stand for all.
fn port(servers: &Config, place: usize) -> Option<u16> {
    servers.get_ports().get(place).or_else(|| servers.get_ports().first()).copied()
}

/// The settings for one. Each of its addresses may take `connect_timeout` to be reached.
pub(super) fn one(servers: &Config, place: usize, connect_timeout: Duration) -> Config {
    let mut one = Config::new();
    match servers.get_hosts().get(place) {
        Some(Host::Tcp(name)) => drop(one.host(name)),
        #[cfg(unix)]
        Some(Host::Unix(path)) => drop(one.host_path(path)),
        None => {}
    }
    if let Some(address) = servers.get_hostaddrs().get(place) {
        one.hostaddr(*address);
    }
    if let Some(port) = port(servers, place) {
        one.port(port);
    }
    if let Some(user) = servers.get_user() {
        one.user(user);
    }
    if let Some(password) = servers.get_password() {
        one.password(password);
    }
    if let Some(name) = servers.get_dbname() {
        one.dbname(name);
    }
    if let Some(options) = servers.get_options() {
        one.options(options);
    }
    if let Some(name) = servers.get_application_name() {
        one.application_name(name);
    }
    if let Some(timeout) = servers.get_tcp_user_timeout() {
        one.tcp_user_timeout(*timeout);
    }
    if let Some(interval) = servers.get_keepalives_interval() {
        one.keepalives_interval(interval);
    }
    if let Some(retries) = servers.get_keepalives_retries() {
        one.keepalives_retries(retries);
    }
    one.ssl_mode(servers.get_ssl_mode())
        .ssl_negotiation(servers.get_ssl_negotiation())
        .connect_timeout(connect_timeout)
        .keepalives(servers.get_keepalives())
        .keepalives_idle(servers.get_keepalives_idle())
        .target_session_attrs(servers.get_target_session_attrs())
        .channel_binding(servers.get_channel_binding());
    one
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_host_keeps_all_that_is_said_of_them() {
        let text = "postgres://me:secret@one:1,two:2/shop?application_name=a&options=-cx%3Dy&keepalives_idle=7\
                    &keepalives_interval=8&keepalives_retries=9&tcp_user_timeout=5&sslmode=require\
                    &target_session_attrs=read-write&channel_binding=require&connect_timeout=4";
        let all: Config = text.parse().unwrap();
        for (place, (host, port)) in [("one", 1), ("two", 2)].into_iter().enumerate() {
            let alone: Config = text.replace("one:1,two:2", &format!("{host}:{port}")).parse().unwrap();
            assert_eq!(super::one(&all, place, Duration::from_secs(4)), alone);
            assert_eq!(name(&all, place), format!("{host}:{port}"));
        }
        let shared: Config = "host=one,two hostaddr=127.0.0.1,127.0.0.2 port=3".parse().unwrap();
        let one: Config = "host=two hostaddr=127.0.0.2 port=3 connect_timeout=2".parse().unwrap();
        assert_eq!(super::one(&shared, 1, Duration::from_secs(2)), one);
        assert_eq!(name(&shared, 1), "two:3");
    }
}
