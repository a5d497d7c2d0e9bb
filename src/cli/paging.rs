//! Lists of the admin API, page by page.

use std::io::{self, Write};

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use http::Method;
use serde_json::Value;

use super::complain;
use super::http_client::AdminClient;
use super::table::{Table, text};
use crate::admin;

/// Most of a list that the API gives at once.
const PAGE: usize = 1000;

/// How much of a list is shown, and how.
#[derive(Args, Debug)]
pub(super) struct PagingArgs {
    /// Most lines to list
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = parse_limit)]
    limit: usize,
    /// Go on after a list that ended with `next: CURSOR`
    #[arg(long, value_name = "CURSOR")]
    after: Option<String>,
    /// List all, however many they are
    #[arg(long, conflicts_with = "limit")]
    all: bool,
    /// Print the API's JSON
    #[arg(long)]
    json: bool,
}

/// Reads a `since` of the API, which takes it as it stands.
pub(super) fn parse_since(text: &str) -> Result<String, &'static str> {
    admin::parse_since(text).map(|_| text.to_owned())
}

/// A list of the API.
pub(super) struct Listing<const N: usize> {
    /// Its path.
    pub(super) path: &'static str,
    /// The member of a page that has what is listed.
    pub(super) member: &'static str,
    /// The parameters of its query, each after an `&`.
    pub(super) filter: String,
    /// The route among them.
    pub(super) route: Option<String>,
    pub(super) table: Table<N>,
    /// The row of one of them.
    pub(super) row: fn(&Value) -> [String; N],
    /// A member of each page that names what else there is to know.
    pub(super) also: Option<&'static str>,
}

impl<const N: usize> Listing<N> {
    /// Follows the pages up to the limit. Each is written before the next is asked for.
    pub(super) async fn write(self, client: &AdminClient, args: PagingArgs, out: &mut dyn Write) -> anyhow::Result<()> {
        let Self { path, member, filter, route, table, row, also } = self;
        let mut is_empty = true;
        let mut left = if args.all { usize::MAX } else { args.limit };
        let mut next = args.after;
        let mut list = if args.json { List::Json { member, is_begun: false } } else { List::Table(table, row) };
        let also = loop {
            let limit = left.min(PAGE);
            let cursor = next.as_ref().map(|next| format!("&cursor={}", percent_encode(next))).unwrap_or_default();
            let page = client.send(Method::GET, &format!("{path}?limit={limit}{filter}{cursor}"), None).await?;
            let found = members_of(&page, member)?;
            list.write(found, out)?;
            is_empty &= found.is_empty();
            left = left.saturating_sub(found.len());
            let former = std::mem::replace(&mut next, page["next"].as_str().map(ToOwned::to_owned));
            if former.is_some() && former == next {
                bail!("the gate gives the same page again: what it lists after it is not known");
            }
            if next.is_none() || left == 0 {
                break also.map(|also| (also, page[also].clone()));
            }
        };
        list.end(next.as_deref(), also, out)?;
        if is_empty {
            note_unknown_route(client, route.as_deref()).await;
        }
        Ok(())
    }
}

/// Says so where nothing was found of a route because the gate has none of that name.
pub(super) async fn note_unknown_route(client: &AdminClient, route: Option<&str>) {
    let Some(route) = route else { return };
    // It is for information: where the gate does not say, that stays unsaid.
    let Ok(page) = client.send(Method::GET, "/api/v1/routes", None).await else { return };
    if members_of(&page, "routes").is_ok_and(|routes| routes.iter().all(|known| known["name"] != route)) {
        complain(&format!("oncegate: the gate has no route `{route}`"));
    }
}

/// What a page lists.
pub(super) fn members_of<'a>(page: &'a Value, member: &str) -> anyhow::Result<&'a Vec<Value>> {
    page[member].as_array().ok_or_else(|| anyhow!("the answer has no {member}"))
}

/// Everything but the unreserved characters (RFC 3986 section 2.3).
pub(super) fn percent_encode(text: &str) -> String {
    text.bytes().fold(String::with_capacity(text.len()), |mut encoded, byte| {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => encoded.push(char::from(byte)),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
        encoded
    })
}

/// Standard output, whose errors say that it failed, and not the gate.
pub(super) struct Output(io::StdoutLock<'static>);

impl Output {
    pub(super) fn stdout() -> Self {
        Self(io::stdout().lock())
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(unwritten)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(unwritten)
    }
}

fn unwritten(error: io::Error) -> io::Error {
    match error.kind() {
        // `write_all` tries again.
        io::ErrorKind::Interrupted => error,
        kind => io::Error::new(kind, format!("cannot write the output: {error}")),
    }
}

/// Writes what the gate did to records. Where that fails, the error says that it was done.
pub(super) fn say_done(write: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    write().context("the change was made")
}

/// Writes all that was asked for. A reader that went away wanted no more.
pub(super) fn finish(result: anyhow::Result<()>, out: &mut dyn Write) -> anyhow::Result<()> {
    match result.and_then(|()| Ok(out.flush()?)) {
        Err(error)
            if error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe) =>
        {
            Ok(())
        }
        result => result,
    }
}

/// A list that is being written.
enum List<const N: usize> {
    Table(Table<N>, fn(&Value) -> [String; N]),
    /// One object, with what is listed as the API gives it.
    Json {
        member: &'static str,
        is_begun: bool,
    },
}

impl<const N: usize> List<N> {
    fn write(&mut self, found: &[Value], out: &mut dyn Write) -> anyhow::Result<()> {
        match self {
            Self::Table(table, row) => table.write(found.iter().map(*row), out)?,
            Self::Json { member, is_begun } => {
                for one in found {
                    let before = if *is_begun { ",".to_owned() } else { format!("{{\n  \"{member}\": [") };
                    let one = serde_json::to_string_pretty(one)?.replace('\n', "\n    ");
                    write!(out, "{before}\n    {one}")?;
                    *is_begun = true;
                }
            }
        }
        out.flush()?;
        Ok(())
    }

    /// Ends the list; `next` is where it goes on, and `also` has names.
    fn end(self, next: Option<&str>, also: Option<(&str, Value)>, out: &mut dyn Write) -> anyhow::Result<()> {
        match self {
            Self::Table(table, _) => {
                table.end(out)?;
                if let Some((name, names)) = &also
                    && let Some(names) = names.as_array().filter(|names| !names.is_empty())
                {
                    writeln!(out, "{name}: {}", names.iter().map(text).collect::<Vec<_>>().join(", "))?;
                }
                if let Some(next) = next {
                    writeln!(out, "next: {next}")?;
                }
            }
            Self::Json { member, is_begun } => {
                let before = if is_begun { "\n  ]".to_owned() } else { format!("{{\n  \"{member}\": []") };
                write!(out, "{before},\n  \"next\": {}", Value::from(next))?;
                if let Some((name, names)) = also {
                    write!(out, ",\n  \"{name}\": {names}")?;
                }
                writeln!(out, "\n}}")?;
            }
        }
        Ok(())
    }
}

fn parse_limit(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|limit| *limit > 0).ok_or_else(|| "must be a number from 1".to_owned())
}
