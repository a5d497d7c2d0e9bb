//! What a store risks that the promise does not allow for, in one sentence each, with what to change. Said at the start and by
//! `oncegate check --store`. What Redis risks, [`crate::store::redis::Description::risks`] says.

use crate::store::postgres::Description;

/// What a file risks on a file system that forgets, by its name.
pub(in crate::cli) fn of_file_system(name: &str) -> String {
    format!(
        "the store does not stand on a durable file system ({name}): its records may be lost with the machine or container"
    )
}

/// What a PostgreSQL server risks.
pub(in crate::cli) fn of_postgres(found: &Description) -> Vec<String> {
    let settings = [(found.has_fsync, "fsync"), (found.has_full_page_writes, "full_page_writes")];
    let off = settings.into_iter().filter(|(is_on, _)| !is_on);
    off.map(|(_, setting)| {
        format!(
            "the server runs with {setting} = off: a crash of its machine may lose claims and answers that it \
             acknowledged, and requests may run twice; turn it on"
        )
    })
    .collect()
}
