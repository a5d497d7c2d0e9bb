//! Connects to servers, and checks that they are primaries.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::io::tcp::socket2::TcpKeepalive;
use redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, ConnectionAddr, FromRedisValue, IntoConnectionInfo,
    RedisConnectionInfo, RedisError, RedisResult, TlsCertificates, Value,
};
use tokio::time::timeout;

use super::super::error::message;
use super::super::{OpenError, Servers, Topology};
use super::slots::Slots;

/// How long a connection may take until it is known to work.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// How long the Sentinels have to say which server is the primary, unless most of them have said it before.
const SENTINEL_TIMEOUT: Duration = Duration::from_secs(1);

/// The idle time after which TCP keepalive probes a server: a subscription alone would not notice that it has gone.
const KEEPALIVE: Duration = Duration::from_secs(10);

/// The oldest version that has all that is used.
const MIN_VERSION: (u32, u32) = (6, 2);

/// A host and a port.
pub(super) type Address = (String, u16);

/// A server that answers.
#[derive(Clone)]
pub(super) struct Node {
    pub(super) address: Address,
    pub(super) connection: MultiplexedConnection,
    /// Tells one connection from another.
    pub(super) number: u64,
    /// How many wait for its answers.
    pub(super) in_flight: Arc<AtomicUsize>,
    pub(super) client: Client,
    pub(super) version: String,
}

/// The servers that are connected to.
#[derive(Clone, Default)]
pub(super) struct Connections {
    pub(super) nodes: Vec<Node>,
    /// Which of them has what, in a cluster.
    pub(super) slots: Option<Slots>,
}

/// A server's answer to `HELLO`.
pub(super) struct Hello {
    version: String,
    pub(super) mode: String,
    is_replica: bool,
}

/// Makes connections.
pub(super) struct Connector {
    pub(super) servers: Servers,
    made: AtomicU64,
}

impl Connector {
    pub(super) fn new(servers: Servers) -> Self {
        Self { servers, made: AtomicU64::new(0) }
    }

    /// Whether connections could be made with these settings.
    pub(super) fn try_settings(&self) -> Result<(), OpenError> {
        let mut hosts = self.servers.hosts.iter();
        hosts.try_for_each(|host| self.client(host, self.credentials()).map(drop).map_err(|error| at(host, &error)))
    }

    /// Connects; `before` holds the existing connections. In a cluster some nodes may be missing.
    pub(super) async fn connect(&self, before: &Connections) -> Result<Connections, OpenError> {
        match &self.servers.topology {
            Topology::Standalone => self.standalone().await,
            Topology::Sentinel { primary, is_guarded } => self.sentinel_primary(primary, *is_guarded).await,
            Topology::Cluster => self.cluster(before).await,
        }
    }

