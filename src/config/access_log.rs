//! `[access_log]`

use std::path::Path;

use super::declare::Shown::Example;
use super::declare::{Keys as _, keys};
use super::kinds::{raw, words};
use super::node::{Table, Wrong};
use super::store::Store;
use crate::store::sqlite;
use crate::telemetry::access_log::{FORMATS, Format, Settings, Target};

keys! {
    /// One line for each request, when its answer is over. It has neither queries nor credentials, and keys only shortened.
    pub(super) struct AccessLog "[access_log]" {
        /// The file to append to, or "-" for standard output. If omitted, there is no access log. SIGHUP and every reload
        /// open the file anew, so that it can be rotated.
        path: Option<Target> = None => raw(r"\S").map(|path| Ok(target(path)), name).optional(), Example("\"/var/log/oncegate/access.log\"");
        /// "json" has every field. "combined" is the format of Apache and nginx, and has fewer.
        format: Format = Format::Json => words(&FORMATS);
    }
}

/// Reads `[access_log]`; nothing where there is none.
pub(super) fn read(root: &Table<'_>, store: &Store) -> Option<Settings> {
    let table = root.table("access_log", AccessLog::SECTION);
    let log = AccessLog::read(&table, AccessLog::default());
    if let Some(Target::File(path)) = &log.path {
        check_is_own(&table, path, store);
    }
    if let Some(Target::File(path)) = &log.path
        && path.is_dir()
    {
        table.advise(
            "path",
            format!("{} is a directory on this machine, where a start fails: name a file", path.display()),
        );
    }
    if let Some(Target::File(path)) = &log.path
        && let Some(directory) = path.parent().filter(|directory| !directory.as_os_str().is_empty())
        && !directory.is_dir()
    {
        let directory = directory.display();
        table.advise("path", format!("there is no directory {directory} here: a start fails without it"));
    }
    if log.path.is_none() && log.format != Format::Json {
        let mend = "write path = \"-\" for standard output, or the path of a file";
        table.advise("format", format!("`format` has no effect: there is no access log; {mend}"));
    }
    root.print("access_log", log.print_table());
    let AccessLog { path, format } = log;
    path.map(|target| Settings { target, format })
}

/// Lines that are appended to the store or the configuration destroy it.
fn check_is_own(table: &Table<'_>, path: &Path, store: &Store) {
    let is_it = |file: &Path| sqlite::is_same_file(path, file);
    let is_of_store = match store {
        Store::Sqlite { path: database } => sqlite::files(database).iter().any(|file| is_it(file)),
        Store::Memory | Store::Postgres(_) | Store::Databases(_) | Store::Redis(_) => false,
    };
    // A device such as /dev/null takes both.
    let is_configuration = path.is_file() && table.file().is_some_and(is_it);
    for (is_it, what) in [(is_of_store, "a file of the store"), (is_configuration, "the configuration file")] {
        if is_it {
            let wrong = Wrong::new(format!("{} is {what}, which lines of a log would damage", path.display()));
            table.report("path", wrong.hint("name another file, such as \"/var/log/oncegate/access.log\""));
        }
    }
}

const STDOUT: &str = "-";

fn target(path: String) -> Target {
    if path == STDOUT { Target::Stdout } else { Target::File(path.into()) }
}

fn name(target: &Target) -> String {
    match target {
        Target::Stdout => STDOUT.to_owned(),
        Target::File(path) => path.display().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use crate::config::load_text;

    #[test]
    fn another_name_of_a_file_that_lines_would_damage_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        for name in ["gate.toml", "gate.db-wal", "another.log"] {
            std::fs::write(path(name), "").unwrap();
            std::fs::hard_link(path(name), path(&format!("link-to-{name}"))).unwrap();
        }
        let said = |name: &str| {
            let text = format!(
                "[upstreams]\na = \"http://127.0.0.1\"\n[store]\nurl = \"sqlite:{}\"\n[access_log]\npath = {:?}\n",
                path("gate.db").display(),
                path(name)
            );
            load_text(path("gate.toml"), &text).map(drop).map_err(|problems| problems.to_string())
        };
        assert!(said("link-to-gate.toml").unwrap_err().contains("is the configuration file"));
        assert!(said("link-to-gate.db-wal").unwrap_err().contains("is a file of the store"));
        said("link-to-another.log").unwrap();
    }
}
