//! Files, environment and flags into settings.
//!
//! Each room defines the settings that it needs; this one reads, checks and resolves them, and reports every problem
//! at once. Only `main` and [`crate::cli`] import it.
