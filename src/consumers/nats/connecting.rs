//! Connects to the servers of NATS.
//!
//! The client tries their addresses one after the other. So that silent ones keep it from no other, the gate counts them first, and
//! gives each its part of the time.

use std::io::ErrorKind;
use std::pin::pin;
use std::time::Duration;

use async_nats::{Client, ConnectOptions};
use futures_util::future::join_all;
use tokio::sync::watch;
use tokio::time::timeout;

use super::super::settings::address;
use super::super::source::{Error, LOOKUP};
use super::super::{Nats, NatsLogin};
use super::{failed, trouble};
use crate::net::Names;

/// How long all addresses may take together, unless they are many: less than a connection may take to open.
const ADDRESSES: Duration = Duration::from_secs(8);

/// How long one may take at most, and where they were not counted in time.
const ADDRESS: Duration = Duration::from_secs(5);
const UNCOUNTED: Duration = Duration::from_secs(2);

/// How long one may take at least: a handshake over TLS takes four or five round trips.
const LEAST: Duration = Duration::from_millis(1500);

/// How long the client waits for them to be counted. It looks the names up once more.
const COUNT: Duration = Duration::from_secs(1);

/// Connects. The first trouble of the connection goes to `troubled`.
pub(super) async fn connect(
    consumer: &str,
    source: &Nats,
    troubled: watch::Sender<Option<String>>,
) -> Result<Client, Error> {
    let options = match &source.login {
        NatsLogin::Anonymous => ConnectOptions::new(),
        NatsLogin::Token(token) => ConnectOptions::with_token(token.clone()),
        NatsLogin::User(user, password) => ConnectOptions::with_user_and_password(user.clone(), password.clone()),
    };
    let noted = move |event| {
        if let Some(why) = trouble::of(&event) {
            troubled.send_modify(|known| *known = Some(known.take().unwrap_or(why)));
        }
        std::future::ready(())
    };
    let mut counting = pin!(count(&source.servers));
    let counted = timeout(COUNT, &mut counting).await;
    let patience = counted.as_ref().map_or(UNCOUNTED, |count| patience(*count.as_ref().unwrap_or(&1)));
    let options = options.name(format!("oncegate {consumer}")).event_callback(noted);
    let options = options.require_tls(source.is_encrypted).connection_timeout(patience);
    let scheme = if source.is_encrypted { "tls" } else { "nats" };
    let servers: Vec<String> =
        source.servers.iter().map(|(host, port)| format!("{scheme}://{}", address(host, *port))).collect();
    tokio::select! {
        biased;
        connected = options.connect(servers) => connected.map_err(failed),
        Err(late) = counting, if counted.is_err() => Err(late),
    }
}

/// How many addresses the servers have. An error where no name is found, and some are still being looked up.
async fn count(servers: &[(String, u16)]) -> Result<usize, Error> {
    let names = Names::global();
    let found = join_all(servers.iter().map(|(host, port)| names.resolve_within(LOOKUP, host, *port))).await;
    match found.iter().flatten().map(Vec::len).sum() {
        0 => {
            let late = found.into_iter().filter_map(Result::err).find(|error| error.kind() == ErrorKind::TimedOut);
            late.map_or(Ok(0), |late| Err(failed(late)))
        }
        count => Ok(count),
    }
}

/// How long each of so many addresses may take.
fn patience(addresses: usize) -> Duration {
    (ADDRESSES / u32::try_from(addresses.max(1)).unwrap_or(u32::MAX)).clamp(LEAST, ADDRESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_addresses_are_tried_in_the_time_that_a_connection_may_take_to_open() {
        for addresses in [0, 1, 2, 5] {
            let patience = patience(addresses);
            assert!(patience <= ADDRESS && patience * u32::try_from(addresses).unwrap() <= ADDRESSES, "{addresses}");
        }
        assert_eq!(patience(4), Duration::from_secs(2));
        assert_eq!(patience(64), LEAST, "the client tries them in another order the next time");
    }

    #[tokio::test]
    async fn the_addresses_of_all_servers_are_counted() {
        let servers = ["127.0.0.1", "::1", "no such name.invalid"].map(|host| (host.to_owned(), 4222));
        assert_eq!(count(&servers).await, Ok(2));
        assert_eq!(count(&servers[2..]).await, Ok(0), "the client reports it");
    }
}
