//! Connects to servers, and checks that they are primaries.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use redis::aio::MultiplexedConnection;
use redis::io::AsyncDNSResolver;
use redis::io::tcp::TcpSettings;
use redis::io::tcp::socket2::TcpKeepalive;
use redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, ConnectionAddr, FromRedisValue, IntoConnectionInfo,
    RedisConnectionInfo, RedisError, RedisFuture, RedisResult, TlsCertificates, Value,
};
use tokio::time::timeout;

use super::super::error::message;
use super::super::{OpenError, Servers, Topology};
use super::identity::StoreIdentity;
use super::slots::Slots;
use crate::net::Names;

/// How long a connection may take until it is known to work.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// How long the Sentinels have to say which server is the primary, unless most of them have said it before. Their names may have to
/// be looked up in that time.
const SENTINEL_TIMEOUT: Duration = Duration::from_secs(3);

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
    names: Arc<Names>,
    /// There, if the servers keep a store.
    pub(super) identity: Option<StoreIdentity>,
    made: AtomicU64,
}

/// The addresses that a name has led to.
struct Resolved(Vec<SocketAddr>);

impl AsyncDNSResolver for Resolved {
    fn resolve<'a, 'b: 'a>(
        &'a self,
        _: &'b str,
        _: u16,
    ) -> RedisFuture<'a, Box<dyn Iterator<Item = SocketAddr> + Send + 'a>> {
        Box::pin(async move { Ok(Box::new(self.0.iter().copied()) as Box<_>) })
    }
}

impl Connector {
    pub(super) fn new(servers: Servers) -> Self {
        Self { servers, names: Arc::clone(Names::global()), identity: None, made: AtomicU64::new(0) }
    }

    /// For servers that keep a store.
    pub(super) fn of_store(servers: Servers) -> Self {
        Self { identity: Some(StoreIdentity::default()), ..Self::new(servers) }
    }

    /// Whether connections could be made with these settings.
    pub(super) fn try_settings(&self) -> Result<(), OpenError> {
        let mut hosts = self.servers.hosts.iter();
        hosts.try_for_each(|host| self.client(host, self.credentials()).map(drop).map_err(|error| at(host, &error)))
    }

    /// Connects; `before` holds the existing connections. In a cluster some nodes may be missing.
    pub(super) async fn connect(&self, before: &Connections) -> Result<Connections, OpenError> {
        let connections = match &self.servers.topology {
            Topology::Standalone => self.standalone().await,
            Topology::Sentinel { primary, is_guarded } => self.sentinel_primary(primary, *is_guarded).await,
            Topology::Cluster => self.cluster(before).await,
        }?;
        self.recognise(&connections).await.map(|()| connections)
    }

