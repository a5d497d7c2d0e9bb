//! `oncegate migrate`

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::{anyhow, bail};
use clap::Args;

use super::http_client::WrongParameter;
use super::{BAD_CONFIGURATION, FileArgs, block_on, complain, print, report};
use crate::config::{Flags, Postgres, Sources, Store, load_store};
use crate::store::postgres::layout::join;
use crate::store::postgres::moving::{Move, MoveError, move_records};
use crate::store::postgres::{Migration, OpenError, Settings, migrate, pending};

/// Prepare a PostgreSQL database for oncegate, or bring its schema up to date.
///
/// Gates that run on the older schema go on working. Of the configuration, only `[store]` is read.
#[derive(Args, Debug)]
pub(super) struct MigrateArgs {
    #[command(flatten)]
    file: FileArgs,
    /// The store: postgres://USER@HOST/DATABASE. Repeat it to name several databases that are one store.
    #[arg(long, value_name = "URL")]
    store: Vec<String>,
    /// Move the records from this list of databases, which gates may use meanwhile. Repeat it for each of them, in the order
    /// of store.url.
    #[arg(long, value_name = "URL", requires = "to", conflicts_with_all = ["store", "dry_run"])]
    from: Vec<String>,
    /// Move the records to this list of databases. Repeat it for each of them.
    #[arg(long, value_name = "URL", requires = "from", conflicts_with_all = ["store", "dry_run"])]
    to: Vec<String>,
    /// Let the databases know of the move, so that gates can start with the next list, and move nothing yet.
    #[arg(long, requires = "from", conflicts_with_all = ["store", "dry_run"])]
    prepare: bool,
    /// Print the SQL that would run, and change nothing.
    #[arg(long)]
    dry_run: bool,
}

/// Migrates the store that is configured.
pub(super) fn run(args: MigrateArgs) -> anyhow::Result<ExitCode> {
    let file = args.file.config.clone();
    if !args.from.is_empty() {
        return move_between(args);
    }
    let flags = Flags { store: args.store, ..Flags::default() };
    let (store, places) = match load_store(Sources::of_process(args.file.config, flags)) {
        Ok(loaded) => loaded,
        Err(problems) => {
            complain(&report(&problems, file.as_deref()));
            return Ok(ExitCode::from(BAD_CONFIGURATION));
        }
    };
    let source = places.url();
    let said = match &store {
        Store::Memory => "store memory: nothing to migrate\n".to_owned(),
        Store::Sqlite { path } => {
            format!("store sqlite, {}: nothing to migrate; `serve` brings the file up to date\n", path.display())
        }
        Store::Redis(store) => format!("store redis, {}: nothing to migrate\n", store.servers()),
        Store::Postgres(store) => {
            let said = block_on(postgres(store, args.dry_run))?;
            said.map_err(|error| explained(&source, &store.servers(), &error))?
        }
        Store::Databases(databases) => block_on(list(databases, &source, args.dry_run))??,
    };
    print(&said)?;
    Ok(ExitCode::SUCCESS)
}

async fn postgres(store: &Postgres, is_dry: bool) -> Result<String, OpenError> {
    if is_dry {
        return Ok(script(&pending(&store.settings).await?));
    }
    let applied = migrate(&store.settings).await?;
    let Some(last) = applied.last() else { return Ok("schema oncegate: nothing to do\n".to_owned()) };
    let names: Vec<String> = applied.iter().map(|one| format!("{} {}", one.version, one.name)).collect();
    Ok(format!("schema oncegate: applied {}; now at version {}\n", names.join(", "), last.version))
}

