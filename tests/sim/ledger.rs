//! Every call that the store of a run carried out, in the order in which it did, with what it said.

use std::fmt;
use std::sync::Mutex;

use oncegate::idempotency::record::{AttemptToken, Record, RecordId, Timestamp, Version};
use oncegate::store::{
    Chunk, Claim, Error, Filter, IdentityChange, LeaseRenewal, NamespaceRuleSet, NewRecord, Origin, RecordEntry,
    Settled, Settlement, Store,
};

use crate::books::standing;
use crate::history::{EPOCH, Token};

/// A ledger that is being written.
#[derive(Default)]
pub struct Ledger(Mutex<Vec<Line>>);

/// One call.
#[derive(Clone, Debug)]
pub struct Line {
    /// In milliseconds since the run began.
    pub at: u64,
    /// The place of the gate that made it.
    pub gate: usize,
    pub call: Call,
    pub said: Said,
}

/// A call of a store, with its arguments.
#[derive(Clone, Debug)]
pub enum Call {
    Claim(RecordId, NewRecord),
    Supersede(RecordId, Version, NewRecord),
    Settle(RecordId, AttemptToken, Settlement),
    Renew(Vec<LeaseRenewal>),
    ExpireLeases(usize),
    Sweep(usize),
    Get(RecordId),
    Scan(Filter, Option<RecordId>, usize),
    Remove(RecordId, AttemptToken),
    Count,
    Adopt(Vec<Origin>, Vec<NamespaceRuleSet>, bool),
}

/// What came of a call.
#[derive(Clone, Debug, PartialEq)]
pub enum Said {
    Inserted(Timestamp),
    Exists(Record, Timestamp),
    Superseded(bool),
    Done(Timestamp),
    Fenced(Option<Record>),
    /// In the order of ids.
    Renewed(Vec<RecordId>),
    Count(usize),
    Found(Option<Found>),
    Chunk(Vec<Found>, Option<RecordId>),
    Removed(bool),
    Counts([u64; 3]),
    Changes(Vec<IdentityChange>),
    Failed(String),
}

/// What a store shows of a record.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    pub id: RecordId,
    pub origin: Option<Origin>,
    pub record: Record,
    pub now: Timestamp,
}

impl Ledger {
    pub fn add(&self, line: Line) {
        self.0.lock().unwrap().push(line);
    }

