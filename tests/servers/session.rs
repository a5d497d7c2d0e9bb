//! A session with a database, that a test can hold open.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio_postgres::{NoTls, SimpleQueryMessage};

use super::process::PATIENCE;

/// What a statement gave, as text.
pub type Rows = Vec<Vec<Option<String>>>;

type Answer = Result<Rows, String>;

/// A connection. Its statements run on a thread of its own, so that it works inside a runtime and outside of one; it is
/// closed when this is dropped, also in the middle of a statement.
pub struct Session {
    ask: UnboundedSender<Ask>,
    /// The process of the server that serves it.
    pub pid: u32,
    _open: oneshot::Sender<()>,
}

type Ask = (String, Sender<Answer>);

/// A statement under way.
pub struct Running(Receiver<Answer>);

impl Session {
    #[track_caller]
    pub fn open(url: &str) -> Self {
        Self::try_open(url).unwrap_or_else(|error| panic!("no session with {url}: {error}"))
    }

    pub fn try_open(url: &str) -> Result<Self, String> {
        let (ask, asked) = unbounded_channel();
        let (opened, is_open) = channel();
        let (open, dropped) = oneshot::channel();
        let url = url.to_owned();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                tokio::select! {
                    () = serve(&url, &opened, asked) => {}
                    _ = dropped => {}
                }
            });
        });
        let pid = is_open.recv().expect("it says how opening went")?;
        Ok(Self { ask, pid, _open: open })
    }

    /// Runs statements, and gives the rows of all of them.
    #[track_caller]
    pub fn run(&self, sql: &str) -> Rows {
        self.start(sql).rows()
    }

    pub fn try_run(&self, sql: &str) -> Answer {
        self.start(sql).wait()
    }

    /// The one value that a statement gives.
    #[track_caller]
    pub fn value(&self, sql: &str) -> String {
        let rows = self.run(sql);
        assert!(rows.len() == 1 && rows[0].len() == 1, "{sql}: {rows:?}");
        rows[0][0].clone().unwrap_or_else(|| panic!("null: {sql}"))
    }

    /// Starts a statement, and does not wait for it.
    pub fn start(&self, sql: &str) -> Running {
        let (answer, answered) = channel();
        // Where the connection is gone, the answer's other end is too.
        drop(self.ask.send((sql.to_owned(), answer)));
        Running(answered)
    }
}

impl Running {
    pub fn wait(self) -> Answer {
        self.0.recv().unwrap_or_else(|_| Err("the connection is closed".into()))
    }

    #[track_caller]
    pub fn rows(self) -> Rows {
        self.wait().unwrap_or_else(|error| panic!("{error}"))
    }

    /// How it ended, if it does within this time.
    pub fn within(&self, time: Duration) -> Option<Answer> {
        self.0.recv_timeout(time).ok()
    }
}

async fn serve(url: &str, opened: &Sender<Result<u32, String>>, mut asked: UnboundedReceiver<Ask>) {
    let (client, connection) = match tokio::time::timeout(PATIENCE, tokio_postgres::connect(url, NoTls)).await {
        Ok(Ok(both)) => both,
        Ok(Err(error)) => return drop(opened.send(Err(described(&error)))),
        Err(_) => return drop(opened.send(Err(format!("no answer within {PATIENCE:?}")))),
    };
    tokio::spawn(connection);
    let pid = match run(&client, "SELECT pg_backend_pid()").await {
        Ok(rows) => rows[0][0].as_deref().and_then(|pid| pid.parse().ok()).expect("a number"),
        Err(error) => return drop(opened.send(Err(error))),
    };
    drop(opened.send(Ok(pid)));
    while let Some((sql, answer)) = asked.recv().await {
        drop(answer.send(run(&client, &sql).await));
    }
}

async fn run(client: &tokio_postgres::Client, sql: &str) -> Answer {
    let messages = client.simple_query(sql).await.map_err(|error| described(&error))?;
    let rows = messages.into_iter().filter_map(|message| match message {
        SimpleQueryMessage::Row(row) => Some((0..row.len()).map(|n| row.get(n).map(str::to_owned)).collect()),
        _ => None,
    });
    Ok(rows.collect())
}

fn described(error: &tokio_postgres::Error) -> String {
    match error.as_db_error() {
        Some(error) => format!("{}: {}", error.code().code(), error.message()),
        None => std::error::Error::source(error).map_or(error.to_string(), |source| format!("{error}: {source}")),
    }
}
