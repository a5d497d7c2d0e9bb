//! How many files this process may have open, which connections are too.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::config::Resolved;

/// Files besides the connections that are counted: the store, logs, temporary files of large bodies, listeners.
const OTHERS: u64 = 256;

/// Lets the process have as many as the system allows, and warns where its limits cannot be met by that.
pub(super) fn allow(config: &Resolved) {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: maximum, maximum };
    // Without a maximum there may be any number.
    let allowed = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => maximum,
        Err(_) => current,
    };
    let needed = needed(config);
    if let Some(allowed) = allowed.filter(|allowed| *allowed < needed) {
        tracing::warn!(
            allowed,
            needed,
            "the system allows this process too few open files for the connections of [limits]: beyond them clients \
             wait and upstreams cannot be reached; raise the hard limit (ulimit -Hn, LimitNOFILE=) or lower \
             max_connections"
        );
    }
}

fn needed(config: &Resolved) -> u64 {
    let upstreams: u64 = config.upstreams.iter().map(|upstream| upstream.max_connections).sum();
    config.server.limits.max_connections + upstreams + OTHERS
}
