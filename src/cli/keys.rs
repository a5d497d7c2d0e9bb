//! `oncegate keys`

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::Subcommand;

use super::print;
use crate::store::sealed::keyring::KEY_LENGTH;

/// Make keys for `store.encryption_keys`
#[derive(Subcommand, Debug)]
pub(super) enum Command {
    /// Make a key of 32 random bytes, in base64
    Generate {
        /// Write it to this file, which must not exist, for its owner alone; else it is printed
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
}

/// Runs `oncegate keys`.
pub(super) fn run(command: Command) -> anyhow::Result<ExitCode> {
    let Command::Generate { out } = command;
    let mut key = [0; KEY_LENGTH];
    if getrandom::fill(&mut key).is_err() {
        bail!("the system's random number generator failed");
    }
    let line = STANDARD.encode(key) + "\n";
    match out {
        Some(file) => match write(&file, &line) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                bail!("{} exists: choose another name; a key is never overwritten", file.display());
            }
            written => written.with_context(|| format!("cannot write {}", file.display()))?,
        },
        None => print(&line)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn write(file: &Path, line: &str) -> std::io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(file)?;
    file.write_all(line.as_bytes())?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_never_overwritten() {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("key");
        let generate = || run(Command::Generate { out: Some(out.clone()) });
        generate().unwrap();
        let key = std::fs::read_to_string(&out).unwrap();
        let said = generate().unwrap_err().to_string();
        assert!(said.ends_with("key exists: choose another name; a key is never overwritten"), "{said}");
        assert_eq!(std::fs::read_to_string(&out).unwrap(), key);
    }
}