    /// The host that takes writes. With two independent primaries, neither can be preferred.
    async fn standalone(&self) -> Result<Connections, OpenError> {
        let mut failure = None;
        let mut primaries = Vec::new();
        for reached in join_all(self.servers.hosts.iter().map(|address| self.primary(address))).await {
            match reached {
                Ok(node) => primaries.push(node),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        if primaries.len() > 1 && !is_same_server(&primaries).await {
            let servers: Vec<String> = primaries.iter().map(|node| format_address(&node.address)).collect();
            return Err(OpenError::Unfit(format!(
                "{} both take writes, and records would be in one or the other: name one of them, or use Sentinels or a \
                 cluster",
                servers.join(" and ")
            )));
        }
        match primaries.into_iter().next() {
            Some(node) => Ok(Connections { nodes: vec![node], slots: None }),
            None => Err(failure.unwrap_or_else(|| OpenError::Failed("no host is named".to_owned()))),
        }
    }

    async fn primary(&self, address: &Address) -> Result<Node, OpenError> {
        let (node, hello) = self.node(address).await?;
        let server = format_address(address);
        match &*hello.mode {
            "sentinel" => Err(OpenError::Unfit(format!("{server} is a Sentinel, and not a server that keeps data"))),
            "cluster" => Err(OpenError::Unfit(format!("{server} is a node of a cluster, and is to be used as one"))),
            _ if hello.is_replica => {
                Err(OpenError::Unreachable(format!("{server} is a replica, which takes no writes")))
            }
            _ => Ok(node),
        }
    }

    async fn sentinel_primary(&self, name: &str, is_guarded: bool) -> Result<Connections, OpenError> {
        let (named, failure) = self.ask_sentinels(name, is_guarded).await;
        let mut failure = failure.unwrap_or_else(|| {
            OpenError::Unreachable(format!("no Sentinel knows a primary by the name of {name} at this moment"))
        });
        let most = named.first().map_or(0, |(_, times)| *times);
        // A server with fewer votes may have been demoted.
        for (address, _) in named.into_iter().take_while(|(_, times)| *times == most) {
            match self.primary(&address).await {
                Ok(node) => return Ok(Connections { nodes: vec![node], slots: None }),
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    /// Where the Sentinels say that the primary is, if more of them say so than that it is where it is connected to.
    pub(super) async fn named_elsewhere(&self, connections: &Connections) -> Option<Address> {
        let Topology::Sentinel { primary, is_guarded } = &self.servers.topology else { return None };
        let node = connections.nodes.first()?;
        let (named, _) = self.ask_sentinels(primary, *is_guarded).await;
        let votes = named.iter().find(|(address, _)| *address == node.address).map_or(0, |(_, times)| *times);
        named.into_iter().next().filter(|(_, times)| *times > votes).map(|(address, _)| address)
    }

    /// The addresses that Sentinels give and how many give each, most first; and why one gave none.
    async fn ask_sentinels(&self, name: &str, is_guarded: bool) -> (Vec<(Address, usize)>, Option<OpenError>) {
        let hosts = &self.servers.hosts;
        let mut asked: FuturesUnordered<_> =
            hosts.iter().map(|sentinel| self.ask_sentinel(sentinel, name, is_guarded)).collect();
        let mut named: HashMap<Address, usize> = HashMap::new();
        let mut failure = None;
        let asking = async {
            while let Some(response) = asked.next().await {
                match response {
                    Ok(Some(address)) => {
                        let times = named.entry(address).or_default();
                        *times += 1;
                        if *times > hosts.len() / 2 {
                            return;
                        }
                    }
                    Ok(None) => {}
                    Err(error) => failure = Some(error),
                }
            }
        };
        // Sentinels that answer later are ignored.
        let _ = timeout(SENTINEL_TIMEOUT, asking).await;
        let mut named: Vec<(Address, usize)> = named.into_iter().collect();
        named.sort_by_key(|(_, times)| std::cmp::Reverse(*times));
        (named, failure)
    }

    async fn ask_sentinel(
        &self,
        sentinel: &Address,
        name: &str,
        is_guarded: bool,
    ) -> Result<Option<Address>, OpenError> {
        let settings = if is_guarded { self.credentials() } else { RedisConnectionInfo::default() };
        let client = self.client(sentinel, settings).map_err(|error| at(sentinel, &error))?;
        let mut question = redis::cmd("SENTINEL");
        question.arg("GET-MASTER-ADDR-BY-NAME").arg(name);
        let asking = async { question.query_async(&mut dial(&client).await?).await };
        asking.await.map_err(|error| at(sentinel, &error))
    }

    /// A connection to a server that answers.
    pub(super) async fn node(&self, address: &Address) -> Result<(Node, Hello), OpenError> {
        let client = self.client(address, self.credentials()).map_err(|error| at(address, &error))?;
        let hello = async {
            let mut connection = dial(&client).await?;
            let hello = hello(&mut connection).await?;
            // A server that loads its data, or has lost its primary and is configured to report that, fails this.
            redis::cmd("PING").query_async::<()>(&mut connection).await?;
            Ok::<_, RedisError>((connection, hello))
        };
        let hello = timeout(CONNECT_TIMEOUT, hello).await.unwrap_or_else(|_| Err(timed_out()));
        let (connection, hello) = hello.map_err(|error| at(address, &error))?;
        if hello.mode != "sentinel" && is_old(&hello.version) {
            return Err(OpenError::Old(hello.version));
        }
        let node = Node {
            address: address.clone(),
            connection,
            number: self.made.fetch_add(1, Ordering::Relaxed),
            in_flight: Arc::default(),
            client,
            version: hello.version.clone(),
        };
        Ok((node, hello))
    }

    fn credentials(&self) -> RedisConnectionInfo {
        let mut settings = RedisConnectionInfo::default().set_db(self.servers.database);
        if let Some(user) = &self.servers.user {
            settings = settings.set_username(user);
        }
        if let Some(password) = &self.servers.password {
            settings = settings.set_password(password);
        }
        settings
    }

    fn client(&self, (host, port): &Address, settings: RedisConnectionInfo) -> RedisResult<Client> {
        let address = match self.servers.tls {
            None => ConnectionAddr::Tcp(host.clone(), *port),
            Some(_) => ConnectionAddr::TcpTls { host: host.clone(), port: *port, insecure: false, tls_params: None },
        };
        let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE / 2).with_retries(3);
        let tcp = TcpSettings::default().set_nodelay(true).set_keepalive(keepalive);
        let server = address.into_connection_info()?.set_tcp_settings(tcp);
        let server =
            server.set_redis_settings(settings.set_lib_name(env!("CARGO_PKG_NAME"), env!("CARGO_PKG_VERSION")));
        let Some(certificates) = &self.servers.tls else { return Client::open(server) };
        let identity = certificates.identity.as_ref();
        let client_tls = identity
            .map(|(certificates, key)| ClientTlsConfig { client_cert: certificates.clone(), client_key: key.clone() });
        Client::build_with_tls(server, TlsCertificates { client_tls, root_cert: certificates.roots.clone() })
    }
}

impl Node {
    /// Whether it is there still, and still takes writes.
    pub(super) async fn check(&self, patience: Duration) -> RedisResult<()> {
        let hello = timeout(patience, hello(&mut self.connection.clone())).await.map_err(|_| timed_out())??;
        if hello.is_replica && hello.mode != "cluster" {
            return Err(demoted("it has become a replica".to_owned()));
        }
        Ok(())
    }
}

/// The error for a server that is reachable but no longer the primary.
pub(super) fn demoted(why: String) -> RedisError {
    RedisError::from((redis::ErrorKind::Client, "no primary", why))
}

/// The error for a server that does not answer.
pub(super) fn timed_out() -> RedisError {
    RedisError::from(std::io::Error::new(std::io::ErrorKind::TimedOut, "it did not answer in time"))
}

pub(super) fn format_address((host, port): &Address) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

async fn dial(client: &Client) -> RedisResult<MultiplexedConnection> {
    let config = AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(None);
    client.get_multiplexed_async_connection_with_config(&config).await
}

/// Whether these are one server by several names.
async fn is_same_server(nodes: &[Node]) -> bool {
    let mut question = redis::cmd("INFO");
    question.arg("server");
    let ids = join_all(nodes.iter().map(async |node| {
        let response: String =
            timeout(CONNECT_TIMEOUT, question.query_async(&mut node.connection.clone())).await.ok()?.ok()?;
        response.lines().find_map(|line| Some(line.strip_prefix("run_id:")?.to_owned()))
    }));
    let ids = ids.await;
    ids[0].is_some() && ids.iter().all(|id| *id == ids[0])
}

/// Asks a server for its role and version, which every user may.
async fn hello(connection: &mut MultiplexedConnection) -> RedisResult<Hello> {
    let response: HashMap<String, Value> = redis::cmd("HELLO").arg(2).query_async(connection).await?;
    let part = |name| response.get(name).and_then(|value| String::from_redis_value_ref(value).ok()).unwrap_or_default();
    Ok(Hello { version: part("version"), mode: part("mode"), is_replica: part("role") == "replica" })
}

/// Whether a version is older than the oldest that will do; not so where it says nothing.
fn is_old(version: &str) -> bool {
    let mut parts = version.split('.').map_while(|part| part.parse::<u32>().ok());
    match (parts.next(), parts.next()) {
        (Some(major), Some(minor)) => (major, minor) < MIN_VERSION,
        _ => false,
    }
}

pub(super) fn at(address: &Address, error: &RedisError) -> OpenError {
    let server = format_address(address);
    match OpenError::of(error) {
        OpenError::Unreachable(_) => OpenError::Unreachable(format!("{server}: {}", message(error))),
        OpenError::Refused(_) => OpenError::Refused(format!("{server}: {}", message(error))),
        OpenError::Tls(_) => OpenError::Tls(format!("{server}: {}", message(error))),
        _ => match unknown_command(&error.to_string()).as_deref() {
            Some("HELLO") => OpenError::Old(format!("at {server}")),
            Some("SENTINEL") => OpenError::Unfit(format!("{server} is not a Sentinel")),
            Some(command) => OpenError::Failed(format!("{server}: it does not know the command {command}")),
            None => OpenError::Failed(format!("{server}: {}", message(error))),
        },
    }
}

/// The name of a command that the server does not have, by what it says: `unknown command 'SENTINEL', with args ...`.
fn unknown_command(said: &str) -> Option<String> {
    const UNKNOWN: &str = "unknown command";
    let at = said.to_ascii_lowercase().find(UNKNOWN)?;
    let name = said[at + UNKNOWN.len()..].trim_start_matches([' ', '\'', '`', '"']);
    let end = name.find(|char: char| !char.is_ascii_alphanumeric()).unwrap_or(name.len());
    Some(name[..end].to_ascii_uppercase()).filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_is_unknown_is_named() {
        for (said, command) in [
            ("ERR: unknown command 'SENTINEL', with args beginning with: 'get-master-addr-by-name'", Some("SENTINEL")),
            ("An error was signalled by the server - ResponseError: unknown command `hello`, with args", Some("HELLO")),
            ("ERR unknown command", None),
            ("NOPERM this user has no permissions to run the 'ping' command", None),
        ] {
            assert_eq!(unknown_command(said).as_deref(), command, "{said}");
        }
    }

    #[test]
    fn versions_are_compared() {
        for old in ["5.0.14", "6.0.16", "6.1.240"] {
            assert!(is_old(old), "{old}");
        }
        for good in ["6.2.0", "7.0.15", "8.0.1", "10.1", "", "unstable"] {
            assert!(!is_old(good), "{good}");
        }
    }
}
