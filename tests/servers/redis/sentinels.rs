//! A Redis with a replica, and Sentinels who watch over both.

use std::net::SocketAddr;

use super::{Redis, until};

/// What the Sentinels call it.
const NAME: &str = "records";

/// How many Sentinels there are, of whom two have to agree.
const SENTINELS: usize = 3;

/// A primary with one replica, and three Sentinels.
pub struct Sentinels {
    servers: Vec<Redis>,
    sentinels: Vec<Redis>,
}

impl Sentinels {
    /// Starts all of them, the servers appending what is written to a file; nothing (and a failure where `CI` is set) where
    /// Redis is not installed.
    #[track_caller]
    pub fn start() -> Option<Self> {
        Self::with(&[("appendonly", "yes")], false)
    }

    /// As [`Sentinels::start`], the servers with these settings. The password among them is one that the Sentinels want
    /// as well, where they are guarded.
    #[track_caller]
    pub fn with(settings: &[(&str, &str)], are_guarded: bool) -> Option<Self> {
        let primary = server(settings, None)?;
        let replica = server(settings, Some(primary.address()))?;
        let (ip, port) = (primary.address().ip(), primary.address().port());
        let mut watch = vec![
            ("sentinel", format!("monitor {NAME} {ip} {port} 2")),
            ("sentinel", format!("down-after-milliseconds {NAME} 1500")),
            ("sentinel", format!("failover-timeout {NAME} 3000")),
        ];
        if let Some(password) = &primary.password {
            watch.push(("sentinel", format!("auth-pass {NAME} {password}")));
            if are_guarded {
                watch.push(("requirepass", password.clone()));
                watch.push(("sentinel", format!("sentinel-pass {password}")));
            }
        }
        let watch: Vec<_> = watch.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let sentinels: Option<Vec<Redis>> = (0..SENTINELS).map(|_| Redis::sentinel(&watch)).collect();
        let all = Self { servers: vec![primary, replica], sentinels: sentinels? };
        all.wait_until_whole();
        Some(all)
    }

    /// The URL, with all Sentinels.
    pub fn url(&self) -> String {
        let sentinels: Vec<String> = self.sentinels.iter().map(|one| one.address().to_string()).collect();
        let guard = if self.sentinels[0].password.is_some() { "&sentinel_auth=true" } else { "" };
        format!("redis://{}{}?sentinel={NAME}{guard}", self.servers[0].user_info(), sentinels.join(","))
    }

    pub fn sentinels(&self) -> &[Redis] {
        &self.sentinels
    }

    /// The server that the Sentinels say takes writes.
    #[track_caller]
    pub fn primary(&self) -> &Redis {
        let address = said_by(&self.sentinels[0]).expect("a primary");
        self.servers.iter().find(|server| server.address() == address).expect("one of the two")
    }

    /// The other one.
    #[track_caller]
    pub fn replica(&self) -> &Redis {
        let primary = self.primary().address();
        self.servers.iter().find(|server| server.address() != primary).expect("one of the two")
    }

    /// Waits until the replica has all that the primary has acknowledged by now.
    #[track_caller]
    pub fn wait_until_copied(&self) {
        let offset = |server: &Redis, field: &str| server.info("replication", field)?.parse::<u64>().ok();
        let written = offset(self.primary(), "master_repl_offset").expect("an offset");
        until("a replica that has everything", || {
            offset(self.replica(), "slave_repl_offset").is_some_and(|copied| copied >= written)
        });
    }

    /// Kills the primary. The Sentinels have not noticed yet.
    #[track_caller]
    pub fn kill_primary(&self) -> &Redis {
        let primary = self.primary();
        primary.kill9();
        primary
    }

    /// Waits until the Sentinels have put another in the place of this one, and all of them know.
    #[track_caller]
    pub fn wait_for_failover(&self, from: &Redis) {
        until("another primary", || {
            let others: Vec<_> = self.sentinels.iter().filter(|one| one.is_running()).filter_map(said_by).collect();
            others.iter().all(|address| *address != from.address())
                && self.servers.iter().any(|server| others.first() == Some(&server.address()) && server.is_primary())
        });
    }

    /// Waits until all Sentinels know of each other and of both servers, one of which copies the other.
    #[track_caller]
    pub fn wait_until_whole(&self) {
        until("Sentinels who know of each other and of a replica", || {
            let knows = |one: &Redis| {
                let about = one.ask(&["SENTINEL", "MASTER", NAME]).list();
                let about: Vec<String> = about.into_iter().map(super::Reply::text).collect();
                let says = |name: &str, value: &str| about.chunks(2).any(|pair| pair[0] == name && pair[1] == value);
                says("num-other-sentinels", "2") && says("num-slaves", "1") && says("flags", "master")
            };
            self.sentinels.iter().all(knows) && self.replica().is_linked()
        });
    }
}

/// A server, that copies the one at this address.
#[track_caller]
fn server(settings: &[(&str, &str)], copies: Option<SocketAddr>) -> Option<Redis> {
    let server = Redis::planned(settings, false)?;
    let (ip, port) = (server.address.ip(), server.address.port());
    let mut lines = format!("port {port}\nreplica-announce-ip {ip}\nrepl-diskless-sync-delay 0\n");
    if let Some(password) = &server.password {
        lines += &format!("masterauth {password}\n");
    }
    if let Some(address) = copies {
        lines += &format!("replicaof {} {}\n", address.ip(), address.port());
    }
    server.configure(&lines);
    server.begin();
    Some(server)
}

/// Where a Sentinel says that the primary is.
fn said_by(sentinel: &Redis) -> Option<SocketAddr> {
    let said = sentinel.try_session().ok()?.ask(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME]).ok()?.list();
    let parts: Vec<String> = said.into_iter().map(super::Reply::text).collect();
    parts.join(":").parse().ok()
}
