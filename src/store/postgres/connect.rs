//! Makes connections and checks that they work.

use std::future::pending;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::Either;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Config, Error as SqlError};

use super::error::OpenError;
use super::host_selection::{Hosts, Suspicion};
use super::lineage::Lineage;
use super::session::{CallError, Cancel, Query, ServerMessages, Session, spawn_driver};
use super::tls::Encryptor;
use super::{Settings, hosts, schema};
use crate::idempotency::record::Hex;
use crate::net::{Names, race};

/// How long a connection may take from its beginning until it is known to work, besides the time to reach the server.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a login may take once the host was reached: a server that hangs accepts connections too.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a look at the store of a server waits for a lock. It is over before the handshake is: a connection that is given up
/// behind a pooler would wait for as long as the lock is held.
const LINEAGE_LOCK_TIMEOUT: &str = "SET LOCAL lock_timeout = '3s'";

/// How long an address of a server may take to be reached and to log in before the next one is tried beside it. It is no shorter, so
/// that a busy server gets no second login.
const NEXT_ADDRESS: Duration = Duration::from_secs(1);

/// How long a server may take to be reached, unless the settings say.
const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// The setting by which a session is recognised.
const SESSION: &str = "oncegate.session";

/// What every session asks for, whatever the role, the database and the server have as their default: a transaction that
/// saw the database as it was at its beginning would fail where another has changed the record. The backslash keeps the
/// space within the value.
const ISOLATION: &str = r"-c default_transaction_isolation=read\ committed";

/// Makes connections.
#[derive(Clone)]
pub(super) struct Connector {
    servers: Config,
    tls: Encryptor,
    hosts: Arc<Hosts>,
    pub(super) names: Arc<Names>,
    /// Whether the servers must be able to keep records, beyond committing.
    is_for_records: bool,
}

/// The settings to connect with, the host, and its addresses as in [`Connector::addresses`].
type Target<'a> = (&'a Config, usize, &'a Option<Vec<SocketAddr>>);

/// The purpose of a connection.
enum Purpose {
    /// To be used for as long as its host is; notifications go to the other end of this.
    Use(Option<mpsc::UnboundedSender<String>>),
    /// To find out whether the host is to be used.
    Probe,
}

impl Connector {
    /// For a look or for `migrate`: a host need not have the schema.
    pub(super) fn new(settings: &Settings) -> Self {
        let servers = settings.servers.clone();
        let hosts = Arc::new(Hosts::new(hosts::count(&servers)));
        let names = Arc::clone(Names::global());
        Self { servers, tls: Encryptor::new(settings.tls.clone()), hosts, names, is_for_records: false }
    }

    /// For a store that keeps records: of several hosts, only those are chosen where a claim and a settle work.
    pub(super) fn for_records(settings: &Settings) -> Self {
        Self { is_for_records: true, ..Self::new(settings) }
    }

    /// A connection to the host in use, on which a commit has gone through, which holds the store that this process uses,
    /// and which has what `calls` need.
    ///
    /// Only that shows that claims would work: a standby that was promoted away, a full disk or a synchronous standby
    /// that is gone still accepts logins.
    pub(super) async fn connect(&self, calls: &[Query]) -> Result<Session, OpenError> {
        let mut session = self.connect_unchecked().await?;
        let proving = async {
            session.commit().await.map_err(CallError::into_open_error)?;
            let lineage =
                self.recognise(&session).await.inspect_err(|_| self.hosts.suspect(session.host, Suspicion::Silent))?;
            self.hosts.lineage_guard.add(&lineage, &self.name(session.host));
            session.prepare(calls).await.map_err(|error| OpenError::of(&error))
        };
        match timeout(HANDSHAKE_TIMEOUT, proving).await {
            Ok(Ok(())) => Ok(session),
            Ok(Err(error)) => Err(error),
            Err(_) => {
                session.give_up();
                Err(OpenError::late())
            }
        }
    }

    /// The lineage of the server of a connection. An error if it is not the one that this process uses.
    pub(super) async fn recognise(&self, session: &Session) -> Result<Lineage, OpenError> {
        self.recognise_at(session.client(), session.host).await
    }

    /// The same for a connection of the pool to the host in use, for a store of records.
    pub(super) async fn recognise_in_use(&self, client: &Client) -> Result<(), OpenError> {
        if !self.is_for_records {
            return Ok(());
        }
        let host = self.hosts.chosen().unwrap_or_default();
        // The pool has no time limit of its own for this.
        let recognised = timeout(HANDSHAKE_TIMEOUT, self.recognise_at(client, host)).await;
        recognised
            .unwrap_or_else(|_| Err(OpenError::late()))
            .map(drop)
            .inspect_err(|_| self.hosts.suspect(host, Suspicion::Silent))
    }

