//! `[admin] tokens` and `token_file`

use std::path::{Path, PathBuf};

use super::declare::Shown::Required;
use super::declare::{Inner, Keys as _, keys};
use super::kinds::{Kind, file, list, text, whole, words};
use super::node::{Node, Table, Wrong};
use super::secrets;
use crate::admin::{Role, Secret, Token, UNGUESSABLE};

/// The longest name.
const LONGEST_NAME: usize = 64;

/// What the audit log has in the place of a name where there was no token.
const NO_TOKEN: &str = "-";

/// The name of the token of `token_file`.
const TOKEN_FILE: &str = "token_file";

const HINT: &str = "put one line of letters and digits into it, such as `openssl rand -hex 32` prints";

keys! {
    /// A token of `admin.tokens`
    pub(super) struct Entry "admin.tokens" {
        /// What the log calls its holder: letters, digits and `-_.`, at most 64.
        name: Option<String> = None
            => text(format!("^([A-Za-z0-9._]|[A-Za-z0-9._-]{{2,{LONGEST_NAME}}})$"), name).optional(), Required("\"ops\"");
        /// "viewer" may look, but sees neither keys nor answers. "operator" may do everything.
        role: Option<Role> = None
            => words(&[("viewer", Role::Viewer), ("operator", Role::Operator)]).optional(), Required("\"operator\"");
        /// A file with the token: one word, without white space, of at least 32 characters so that it cannot be guessed.
        file: Option<PathBuf> = None => file().optional(), Required("\"/run/secrets/oncegate-ops-token\"");
    }
}

/// A token as it is configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TokenFile {
    name: String,
    role: Role,
    file: PathBuf,
}

/// The list.
pub(super) fn token_files() -> Kind<Vec<TokenFile>> {
    let entry = whole::<Entry>().complete(
        |entry| Some(TokenFile { name: entry.name?, role: entry.role?, file: entry.file? }),
        |token| Entry { name: Some(token.name.clone()), role: Some(token.role), file: Some(token.file.clone()) },
    );
    list(entry).map(distinct, Clone::clone).with_inner(|| Inner::List(Entry::SECTION))
}

fn distinct(tokens: Vec<TokenFile>) -> Result<Vec<TokenFile>, Wrong> {
    let is_twice = |(place, token): &(usize, &TokenFile)| tokens[..*place].iter().any(|other| other.name == token.name);
    match tokens.iter().enumerate().find(is_twice) {
        Some((_, token)) => {
            Err(Wrong::new(format!("two tokens have the name `{}`", token.name)).hint("give each a name of its own"))
        }
        None => Ok(tokens),
    }
}

fn name(node: &Node<'_>) -> Result<String, Wrong> {
    let text = node.text()?;
    if text == NO_TOKEN {
        let wrong = Wrong::new(format!("`{NO_TOKEN}` stands in the audit log for what needed no token"));
        return Err(wrong.hint("write who holds the token, as in \"ops\""));
    }
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if text.is_empty() || text.len() > LONGEST_NAME || !text.bytes().all(is_plain) {
        let wrong = Wrong::new(format!("a name has from 1 to {LONGEST_NAME} letters, digits and `-_.`"));
        return Err(wrong.hint("write who holds the token, as in \"ops\""));
    }
    Ok(text.to_owned())
}

/// Reads the files of the tokens; what is wrong with one is reported where it is named.
pub(super) fn read(table: &Table<'_>, token_file: Option<&Path>, files: &[TokenFile]) -> Vec<Token> {
    let mut tokens: Vec<Token> = Vec::new();
    if let Some(secret) = table.read_file("token_file", token_file, secret) {
        advise(table, "token_file", &secret);
        tokens.push(Token { name: TOKEN_FILE.into(), role: Role::Operator, secret });
    }
    if files.is_empty() {
        return tokens;
    }
    let entries = table.tables("tokens", Entry::SECTION).unwrap_or_default();
    for (entry, TokenFile { name, role, file }) in entries.iter().zip(files) {
        if name == TOKEN_FILE && token_file.is_some() {
            let wrong = Wrong::new(format!("the token of `token_file` has the name `{TOKEN_FILE}` already"));
            entry.report("name", wrong.hint("give it another name"));
        }
        let secret = entry.read_file("file", Some(file), |path| {
            let secret = secret(path)?;
            match tokens.iter().find(|other| other.secret == secret) {
                Some(other) => {
                    let wrong = Wrong::new(format!("`{name}` is the same token as `{}`", other.name));
                    Err(wrong.hint("remove one of them, or make another with `openssl rand -hex 32`"))
                }
                None => Ok(secret),
            }
        });
        if let Some(secret) = secret {
            advise(entry, "file", &secret);
            tokens.push(Token { name: name.as_str().into(), role: *role, secret });
        }
    }
    tokens
}

fn advise(table: &Table<'_>, key: &str, secret: &Secret) {
    if secret.0.len() < UNGUESSABLE {
        let message = "the token may be guessed, and is refused while its holder's address sends wrong ones";
        table.advise(key, format!("with fewer than {UNGUESSABLE} characters {message}"));
    }
}

fn secret(path: &Path) -> Result<Secret, Wrong> {
    let content = secrets::read(path)?;
    if content.is_empty() {
        return Err(Wrong::new(format!("{} is empty", path.display())).hint(HINT));
    }
    match String::from_utf8(content) {
        // What a client can send after `Bearer` (RFC 6750, section 2.1).
        Ok(token) if token.bytes().all(|byte| byte.is_ascii_graphic()) => Ok(Secret(token)),
        _ => Err(Wrong::new(format!("{} holds more than one word of visible ASCII", path.display())).hint(HINT)),
    }
}
