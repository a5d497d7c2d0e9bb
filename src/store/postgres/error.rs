//! What PostgreSQL's errors mean.

/// The database cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No server can be reached, or none of them takes connections now. Trying again may help.
    #[error("the database cannot be reached: {0}")]
    Unreachable(#[source] tokio_postgres::Error),
}