    async fn recognise_at(&self, client: &Client, host: usize) -> Result<Lineage, OpenError> {
        let lineage = schema::within(LINEAGE_LOCK_TIMEOUT, client, Lineage::of(client)).await?;
        self.hosts.lineage_guard.check(&lineage, &self.name(host))?;
        Ok(lineage)
    }

    /// A connection for the pool. Its notices go to `messages`.
    pub(super) async fn connect_plainly(
        &self,
        messages: Arc<ServerMessages>,
    ) -> Result<(Client, JoinHandle<()>), SqlError> {
        let host = self.hosts.chosen().unwrap_or_default();
        let addresses = self.addresses(host).await.map_err(|_| SqlError::__private_api_timeout());
        let addresses = addresses.inspect_err(|_| self.hosts.suspect(host, Suspicion::Silent))?;
        let dial = async |servers: &Config| {
            let (end, _) = watch::channel(false);
            self.connect_to((servers, host, &addresses), Arc::clone(&messages), end, false).await
        };
        let asking = if self.hosts.is_pooled(host) { None } else { Some(self.with_options(ISOLATION)) };
        let dialled = match asking {
            Some(asking) => match dial(&asking).await {
                // A pooler has taken the place of the server.
                Err(error) if error.code() == Some(&SqlState::PROTOCOL_VIOLATION) => dial(&self.servers).await,
                dialled => dialled,
            },
            None => dial(&self.servers).await,
        };
        dialled.inspect_err(|_| self.hosts.suspect(host, Suspicion::Silent))
    }

    pub(super) fn servers(&self) -> &Config {
        &self.servers
    }

    pub(super) fn hosts(&self) -> &Arc<Hosts> {
        &self.hosts
    }

    pub(super) fn is_for_records(&self) -> bool {
        self.is_for_records
    }

    /// A host's name and port.
    pub(super) fn name(&self, host: usize) -> String {
        hosts::name(&self.servers, host)
    }

    /// How long it may take until a connection is made.
    pub(super) fn patience(&self) -> Duration {
        self.connect_timeout() + LOGIN_TIMEOUT + HANDSHAKE_TIMEOUT
    }

    /// What connections are encrypted with.
    pub(super) fn tls(&self) -> &Encryptor {
        &self.tls
    }

    /// How long a server may take to be reached.
    pub(super) fn connect_timeout(&self) -> Duration {
        self.servers.get_connect_timeout().copied().unwrap_or(DEFAULT_CONNECT_TIMEOUT)
    }

    /// A connection to the host in use, whatever it is good for. Tells whether it is direct.
    pub(super) async fn connect_unchecked(&self) -> Result<Session, OpenError> {
        self.connect_for_use(None).await
    }

    /// As [`Connector::connect_unchecked`]; notifications go to `notifications`.
    pub(super) async fn connect_to_listen(
        &self,
        notifications: mpsc::UnboundedSender<String>,
    ) -> Result<Session, OpenError> {
        self.connect_for_use(Some(notifications)).await
    }

    /// A connection to a host that may come to be used.
    pub(super) async fn connect_probe(&self, host: usize) -> Result<Session, OpenError> {
        self.handshake(host, &Purpose::Probe).await
    }

    async fn connect_for_use(
        &self,
        notifications: Option<mpsc::UnboundedSender<String>>,
    ) -> Result<Session, OpenError> {
        let host = self.host().await?;
        let greeted = timeout(self.patience(), self.handshake(host, &Purpose::Use(notifications))).await;
        let greeted = greeted.unwrap_or_else(|_| Err(OpenError::late()));
        greeted.inspect_err(|_| self.hosts.suspect(host, Suspicion::Silent))
    }