/// Prepares each database of a list, and makes them one store.
async fn list(databases: &[Postgres], source: &str, is_dry: bool) -> anyhow::Result<String> {
    let names: Vec<String> = databases.iter().map(Postgres::servers).collect();
    let mut said = String::new();
    for (database, name) in databases.iter().zip(&names) {
        let one = postgres(database, is_dry).await.map_err(|error| explained(source, name, &error))?;
        let _ = if is_dry { write!(said, "-- {name}\n{one}\n") } else { write!(said, "{name}: {one}") };
    }
    if is_dry {
        return Ok(said + "-- Without --dry-run, the databases become one store then, which a script cannot do.\n");
    }
    let settings: Vec<Settings> = databases.iter().map(|database| database.settings.clone()).collect();
    let is_new = join(&names, &settings).await.map_err(|error| explained(source, &names.join(" and "), &error))?;
    let count = databases.len();
    Ok(said
        + &if is_new {
            format!("{count} databases are one store now\n")
        } else {
            format!("{count} databases are one store\n")
        })
}

/// Moves records from one list of databases to another.
fn move_between(args: MigrateArgs) -> anyhow::Result<ExitCode> {
    let file = args.file.config.clone();
    let mut lists = Vec::new();
    for urls in [args.from, args.to] {
        let flags = Flags { store: urls, ..Flags::default() };
        match load_store(Sources::of_process(file.clone(), flags)) {
            Ok((Store::Postgres(database), _)) => lists.push(vec![*database]),
            Ok((Store::Databases(databases), _)) => lists.push(databases),
            Ok(_) => {
                let wrong = "--from and --to name PostgreSQL databases\n  hint: write postgres://USER@HOST/DATABASE";
                bail!(WrongParameter(wrong.to_owned()));
            }
            Err(problems) => {
                complain(&report(&problems, file.as_deref()));
                return Ok(ExitCode::from(BAD_CONFIGURATION));
            }
        }
    }
    let named = |database: &Postgres| (database.servers(), database.settings.clone());
    let [from, to] = [0, 1].map(|list: usize| lists[list].iter().map(named).collect::<Vec<_>>());
    block_on(async {
        let flagged =
            |flag: &'static str, list: &[(String, Settings)]| list.iter().map(move |one| (flag, one.clone())).collect();
        let all: [Vec<_>; 2] = [flagged("--from", &from), flagged("--to", &to)];
        for (flag, (name, settings)) in all.iter().flatten() {
            migrate(settings).await.map_err(|error| explained(flag, name, &error))?;
        }
        let mut say = |said: String| {
            // What cannot be said is done all the same.
            let _ = print(&format!("{said}\n"));
        };
        let moved = move_records(&Move { from, to, is_preparation: args.prepare }, &mut say).await;
        moved.map_err(|error| match error {
            MoveError::Refused(_) => anyhow!("{error}"),
            MoveError::BrokenOff(_) => {
                anyhow!("{error}\n  hint: the records that were moved stay where they are now; run the same command again to go on")
            }
        })
    })??;
    Ok(ExitCode::SUCCESS)
}

/// What `psql` can be given to do the same.
fn script(pending: &[Migration]) -> String {
    if pending.is_empty() {
        return "-- schema oncegate: nothing to do\n".to_owned();
    }
    let mut script = "BEGIN;\n".to_owned();
    for Migration { version, name, sql, compatible_with } in pending {
        let _ = write!(
            script,
            "\n-- {version} {name}\n\n{}\n\nINSERT INTO oncegate.migration (version, compatible_with) VALUES \
             ({version}, {compatible_with});\n",
            sql.trim_end()
        );
    }
    script + "\nCOMMIT;\n"
}

/// The error with where it happened, what named that and, where it does not say so itself, what to do.
fn explained(source: &str, servers: &str, error: &OpenError) -> anyhow::Error {
    if let OpenError::Of { name, error } = error {
        return explained(source, name, error);
    }
    let hint = match error {
        OpenError::Unreachable(_) => {
            "\n  hint: see that the server runs and that its host and port are right, and try again"
        }
        OpenError::Locked => "\n  hint: end that session, or try again when it has ended",
        OpenError::Denied(_) => {
            "\n  hint: run it as a role that may create the schema (GRANT CREATE ON DATABASE ... TO ...), or as the \
             owner of the schema where there is one; or pass the output of --dry-run to a role that may"
        }
        _ => "",
    };
    anyhow!("{source}: {servers}: {error}{hint}")
}