    /// The address that takes writes, of all that the hosts have. With two independent primaries, neither can be preferred.
    async fn standalone(&self) -> Result<Connections, OpenError> {
        let mut failure = None;
        let mut primaries = Vec::new();
        for reached in join_all(self.servers.hosts.iter().map(|host| self.primaries(host))).await {
            for reached in reached {
                match reached {
                    Ok(primary) => primaries.push(primary),
                    Err(error) => failure = failure.or(Some(error)),
                }
            }
        }
        let (servers, primaries): (Vec<String>, Vec<Node>) = primaries.into_iter().unzip();
        if primaries.len() > 1 && !is_same_server(&primaries).await {
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

    /// What each address of a host comes to, with its name for people.
    async fn primaries(&self, host: &Address) -> Vec<Result<(String, Node), OpenError>> {
        let addresses = match self.resolve(host).await {
            Ok(addresses) => addresses,
            Err(error) => return vec![Err(error)],
        };
        let is_alone = addresses.len() < 2;
        join_all(addresses.into_iter().map(async |address| {
            let server =
                if is_alone { format_address(host) } else { format!("{} ({})", format_address(host), address.ip()) };
            let node = fit(self.node_at(host, vec![address]).await?, &server)?;
            Ok((server, node))
        }))
        .await
    }

    async fn primary(&self, address: &Address) -> Result<Node, OpenError> {
        fit(self.node(address).await?, &format_address(address))
    }

    /// The addresses of a host.
    async fn resolve(&self, (host, port): &Address) -> Result<Vec<SocketAddr>, OpenError> {
        let found = self.names.resolve_within(CONNECT_TIMEOUT, host, *port).await;
        found.map_err(|error| at(&(host.clone(), *port), &error.into()))
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
        let (mut failure, mut is_any_answer) = (None, false);
        let asking = async {
            while let Some(response) = asked.next().await {
                match response {
                    Ok(Some(address)) => {
                        is_any_answer = true;
                        let times = named.entry(address).or_default();
                        *times += 1;
                        if *times > hosts.len() / 2 {
                            return;
                        }
                    }
                    Ok(None) => is_any_answer = true,
                    Err(error) => failure = Some(error),
                }
            }
        };
        // Sentinels that answer later are ignored.
        let _ = timeout(SENTINEL_TIMEOUT, asking).await;
        if !is_any_answer && failure.is_none() {
            let seconds = SENTINEL_TIMEOUT.as_secs();
            failure = Some(OpenError::Unreachable(format!("no Sentinel has answered within {seconds} s")));
        }
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
        let addresses = self.resolve(sentinel).await?;
        let asking = async { question.query_async(&mut dial(&client, addresses).await?).await };
        asking.await.map_err(|error| at(sentinel, &error))
    }

    /// A connection to a server that answers.
    pub(super) async fn node(&self, address: &Address) -> Result<(Node, Hello), OpenError> {
        self.node_at(address, self.resolve(address).await?).await
    }

    /// The same, at the first of these addresses that takes a connection.
    async fn node_at(&self, address: &Address, addresses: Vec<SocketAddr>) -> Result<(Node, Hello), OpenError> {
        let client = self.client(address, self.credentials()).map_err(|error| at(address, &error))?;
        let hello = async {
            let mut connection = dial(&client, addresses).await?;
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

async fn dial(client: &Client, addresses: Vec<SocketAddr>) -> RedisResult<MultiplexedConnection> {
    let config = AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(None);
    let config = config.set_dns_resolver(Resolved(addresses));
    client.get_multiplexed_async_connection_with_config(&config).await
}

/// The node, if it is a primary that is used by itself.
fn fit((node, hello): (Node, Hello), server: &str) -> Result<Node, OpenError> {
    match &*hello.mode {
        "sentinel" => Err(OpenError::Unfit(format!("{server} is a Sentinel, and not a server that keeps data"))),
        "cluster" => Err(OpenError::Unfit(format!("{server} is a node of a cluster, and is to be used as one"))),
        _ if hello.is_replica => Err(OpenError::Unreachable(format!("{server} is a replica, which takes no writes"))),
        _ => Ok(node),
    }
}

/// Whether these are one server by several names or addresses. Where the user may not see that, the addresses of one name are
/// believed to be.
async fn is_same_server(nodes: &[Node]) -> bool {
    let mut question = redis::cmd("INFO");
    question.arg("server");
    let ids = join_all(nodes.iter().map(async |node| {
        let response: String =
            timeout(CONNECT_TIMEOUT, question.query_async(&mut node.connection.clone())).await.ok()?.ok()?;
        response.lines().find_map(|line| Some(line.strip_prefix("run_id:")?.to_owned()))
    }));
    let ids = ids.await;
    let is_one_name = nodes.iter().all(|node| node.address == nodes[0].address);
    (ids[0].is_some() || is_one_name) && ids.iter().all(|id| *id == ids[0])
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
    use std::net::IpAddr;

    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::store::servers;

    /// For a name that leads to these addresses.
    fn named(addresses: &[IpAddr], port: u16, topology: Topology) -> Connector {
        let addresses: Vec<SocketAddr> = addresses.iter().map(|address| (*address, 0).into()).collect();
        let names = Names::new(move |_| Ok(addresses.clone()), 1, Duration::ZERO);
        let hosts = vec![("records.test".to_owned(), port)];
        let servers = Servers { topology, hosts, user: None, password: None, database: 0, tls: None };
        Connector { names, ..Connector::of_store(servers) }
    }

    /// Makes a server known by the port of another, at an address of its own.
    async fn known_beside(server: &servers::Redis, other: SocketAddr, last: u8) -> IpAddr {
        let IpAddr::V4(other_ip) = other.ip() else { panic!("{other}") };
        let [a, b, c, _] = other_ip.octets();
        let (address, to) = (IpAddr::from([a, b, c, last]), server.address());
        let listener = TcpListener::bind((address, other.port())).await.unwrap();
        tokio::spawn(async move {
            while let Ok((mut from, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let mut to = TcpStream::connect(to).await.unwrap();
                    let _ = tokio::io::copy_bidirectional(&mut from, &mut to).await;
                });
            }
        });
        address
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn each_address_of_a_name_is_a_host() {
        let (Some(other), Some(primary)) = (servers::Redis::start(), servers::Redis::start()) else { return };
        let (here, port) = (primary.address().ip(), primary.address().port());
        let beside = known_beside(&other, primary.address(), 251).await;
        let again = known_beside(&primary, primary.address(), 252).await;
        let connect = async |addresses: &[IpAddr]| {
            named(addresses, port, Topology::Standalone)
                .connect(&Connections::default())
                .await
                .map(|made| made.nodes.len())
        };
        let refused = connect(&[beside, here]).await.unwrap_err().to_string();
        assert!(refused.contains("both take writes") && refused.contains(&beside.to_string()), "{refused}");
        other.run(&format!("REPLICAOF {here} {port}")).unwrap();
        assert_eq!(connect(&[beside, here]).await.unwrap(), 1, "the replica is passed over");
        assert_eq!(connect(&[again, here]).await.unwrap(), 1, "it is one server");
        let replica = connect(&[beside]).await.unwrap_err();
        assert!(matches!(&replica, OpenError::Unreachable(why) if why.contains("is a replica")), "{replica}");
    }

    #[tokio::test]
    async fn sentinels_that_say_nothing_know_no_other_name() {
        // It is connected to, and never accepts.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = silent.local_addr().unwrap();
        let topology = Topology::Sentinel { primary: "main".to_owned(), is_guarded: false };
        let connector = named(&[address.ip()], address.port(), topology);
        let Err(refused) = connector.connect(&Connections::default()).await else { panic!("it says nothing") };
        assert!(refused.to_string().contains("no Sentinel has answered within"), "{refused}");
    }

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
