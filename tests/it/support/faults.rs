//! Faults of the disk and of the clock in a real process, and names that it knows: libraries that are preloaded into the
//! gate (`shim/`).

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// What the store's files do.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// Writes fail: no space is left.
    Full,
    /// Writes fail: the device is broken.
    Io,
    /// Syncs fail.
    Sync,
    /// Writes and syncs wait until the fault is gone.
    Block,
}

impl Fault {
    pub fn word(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Io => "io",
            Self::Sync => "sync",
            Self::Block => "block",
        }
    }
}

/// The library that makes the store's disk fail, compiled once.
pub fn shim() -> &'static Path {
    static SHIM: OnceLock<PathBuf> = OnceLock::new();
    SHIM.get_or_init(|| compiled("fault"))
}

/// The library that sets a process's clock off, compiled once.
pub fn clock_shim() -> &'static Path {
    static SHIM: OnceLock<PathBuf> = OnceLock::new();
    SHIM.get_or_init(|| compiled("clock"))
}

/// The library that gives a process the name `several.test`, compiled once.
pub fn names_shim() -> &'static Path {
    static SHIM: OnceLock<PathBuf> = OnceLock::new();
    SHIM.get_or_init(|| compiled("names"))
}

/// The library of this name.
fn compiled(name: &str) -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/it/shim/{name}.c"));
    let own = target.join(format!("{name}-{}.so", std::process::id()));
    let done = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-pthread", "-o"])
        .arg(&own)
        .arg(&source)
        .arg("-ldl")
        .output();
    let done = done.expect("a C compiler, as building SQLite needs one too");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    // Other test processes do the same at the same time: whoever renames last wins, with the same content.
    let shared = target.join(format!("{name}.so"));
    std::fs::rename(&own, &shared).expect("one directory");
    shared
}
