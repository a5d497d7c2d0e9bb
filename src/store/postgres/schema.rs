//! The schema `oncegate`, and how it gets there.

use super::{OpenError, Settings};

/// One step from an empty database to the schema that this program works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Migration {
    /// Its number, from 1.
    pub version: u32,
    /// What it is about.
    pub name: &'static str,
    /// The statements, which run in one transaction.
    pub sql: &'static str,
}

/// What [`migrate`] would apply, in order.
///
/// # Errors
/// See [`OpenError`].
pub async fn pending(_settings: &Settings) -> Result<Vec<Migration>, OpenError> {
    Ok(Vec::new())
}

/// Applies what is missing, in one transaction and one process at a time, and says what that was.
///
/// # Errors
/// See [`OpenError`].
pub async fn migrate(_settings: &Settings) -> Result<Vec<Migration>, OpenError> {
    Ok(Vec::new())
}
