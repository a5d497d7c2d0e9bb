//! The addresses of a name, and a connection to one of them.

mod names;
mod race;
#[cfg(test)]
pub(crate) mod testing;

pub use self::names::Names;
pub use self::race::{ATTEMPT_DELAY, race};
