//! Reaper and sweeper.
