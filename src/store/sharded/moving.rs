//! What a gate notices of records that move to other databases.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

use super::layout::NotKnown;
use super::{DatabaseMap, Databases, Sharded};
use crate::idempotency::record::RecordId;
use crate::store::{Error, ErrorKind};

/// The shortest time between two looks at where records are.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// The time between looks at where records are while they move: nothing is refused when that is over.
pub(super) const LOOK_WHILE_MOVING: Duration = Duration::from_secs(5);

/// The same while none is known to: a gate that has no request with a key is refused nothing, and goes by it all the same.
pub(super) const LOOK_AT_REST: Duration = Duration::from_secs(30);

/// The time between two warnings of the same fault.
const REMINDER: Duration = Duration::from_secs(60);

/// Which records have moved, as far as it was noticed: one bit for each of the parts of the ids.
pub(super) struct Moved([AtomicU64; 64]);

impl Default for Moved {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Moved {
    fn place(id: RecordId) -> (usize, u64) {
        let part = u16::from_be_bytes([id.0[0], id.0[1]]) >> 4;
        (usize::from(part >> 6), 1 << (part & 63))
    }

    pub(super) fn has(&self, id: RecordId) -> bool {
        let (place, bit) = Self::place(id);
        self.0[place].load(Ordering::Relaxed) & bit != 0
    }

    pub(super) fn set(&self, id: RecordId, has_moved: bool) {
        let (place, bit) = Self::place(id);
        match has_moved {
            true => self.0[place].fetch_or(bit, Ordering::Relaxed),
            false => self.0[place].fetch_and(!bit, Ordering::Relaxed),
        };
    }
}

impl Sharded {
    /// Where records are, as the databases themselves say. What reads all records asks once more when it has read: a gate
    /// notices by itself only from time to time that they move, and a list without those of a new database would look whole.
    pub(super) async fn look(&self) -> Result<DatabaseMap, Error> {
        let known = self.routes.load_full();
        let unsaid = |why: NotKnown| Error::determinate(ErrorKind::Unavailable, why.to_string());
        let found = self.databases.routes(&known.ids).await.map_err(unsaid)?;
        if found != *known {
            self.is_moved.notify_one();
        }
        Ok(found)
    }
}

/// Looks where records are from time to time, and whenever a database has refused some as another's.
pub(super) async fn look_where_records_are(
    is_moved: Arc<Notify>,
    routes: Arc<ArcSwap<DatabaseMap>>,
    databases: Arc<dyn Databases>,
) {
    let mut reminder = Reminder::default();
    loop {
        let now = routes.load_full();
        let is_moving = now.target.is_some() || now.is_partial();
        let pause = if is_moving { LOOK_WHILE_MOVING } else { LOOK_AT_REST };
        let is_refused = timeout(pause, is_moved.notified()).await.is_ok();
        match databases.routes(&now.ids).await {
            Ok(found) => {
                match unnamed(&found) {
                    None => reminder = Reminder::default(),
                    Some(what) if reminder.is_due() => tracing::warn!("{what}"),
                    Some(_) => {}
                }
                if *now != found {
                    match found.target {
                        Some(_) => tracing::info!("records of the store move to other databases"),
                        None => tracing::info!("records of the store moved to other databases"),
                    }
                    routes.store(Arc::new(found));
                }
            }
            Err(error @ NotKnown::Contradiction) => {
                if reminder.is_due() {
                    tracing::error!(
                        %error,
                        "one database of the store may be an older backup, in which requests can run again: stop the gates until every \
                         database is of the same moment"
                    );
                }
            }
            Err(error) if is_refused && reminder.is_due() => tracing::warn!(
                %error,
                "a database refuses records as another's: restart the gate with the list that the store has now"
            ),
            Err(error) => tracing::debug!(%error, "where records are could not be looked up"),
        }
        sleep(LOOK_AGAIN).await;
    }
}

/// What a gate cannot do that names a part of the databases.
fn unnamed(found: &DatabaseMap) -> Option<&'static str> {
    let is_partial = |list: &Vec<Option<usize>>| list.iter().any(Option::is_none);
    match (is_partial(&found.members), found.target.as_ref().map(is_partial)) {
        (_, Some(true)) => Some(
            "records move to a database that [store] url does not name: requests with keys that have moved there get 503; restart \
             the gate with the next list",
        ),
        (true, Some(false)) => Some(
            "records move from a database that [store] url does not name: until the move ends, requests with keys that are still \
             there get 503",
        ),
        (true, None) => Some(
            "records are in a database that [store] url does not name, and requests with their keys get 503: restart the gate with \
             the list that the store has now",
        ),
        (false, _) => None,
    }
}

/// When a fault was warned of last.
#[derive(Default)]
struct Reminder(Option<Instant>);

impl Reminder {
    fn is_due(&mut self) -> bool {
        let is_due = self.0.is_none_or(|last| last.elapsed() >= REMINDER);
        if is_due {
            self.0 = Some(Instant::now());
        }
        is_due
    }
}
