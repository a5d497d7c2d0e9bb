//! Refuses a move that would lose a record, or give an id two owners.

use tokio::time::{Instant, sleep};

use super::member::Member;
use super::{MAX_SKEW, Moving, POLL};
use crate::store::postgres::OpenError;
use crate::store::postgres::layout::{OwnedTwice, find_by};
use crate::store::sharded::layout::{Layout, Misfit};

impl Moving {
    /// Refuses lists that are not what the databases say.
    pub(super) fn check(&self) -> Result<(), OpenError> {
        let first = &self.members[0];
        for (index, member) in self.members.iter().enumerate() {
            let is_new = index >= self.lists.from.len() && member.database.found.layout.is_none();
            if !is_new && member.database.opened.id != first.database.opened.id {
                return Err(Misfit::OtherStore { name: member.name.clone(), first: first.name.clone() }.into());
            }
        }
        // A move ends where all of them know of it.
        if let Some(next) = self.members.iter().find(|member| member.knows(&self.lists.to, None)) {
            let knows_of_it = |member: &Member| {
                member.knows(&self.lists.from, Some(&self.lists.to)) || member.knows(&self.lists.to, None)
            };
            if let Some(other) = self.members.iter().find(|member| !knows_of_it(member)) {
                return Err(Misfit::NotOfMove { name: next.name.clone(), other: other.name.clone() }.into());
            }
            return Ok(());
        }
        for (index, member) in self.members.iter().enumerate() {
            let is_former = index < self.lists.from.len();
            let found = &member.database.found;
            let fits = match &found.layout {
                Some(Layout { members, target: None }) => is_former && *members == self.lists.from,
                Some(Layout { members, target: Some(target) }) => {
                    *members == self.lists.from && *target == self.lists.to
                }
                None if is_former => self.lists.from.len() == 1,
                None => !member.database.has_records,
            };
            if let Some(Layout { members, target: Some(target) }) = &found.layout
                && *members == self.lists.from
                && *target != self.lists.to
            {
                return Err(Misfit::OtherMove { name: member.name.clone(), target: target.len() }.into());
            }
            if !fits {
                let (flag, list) = if is_former { ("--from", &self.lists.from) } else { ("--to", &self.lists.to) };
                let place = list.iter().position(|id| *id == found.id).unwrap_or_default();
                return Err(Misfit::of_move(member.name.clone(), found, flag, place, list.len()).into());
            }
        }
        Ok(())
    }

    /// Refuses databases of which two take claims of the same ids.
    pub(super) async fn check_owners(&self) -> Result<(), OpenError> {
        let mut seen = None;
        loop {
            let mut looks = Vec::new();
            for member in &self.members {
                let look = find_by(member.session.client()).await;
                looks.push((&*member.name, look.map_err(|error| OpenError::of_database(&member.name, error))?));
            }
            if OwnedTwice::is_ruled_out(looks.iter().map(|(name, database)| (*name, database)), &mut seen)? {
                return Ok(());
            }
            sleep(POLL).await;
        }
    }

    /// Refuses clocks that differ: a record ends when the clock of its database says so, and would end too early in one that
    /// is ahead.
    pub(super) async fn check_clocks(&self) -> Result<(), OpenError> {
        let began = Instant::now();
        let mut clocks: Vec<(i64, &str)> = Vec::new();
        for member in &self.members {
            let rows = member.rows("SELECT oncegate.now_v1()").await?;
            let since = i64::try_from(began.elapsed().as_millis()).unwrap_or(i64::MAX);
            clocks.push((rows.first().map_or(0, |row| row.get::<_, i64>(0)).saturating_sub(since), &member.name));
        }
        match (clocks.iter().min(), clocks.iter().max()) {
            (Some((behind, one)), Some((ahead, other))) if ahead - behind > MAX_SKEW => {
                Err(OpenError::Failed(format!(
                    "the clock of {other} is {} ms ahead of that of {one}: records would expire too early; synchronise the clocks first",
                    ahead - behind
                )))
            }
            _ => Ok(()),
        }
    }
}