    async fn handshake(&self, host: usize, purpose: &Purpose) -> Result<Session, OpenError> {
        let addresses = self.addresses(host).await?;
        let opened = if self.hosts.is_pooled(host) {
            None
        } else {
            let mark = mark()?;
            let servers = self.with_options(&format!("{ISOLATION} -c {SESSION}={mark}"));
            match self.open((&servers, host, &addresses), purpose).await {
                Ok(session) => Some((session, mark)),
                // The answer of a pooler to unknown start-up parameters.
                Err(error) if error.code() == Some(&SqlState::PROTOCOL_VIOLATION) => None,
                Err(error) => return Err(OpenError::of(&error)),
            }
        };
        let (mut session, mark) = match opened {
            Some((session, mark)) => (session, Some(mark)),
            None => {
                let opened = self.open((&self.servers, host, &addresses), purpose).await;
                (opened.map_err(|error| OpenError::of(&error))?, None)
            }
        };
        session.is_direct = session.has_mark(mark.as_deref()).await.map_err(|error| OpenError::of(&error))?;
        if !session.is_direct {
            self.hosts.set_pooled(host);
        }
        Ok(session)
    }

    /// The settings of the servers, with more options for the session. Poolers refuse them.
    fn with_options(&self, options: &str) -> Config {
        let mut servers = self.servers.clone();
        let own = self.servers.get_options().unwrap_or_default();
        servers.options(format!("{own} {options}").trim());
        servers
    }

    /// The addresses of a host, where the gate looks its name up; `None` where the driver knows where it is, or is to report that
    /// the name has none.
    async fn addresses(&self, host: usize) -> Result<Option<Vec<SocketAddr>>, OpenError> {
        let Some(name) = hosts::to_look_up(&self.servers, host) else { return Ok(None) };
        match self.names.resolve_within(self.connect_timeout() + LOGIN_TIMEOUT, name, 0).await {
            Ok(found) => Ok(Some(found).filter(|found| !found.is_empty())),
            Err(late) if late.kind() == ErrorKind::TimedOut => Err(OpenError::Unreachable(late.to_string())),
            Err(_) => Ok(None),
        }
    }

    async fn open(&self, target: Target<'_>, purpose: &Purpose) -> Result<Session, SqlError> {
        let (end, ended) = watch::channel(false);
        let (notifications, is_probe) = match purpose {
            Purpose::Use(notifications) => (notifications.clone(), false),
            Purpose::Probe => (None, true),
        };
        let messages = Arc::new(ServerMessages::with_notifications(notifications));
        let (client, driver) = self.connect_to(target, Arc::clone(&messages), end, is_probe).await?;
        let (tls, hosts) = (self.tls.clone(), Arc::clone(&self.hosts));
        Ok(Session::new(client, messages, driver, ended, tls, hosts, target.1))
    }

    /// A connection, and the task that moves its bytes: until it ends, or until another host is in use, unless it is on trial.
    async fn connect_to(
        &self,
        (servers, host, addresses): Target<'_>,
        messages: Arc<ServerMessages>,
        end: watch::Sender<bool>,
        is_probe: bool,
    ) -> Result<(Client, JoinHandle<()>), SqlError> {
        let settings = hosts::one(servers, host, self.connect_timeout());
        let hosts = Arc::clone(&self.hosts);
        let left = if is_probe { Either::Left(pending()) } else { Either::Right(self.hosts.left(host)) };
        let mut left = Box::pin(left);
        let late = SqlError::__private_api_timeout;
        let at = |address: Option<IpAddr>| {
            let mut settings = settings.clone();
            if let Some(address) = address {
                settings.hostaddr(address);
            }
            let (limit, tls) = (self.connect_timeout() + LOGIN_TIMEOUT, self.tls.clone());
            async move { timeout(limit, settings.connect(tls)).await.unwrap_or_else(|_| Err(late())) }
        };
        let connecting = async {
            let Some(addresses) = addresses else { return at(None).await };
            // One that was reached says why it takes no session.
            let is_answer = |error: &SqlError| error.code().is_some();
            let raced = race(NEXT_ADDRESS, addresses.iter(), |address| at(Some(address.ip())), is_answer).await;
            raced.map_err(|error| error.unwrap_or_else(late))
        };
        let (client, driven) = tokio::select! {
            connected = connecting => connected?,
            () = left.as_mut() => return Err(late()),
        };
        let cancel = Cancel { token: client.cancel_token(), tls: self.tls.clone() };
        let driver = spawn_driver(driven, messages, left, cancel, move |is_lost| {
            if is_lost && !is_probe {
                hosts.suspect(host, Suspicion::Silent);
            }
            end.send_replace(true);
        });
        Ok((client, driver))
    }
}

/// A random mark that identifies a session.
fn mark() -> Result<String, OpenError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)
        .map_err(|_| OpenError::Failed("the system's random number generator failed".to_owned()))?;
    Ok(Hex(&bytes).to_string())
}
