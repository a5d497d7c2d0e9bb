//! `[store] encryption_keys`

use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::config::declare::Shown::Required;
use crate::config::declare::{Inner, Keys as _, keys};
use crate::config::kinds::{Kind, file, list, text, whole};
use crate::config::node::{Node, Table, Wrong};
use crate::config::secrets;
use crate::store::sealed::SealingKey;
use crate::store::sealed::keyring::KEY_LENGTH;

/// The longest id.
const LONGEST_ID: usize = 64;

/// How to get a key.
const HINT: &str = "make one with `oncegate keys generate --out FILE`";

keys! {
    /// A key of `encryption_keys`
    pub(super) struct Entry "encryption_keys" {
        /// Its name in logs and reports: letters, digits and `-_.`, at most 64. Records do not depend on it.
        id: Option<String> = None => text(format!("^[A-Za-z0-9._-]{{1,{LONGEST_ID}}}$"), id).optional(), Required("\"2026-11\"");
        /// A file with 32 bytes, as they are or in base64. `oncegate keys generate` makes one.
        file: Option<PathBuf> = None => file().optional(), Required("\"/run/secrets/oncegate-key-1\"");
    }
}

/// A key as it is configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::config) struct KeyFile {
    id: String,
    file: PathBuf,
}

/// The list.
pub(super) fn key_files() -> Kind<Vec<KeyFile>> {
    let entry = whole::<Entry>().complete(
        |entry| Some(KeyFile { id: entry.id?, file: entry.file? }),
        |key| Entry { id: Some(key.id.clone()), file: Some(key.file.clone()) },
    );
    list(entry).with_inner(|| Inner::List(Entry::SECTION))
}

fn id(node: &Node<'_>) -> Result<String, Wrong> {
    let text = node.text()?;
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if text.is_empty() || text.len() > LONGEST_ID || !text.bytes().all(is_plain) {
        let wrong = Wrong::new(format!("an id has from 1 to {LONGEST_ID} letters, digits and `-_.`"));
        return Err(wrong.hint("write the month from which the key encrypts, as in \"2026-11\""));
    }
    Ok(text.to_owned())
}

/// Reads the files of the keys; what is wrong with one is reported where it is named.
pub(super) fn read(table: &Table<'_>, files: &[KeyFile]) -> Vec<SealingKey> {
    if files.is_empty() {
        return Vec::new();
    }
    let entries = table.tables("encryption_keys", Entry::SECTION).unwrap_or_default();
    let mut keys: Vec<SealingKey> = Vec::new();
    for (place, (entry, KeyFile { id, file })) in entries.iter().zip(files).enumerate() {
        // Its file may be wrong as well.
        if files[..place].iter().any(|other| other.id == *id) {
            entry.report("id", Wrong::new(format!("two keys have the id `{id}`")).hint("give each an id of its own"));
        }
        let key = entry.read_file("file", Some(file), |path| {
            let key = SealingKey::new(id.as_str().into(), &read_key(path)?);
            match keys.iter().find(|other| other.is_same_key(&key)) {
                Some(other) => {
                    let wrong = Wrong::new(format!("`{id}` is the same key as `{}`", other.id));
                    Err(wrong.hint(format!("remove one of them, or {HINT}")))
                }
                None => Ok(key),
            }
        });
        keys.extend(key);
    }
    keys
}

fn read_key(path: &Path) -> Result<[u8; KEY_LENGTH], Wrong> {
    key_of(&secrets::read_whole(path)?).ok_or_else(|| {
        let wrong = format!("{} does not hold {KEY_LENGTH} bytes, as they are or in base64", path.display());
        Wrong::new(wrong).hint(HINT)
    })
}

/// The key that a file holds.
fn key_of(content: &[u8]) -> Option<[u8; KEY_LENGTH]> {
    let bytes = match content.len() {
        KEY_LENGTH => content.to_vec(),
        _ => STANDARD.decode(content.trim_ascii()).ok()?,
    };
    bytes.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_raw_or_in_base64() {
        let raw = [b' '; KEY_LENGTH];
        assert_eq!(key_of(&raw), Some(raw), "white space is part of a raw key");
        let written = STANDARD.encode([7; KEY_LENGTH]) + "\n";
        assert_eq!(key_of(written.as_bytes()), Some([7; KEY_LENGTH]));
        for wrong in [&b""[..], b"short", &[0; 31], &[0; 33], STANDARD.encode([7; 16]).as_bytes()] {
            assert_eq!(key_of(wrong), None);
        }
    }
}
