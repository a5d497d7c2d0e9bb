//! The Lua scripts, which run atomically on the server.

use redis::{Arg, Cmd};

/// A script, and the name that a server knows it by.
pub(super) struct Script {
    text: String,
    hash: String,
}

/// The scripts, each with what it needs before it.
pub(super) struct Scripts {
    pub(super) claim: Script,
    pub(super) supersede: Script,
    pub(super) settle: Script,
    pub(super) renew: Script,
    pub(super) expire_leases: Script,
    pub(super) sweep: Script,
    pub(super) due: Script,
    pub(super) await_end: Script,
    pub(super) get: Script,
    pub(super) look: Script,
    pub(super) remove: Script,
    pub(super) reseal: Script,
    pub(super) lock: Script,
    pub(super) adopt: Script,
    pub(super) try_all: Script,
    pub(super) prove: Script,
    pub(super) release: Script,
    pub(super) append_entry: Script,
    pub(super) amend_entry: Script,
    pub(super) list_entries: Script,
    pub(super) sweep_entries: Script,
}

/// The time by the server's clock, as `now`.
pub(super) const CLOCK: &str = include_str!("scripts/clock.lua");

const PRELUDE: &str = include_str!("scripts/prelude.lua");

impl Scripts {
    /// The scripts on a clock.
    pub(super) fn new(clock: &str) -> Self {
        let script = |text: &str| Script::new([clock, PRELUDE, text].concat());
        Self {
            claim: script(include_str!("scripts/claim.lua")),
            supersede: script(include_str!("scripts/supersede.lua")),
            settle: script(include_str!("scripts/settle.lua")),
            renew: script(include_str!("scripts/renew.lua")),
            expire_leases: script(include_str!("scripts/expire_leases.lua")),
            sweep: script(include_str!("scripts/sweep.lua")),
            due: script(include_str!("scripts/due.lua")),
            await_end: script(include_str!("scripts/await.lua")),
            get: script(include_str!("scripts/get.lua")),
            look: script(include_str!("scripts/look.lua")),
            remove: script(include_str!("scripts/remove.lua")),
            reseal: script(include_str!("scripts/reseal.lua")),
            lock: script(include_str!("scripts/lock.lua")),
            adopt: script(include_str!("scripts/adopt.lua")),
            try_all: script(include_str!("scripts/try.lua")),
            prove: script(include_str!("scripts/prove.lua")),
            release: script(include_str!("scripts/release.lua")),
            append_entry: script(include_str!("scripts/append_entry.lua")),
            amend_entry: script(include_str!("scripts/amend_entry.lua")),
            list_entries: script(include_str!("scripts/list_entries.lua")),
            sweep_entries: script(include_str!("scripts/sweep_entries.lua")),
        }
    }
}

impl Script {
    fn new(text: String) -> Self {
        let hash = redis::Script::new(&text).get_hash().to_owned();
        Self { text, hash }
    }

    /// Begins a call with so many keys; they follow, and then the arguments.
    pub(super) fn call(&self, keys: usize) -> Cmd {
        let mut command = redis::cmd("EVALSHA");
        command.arg(&self.hash[..]).arg(keys);
        command
    }
}

impl Scripts {
    /// A call as it is to be sent to a server that does not know the script.
    pub(super) fn in_full(&self, call: &Cmd) -> Cmd {
        let mut command = redis::cmd("EVAL");
        for (place, argument) in call.args_iter().enumerate().skip(1) {
            let Arg::Simple(argument) = argument else { continue };
            match self.all().into_iter().find(|script| place == 1 && script.hash.as_bytes() == argument) {
                Some(script) => command.arg(&script.text),
                None => command.arg(argument),
            };
        }
        command
    }

    fn all(&self) -> [&Script; 21] {
        [
            &self.claim,
            &self.supersede,
            &self.settle,
            &self.renew,
            &self.expire_leases,
            &self.sweep,
            &self.due,
            &self.await_end,
            &self.get,
            &self.look,
            &self.remove,
            &self.reseal,
            &self.lock,
            &self.adopt,
            &self.try_all,
            &self.prove,
            &self.release,
            &self.append_entry,
            &self.amend_entry,
            &self.list_entries,
            &self.sweep_entries,
        ]
    }
}