    pub fn take(&self) -> Vec<Line> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl Call {
    /// Makes the call.
    pub async fn ask(&self, store: &dyn Store) -> Said {
        let said = match self.clone() {
            Self::Claim(id, fresh) => store.claim(id, fresh).await.map(|claim| Said::from(&claim)),
            Self::Supersede(id, seen, fresh) => store.supersede(id, seen, fresh).await.map(Said::Superseded),
            Self::Settle(id, attempt, end) => store.settle(id, attempt, end).await.map(|settled| Said::from(&settled)),
            Self::Renew(held) => store.renew(held).await.map(Said::renewed),
            Self::ExpireLeases(limit) => store.expire_leases(limit).await.map(|ids| Said::Count(ids.len())),
            Self::Sweep(limit) => store.sweep(limit).await.map(Said::Count),
            Self::Get(id) => store.get(id).await.map(|listed| Said::from(&listed)),
            Self::Scan(filter, after, limit) => scan(store, filter, after, limit).await.map(|chunk| Said::from(&chunk)),
            Self::Remove(id, attempt) => store.remove(id, attempt).await.map(Said::Removed),
            Self::Count => store.count().await.map(Said::Counts),
            Self::Adopt(origins, rules, accept_change) => {
                store.adopt(origins, rules, accept_change).await.map(Said::Changes)
            }
        };
        said.unwrap_or_else(|error: Error| Said::Failed(error.to_string()))
    }

    /// The records that it is about; nothing where it may be about all of them.
    pub fn ids(&self) -> Option<Vec<RecordId>> {
        match self {
            Self::Claim(id, _)
            | Self::Supersede(id, ..)
            | Self::Settle(id, ..)
            | Self::Get(id)
            | Self::Remove(id, _) => Some(vec![*id]),
            Self::Renew(held) => Some(held.iter().map(|held| held.id).collect()),
            Self::ExpireLeases(_) | Self::Sweep(_) | Self::Scan(..) | Self::Count | Self::Adopt(..) => None,
        }
    }
}

/// A whole chunk. A store ends one early where that takes it too long: how long depends on how busy the machine is.
async fn scan(store: &dyn Store, filter: Filter, after: Option<RecordId>, limit: usize) -> Result<Chunk, Error> {
    let mut whole = store.scan(filter.clone(), after, limit).await?;
    while let Some(next) = whole.next.filter(|_| whole.records.len() < limit) {
        let more = store.scan(filter.clone(), Some(next), limit - whole.records.len()).await?;
        whole.records.extend(more.records);
        whole.next = more.next;
    }
    Ok(whole)
}

impl Said {
    pub fn renewed(mut ids: Vec<RecordId>) -> Self {
        ids.sort_unstable();
        Self::Renewed(ids)
    }
}

impl From<&Claim> for Said {
    fn from(claim: &Claim) -> Self {
        match claim {
            Claim::Inserted(at) => Self::Inserted(*at),
            Claim::Exists { record, now } => Self::Exists(record.clone(), *now),
        }
    }
}

impl From<&Settled> for Said {
    fn from(settled: &Settled) -> Self {
        match settled {
            Settled::Done { until } => Self::Done(*until),
            Settled::NotCurrent { record } => Self::Fenced(record.clone()),
        }
    }
}

impl From<&Option<RecordEntry>> for Said {
    fn from(listed: &Option<RecordEntry>) -> Self {
        Self::Found(listed.as_ref().map(Found::from))
    }
}

impl From<&Chunk> for Said {
    fn from(chunk: &Chunk) -> Self {
        Self::Chunk(chunk.records.iter().map(Found::from).collect(), chunk.next)
    }
}

impl From<&RecordEntry> for Found {
    fn from(RecordEntry { id, origin, record, now }: &RecordEntry) -> Self {
        Self { id: *id, origin: origin.clone(), record: record.clone(), now: *now }
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>6} ms  gate {}: {} -> {}", self.at, self.gate, self.call, self.said)
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Claim(id, fresh) => write!(f, "claim {} for {}", Id(*id), Told(fresh)),
            Self::Supersede(id, seen, fresh) => {
                let (state, until) = (seen.state.as_str(), since(seen.until));
                let (id, seen) = (Id(*id), Token::of(seen.attempt));
                write!(f, "supersede {id}, {state} of {seen} until {until}, for {}", Told(fresh))
            }
            Self::Settle(id, attempt, end) => {
                write!(f, "settle {} of {}: ", Id(*id), Token::of(*attempt))?;
                match end {
                    Settlement::Complete { answer, expiry } => write!(f, "{} bytes, {expiry:?}", answer.len()),
                    Settlement::Release | Settlement::Hold { .. } => write!(f, "{end:?}"),
                }
            }
            Self::Renew(held) => {
                write!(f, "renew")?;
                held.iter().try_for_each(|LeaseRenewal { id, attempt, lease }| {
                    write!(f, " {} of {} by {lease:?}", Id(*id), Token::of(*attempt))
                })
            }
            Self::ExpireLeases(limit) => write!(f, "expire up to {limit} leases"),
            Self::Sweep(limit) => write!(f, "sweep up to {limit}"),
            Self::Get(id) => write!(f, "get {}", Id(*id)),
            Self::Scan(filter, after, limit) => {
                write!(f, "scan up to {limit}")?;
                after.iter().try_for_each(|after| write!(f, " after {}", Id(*after)))?;
                write!(f, " that pass {filter:?}")
            }
            Self::Remove(id, attempt) => write!(f, "remove {} of {}", Id(*id), Token::of(*attempt)),
            Self::Count => write!(f, "count"),
            Self::Adopt(_, rules, accept_change) => {
                let digests = rules.iter().map(|rule| (&*rule.namespace, rule.digest[0]));
                write!(f, "adopt {:?}, accept_change {accept_change}", digests.collect::<Vec<_>>())
            }
        }
    }
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inserted(at) => write!(f, "inserted at {}", since(*at)),
            Self::Exists(record, now) => write!(f, "{:?}, at {}", standing(record), since(*now)),
            Self::Superseded(superseded) => write!(f, "{superseded}"),
            Self::Done(until) => write!(f, "done, until {}", since(*until)),
            Self::Fenced(Some(record)) => write!(f, "not its own: {:?}", standing(record)),
            Self::Fenced(None) => write!(f, "not its own: nothing stands"),
            Self::Renewed(ids) => {
                write!(f, "renewed")?;
                ids.iter().try_for_each(|id| write!(f, " {}", Id(*id)))
            }
            Self::Count(count) => write!(f, "{count}"),
            Self::Found(Some(found)) => write!(f, "{found}"),
            Self::Found(None) => write!(f, "nothing"),
            Self::Chunk(found, next) => {
                found.iter().try_for_each(|found| write!(f, "{found}; "))?;
                match next {
                    Some(next) => write!(f, "and more after {}", Id(*next)),
                    None => write!(f, "and no more"),
                }
            }
            Self::Removed(removed) => write!(f, "{removed}"),
            Self::Counts(counts) => write!(f, "{counts:?}"),
            Self::Changes(changes) => write!(f, "{changes:?}"),
            Self::Failed(error) => write!(f, "{error}"),
        }
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, origin, record, now } = self;
        let route = origin.as_ref().map_or("no route", |origin| &origin.route);
        write!(f, "{} of {route}: {:?}, at {}", Id(*id), standing(record), since(*now))
    }
}

struct Told<'a>(&'a NewRecord);

impl fmt::Display for Told<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NewRecord { attempt, lease, ttl, unknown_ttl, .. } = self.0;
        write!(f, "{}, lease {lease:?}, ttl {ttl:?}, unknown ttl {unknown_ttl:?}", Token::of(*attempt))
    }
}

/// An id: its first bytes, and the last one, which tells the runs of a crowd apart.
struct Id(RecordId);

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}{:02x}", self.0, self.0.0[31])
    }
}

/// In milliseconds since the run began.
fn since(time: Timestamp) -> u64 {
    time.0.saturating_sub(EPOCH)
}
