//! What is done in one step on the server.

use redis::Script;

/// The scripts, each with what it needs before it.
pub(super) struct Scripts {
    pub(super) claim: Script,
    pub(super) supersede: Script,
    pub(super) settle: Script,
    pub(super) renew: Script,
    pub(super) expire_leases: Script,
    pub(super) sweep: Script,
    pub(super) await_end: Script,
    pub(super) get: Script,
    pub(super) look: Script,
    pub(super) remove: Script,
}

/// The time by the server's clock, as `now`.
pub(super) const CLOCK: &str = include_str!("scripts/clock.lua");

const PRELUDE: &str = include_str!("scripts/prelude.lua");

impl Scripts {
    /// The scripts on a clock.
    pub(super) fn new(clock: &str) -> Self {
        let script = |text: &str| Script::new(&[clock, PRELUDE, text].concat());
        Self {
            claim: script(include_str!("scripts/claim.lua")),
            supersede: script(include_str!("scripts/supersede.lua")),
            settle: script(include_str!("scripts/settle.lua")),
            renew: script(include_str!("scripts/renew.lua")),
            expire_leases: script(include_str!("scripts/expire_leases.lua")),
            sweep: script(include_str!("scripts/sweep.lua")),
            await_end: script(include_str!("scripts/await.lua")),
            get: script(include_str!("scripts/get.lua")),
            look: script(include_str!("scripts/look.lua")),
            remove: script(include_str!("scripts/remove.lua")),
        }
    }
}
