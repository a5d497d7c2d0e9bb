//! Wakes many callers at once.

use tokio::runtime::Handle;

/// Finishes jobs whose callers wait on several runtimes. To wake another thread is a system call: each runtime is woken
/// once, and wakes its callers itself.
pub(super) fn finish_on_caller_runtimes<J: Send + 'static>(
    jobs: Vec<J>,
    runtime: impl Fn(&J) -> Option<&Handle>,
    finish: fn(J),
) {
    let here = Handle::try_current().ok().map(|handle| handle.id());
    let mut groups: Vec<(Handle, Vec<J>)> = Vec::new();
    for job in jobs {
        let Some(waits) = runtime(&job).filter(|handle| Some(handle.id()) != here) else {
            finish(job);
            continue;
        };
        match groups.iter_mut().find(|(known, _)| known.id() == waits.id()) {
            Some((_, group)) => group.push(job),
            None => groups.push((waits.clone(), vec![job])),
        }
    }
    for (handle, mut group) in groups {
        if group.len() > 1 {
            handle.spawn(async move { group.into_iter().for_each(finish) });
        } else if let Some(job) = group.pop() {
            finish(job);
        }
    }
}
