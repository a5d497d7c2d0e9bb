//! What is decided by a request's head, before anything is claimed: which route it takes, and whether it is refused, forwarded or
//! protected.

pub(super) mod admit;
pub(super) mod if_protected;
pub(super) mod ignored;
pub mod jwt;
pub(super) mod malformed;
pub(super) mod preflight;
