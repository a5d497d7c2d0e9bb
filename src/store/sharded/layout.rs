//! What the databases of a list say of themselves, and whether that fits the list.

use std::collections::BTreeSet;

/// What names a database: the id in its table `oncegate.store`.
pub type DatabaseId = [u8; 16];

/// The databases that a store is spread over, as one of them says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// In the order of the list.
    pub members: Vec<DatabaseId>,
    /// Those of the list that records move to.
    pub target: Option<Vec<DatabaseId>>,
}

/// A database of a list that was reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its id.
    pub id: DatabaseId,
    /// What it says; `None` where it was not made one of several.
    pub layout: Option<Layout>,
}

/// Which databases have records, by their indexes in the list. `None` is one that the list does not name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DatabaseMap {
    /// In the order of places.
    pub members: Vec<Option<usize>>,
    /// The same where records move to.
    pub target: Option<Vec<Option<usize>>>,
    /// The ids that the databases of the list must have.
    pub ids: Vec<DatabaseId>,
}

/// A list that is not the one that its databases know.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Misfit {
    /// One stands twice.
    #[error("{one} and {other} are the same database\n  hint: name each database once")]
    Twice {
        /// A database.
        one: String,
        /// The same.
        other: String,
    },
    /// One was not made one of several.
    #[error(
        "{name} says that it is a store by itself, and [store] url names it as number {place} of {count}\n  hint: where the \
         databases are new, `oncegate migrate` with this list makes them one store; where one has records already, they \
         would be forgotten, and `oncegate migrate --from OLD --to NEW` moves them"
    )]
    Single {
        /// The database.
        name: String,
        /// Its place in the list, from 1.
        place: usize,
        /// The length of the list.
        count: usize,
    },
    /// One says something else of itself than the list does.
    #[error(
        "{name} says that it is {said}, and [store] url names it as {listed}\n  hint: every gate needs the same databases \
         in the same order; `oncegate migrate --from OLD --to NEW` changes them"
    )]
    Differs {
        /// The database.
        name: String,
        /// What it says.
        said: String,
        /// What the list says.
        listed: String,
    },
    /// One says something else of itself than what is to be moved does.
    #[error(
        "{name} says that it is {said}, and {flag} names it as number {place} of {count}\n  hint: give the list that [store] \
         url has now behind --from, and the next one behind --to; a move that was begun goes on with the same two lists"
    )]
    Elsewhere {
        /// The database.
        name: String,
        /// What it says.
        said: String,
        /// The flag.
        flag: &'static str,
        /// Its place in the list, from 1.
        place: usize,
        /// The length of the list.
        count: usize,
    },
    /// Another move of these records has begun.
    #[error(
        "{name} says that a move to {target} databases has begun, and --to names other databases than that move\n  hint: a move that \
         was begun goes on with the same two lists: give the list behind --to with which it began"
    )]
    OtherMove {
        /// The database.
        name: String,
        /// How many databases that move leads to.
        target: usize,
    },
    /// Two of those that are to move belong to different stores.
    #[error(
        "{name} belongs to another store than {first}\n  hint: records move to new databases: name one behind --to that \
         `oncegate migrate --store` has prepared by itself, without others"
    )]
    OtherStore {
        /// The database.
        name: String,
        /// The first one behind `--from`.
        first: String,
    },
    /// One was removed by an earlier move.
    #[error(
        "{name} was removed from its store, and {flag} names it\n  hint: once no gate has it in its list, run `DROP SCHEMA oncegate \
         CASCADE` there, and prepare it anew with `oncegate migrate --store`"
    )]
    Removed {
        /// The database.
        name: String,
        /// The flag.
        flag: &'static str,
    },
    /// One has been moved to, and another knows of no move.
    #[error(
        "{name} says that it stands in the list behind --to already, and {other} knows of no move\n  hint: if {name} is new and has no \
         records, run `DROP SCHEMA oncegate CASCADE` there and prepare it again; else one of them is an older backup"
    )]
    NotOfMove {
        /// The database.
        name: String,
        /// The other.
        other: String,
    },
    /// Two take claims of the same ids.
    #[error(
        "{one} and {other} both take requests for the same keys\n  hint: one of them may be an older backup; a request can run in \
         both, so stop the gates until every database is of the same moment"
    )]
    OwnedTwice {
        /// A database.
        one: String,
        /// The other.
        other: String,
    },
    /// Which one an unreachable database must be is not known.
    #[error("{name} cannot be reached, and which database it must be is not known while records move")]
    Unclear {
        /// The database.
        name: String,
    },
}

/// Finds out where records are: `found` is what the databases of the list say, `None` where one cannot be reached. At least
/// one must be reached.
///
/// # Errors
/// Where the list is not the one that the databases know.
pub fn fit(names: &[String], found: &[Option<Found>]) -> Result<DatabaseMap, Misfit> {
    let count = names.len();
    let reached: Vec<(usize, &Found)> =
        found.iter().enumerate().filter_map(|(index, found)| Some((index, found.as_ref()?))).collect();
    for (place, (index, one)) in reached.iter().enumerate() {
        if let Some((first, _)) = reached[..place].iter().find(|(_, other)| other.id == one.id) {
            return Err(Misfit::Twice { one: names[*first].clone(), other: names[*index].clone() });
        }
    }
    for (index, one) in &reached {
        if one.layout.is_none() {
            return Err(Misfit::Single { name: names[*index].clone(), place: index + 1, count });
        }
    }
    let layouts: Vec<(usize, &Found, &Layout)> =
        reached.iter().filter_map(|(index, one)| Some((*index, *one, one.layout.as_ref()?))).collect();
    let Some(known) = latest(found) else { return Ok(DatabaseMap::default()) };
    let lists = [Some(&known.members), known.target.as_ref()];
    for (index, one, layout) in &layouts {
        if !known.agrees_with(layout) {
            let listed = describe_place(*index, count, false);
            return Err(Misfit::Differs { name: names[*index].clone(), said: describe(&one.id, layout), listed });
        }
    }
    let fitting: Vec<&Vec<DatabaseId>> = lists
        .iter()
        .flatten()
        .copied()
        .filter(|list| list.len() == count && reached.iter().all(|(index, one)| list[*index] == one.id))
        .collect();
    let Some(ids) = fitting.first() else {
        let differs = |(index, one, layout): &(usize, &Found, &Layout)| {
            let is_there = lists.iter().flatten().any(|list| list.len() == count && list[*index] == one.id);
            (!is_there).then(|| (*index, describe(&one.id, layout)))
        };
        let (index, said) = layouts.iter().find_map(differs).unwrap_or((0, describe(&reached[0].1.id, known)));
        let listed = describe_place(index, count, true);
        return Err(Misfit::Differs { name: names[index].clone(), said, listed });
    };
    if let Some(index) = (0..count).find(|index| fitting.iter().any(|list| list[*index] != ids[*index])) {
        return Err(Misfit::Unclear { name: names[index].clone() });
    }
    Ok(DatabaseMap::of(known, ids))
}

/// Where records are now, for a gate that serves with a list that fitted when it started: `found` is in the order of `ids`.
///
/// # Errors
/// See [`NotKnown`].
pub fn follow(ids: &[DatabaseId], found: &[Option<Found>]) -> Result<DatabaseMap, NotKnown> {
    let known = latest(found).ok_or_else(|| NotKnown::Unreached("none says it".to_owned()))?;
    let agrees = |one: &Found| {
        let Some(layout) = &one.layout else { return true };
        // What was removed hears of no later list.
        !layout.members.contains(&one.id) && layout.target.is_none() || known.agrees_with(layout)
    };
    if found.iter().flatten().all(agrees) { Ok(DatabaseMap::of(known, ids)) } else { Err(NotKnown::Contradiction) }
}

/// Why it is not known where records are.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotKnown {
    /// No database could be asked.
    #[error("{0}")]
    Unreached(String),
    /// One of them may be an older backup. While a list changes, they may contradict each other for a moment.
    #[error("the databases contradict each other")]
    Contradiction,
}

impl Layout {
    /// Whether another database says the same, before a move, during it or after it.
    fn agrees_with(&self, other: &Self) -> bool {
        (other.members == self.members || self.target.as_ref() == Some(&other.members))
            && other.target.as_ref().is_none_or(|target| Some(target) == self.target.as_ref())
    }
}

/// What the database says that knows most. They change one after another when a move begins and when it ends: one that
/// speaks of both lists knows both. One that its own list does not name was removed, and does not hear of later moves.
fn latest(found: &[Option<Found>]) -> Option<&Layout> {
    let layouts = || found.iter().flatten().filter_map(|one| Some((&one.id, one.layout.as_ref()?)));
    let moving = layouts().find(|(_, layout)| layout.target.is_some());
    let known = moving.or_else(|| layouts().find(|(id, layout)| layout.members.contains(id)));
    known.or_else(|| layouts().next()).map(|(_, layout)| layout)
}

impl Misfit {
    /// That a database is not what one of the lists of a move says.
    pub(in crate::store) fn of_move(
        name: String,
        found: &Found,
        flag: &'static str,
        place: usize,
        count: usize,
    ) -> Self {
        let is_removed = |layout: &Layout| layout.target.is_none() && !layout.members.contains(&found.id);
        if found.layout.as_ref().is_some_and(is_removed) {
            return Self::Removed { name, flag };
        }
        let alone = || "a store by itself, with records".to_owned();
        let said = found.layout.as_ref().map_or_else(alone, |layout| describe(&found.id, layout));
        Self::Elsewhere { name, said, flag, place: place + 1, count }
    }
}

/// What a database says of itself.
fn describe(id: &DatabaseId, layout: &Layout) -> String {
    let place = |list: &[DatabaseId]| match list.iter().position(|member| member == id) {
        Some(place) => format!("number {} of {} databases", place + 1, list.len()),
        None => format!("none of the {} databases of its store any more", list.len()),
    };
    match &layout.target {
        Some(target) if !layout.members.contains(id) => format!("to become {}", place(target)),
        _ => place(&layout.members),
    }
}

/// What the list says of one of its databases.
fn describe_place(index: usize, count: usize, is_of_one_store: bool) -> String {
    let other = if is_of_one_store { "" } else { ", beside databases of another store" };
    format!("number {} of {count}{other}", index + 1)
}

impl DatabaseMap {
    fn of(layout: &Layout, ids: &[DatabaseId]) -> Self {
        let routes = |list: &Vec<DatabaseId>| list.iter().map(|id| ids.iter().position(|other| other == id)).collect();
        let (members, target) = (routes(&layout.members), layout.target.as_ref().map(routes));
        Self { members, target, ids: ids.to_vec() }
    }

    /// Of a list whose records do not move.
    #[must_use]
    pub fn fixed(count: usize) -> Self {
        Self { members: (0..count).map(Some).collect(), target: None, ids: Vec::new() }
    }

    /// Whether a database may have records that the list does not name.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        self.members.iter().chain(self.target.iter().flatten()).any(Option::is_none)
    }

    /// The databases of the list that may have records, in no order.
    #[must_use]
    pub fn all(&self) -> Vec<usize> {
        let both = self.members.iter().chain(self.target.iter().flatten());
        both.flatten().copied().collect::<BTreeSet<usize>>().into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: DatabaseId = [0xa; 16];
    const B: DatabaseId = [0xb; 16];
    const C: DatabaseId = [0xc; 16];

    fn says(id: DatabaseId, members: &[DatabaseId], target: Option<&[DatabaseId]>) -> Option<Found> {
        let layout = Layout { members: members.to_vec(), target: target.map(<[DatabaseId]>::to_vec) };
        Some(Found { id, layout: Some(layout) })
    }

    fn alone(id: DatabaseId) -> Option<Found> {
        Some(Found { id, layout: None })
    }

    type Places = Vec<Option<usize>>;

    fn fits(found: &[Option<Found>]) -> Result<(Places, Option<Places>), String> {
        let names: Vec<String> = ["a", "b", "c"][..found.len()].iter().map(|name| (*name).to_owned()).collect();
        let routes = fit(&names, found).map_err(|misfit| misfit.to_string())?;
        Ok((routes.members, routes.target))
    }

    #[track_caller]
    fn refused(found: &[Option<Found>], said: &str) {
        let error = fits(found).unwrap_err();
        assert!(error.starts_with(said), "{error}");
    }

    #[test]
    fn the_list_that_all_know_fits() {
        let two = [A, B];
        let both = Ok((vec![Some(0), Some(1)], None));
        assert_eq!(fits(&[says(A, &two, None), says(B, &two, None)]), both);
        assert_eq!(fits(&[None, says(B, &two, None)]), both, "the other knows which one it must be");
        let names = ["a".to_owned(), "b".to_owned()];
        assert_eq!(fit(&names, &[None, says(B, &two, None)]).unwrap().ids, two);
    }

    #[test]
    fn any_other_list_is_refused() {
        let two = [A, B];
        refused(
            &[says(B, &two, None), says(A, &two, None)],
            "a says that it is number 2 of 2 databases, and [store] url names it as number 1 of 2",
        );
        refused(&[says(B, &two, None), None], "a says that it is number 2 of 2 databases");
        refused(
            &[says(A, &two, None)],
            "a says that it is number 1 of 2 databases, and [store] url names it as number 1 of 1",
        );
        refused(&[says(A, &two, None), says(A, &two, None)], "a and b are the same database");
        refused(&[says(A, &two, None), says(B, &two, None), alone(C)], "c says that it is a store by itself");
        refused(
            &[alone(A), alone(B)],
            "a says that it is a store by itself, and [store] url names it as number 1 of 2",
        );
        refused(
            &[says(A, &two, None), says(C, &[C, B], None)],
            "b says that it is number 1 of 2 databases, and [store] url names it as number 2 of 2, beside databases of another store",
        );
        refused(
            &[says(A, &two, None), says(B, &two, None), None],
            "a says that it is number 1 of 2 databases, and [store] url names it as number 1 of 3",
        );
        refused(&[says(C, &[A, B], None)], "a says that it is none of the 2 databases of its store any more");
    }

    #[test]
    fn while_records_move_the_former_list_fits_and_the_next_one() {
        let (two, three) = ([A, B], [A, B, C]);
        let moving = |id| says(id, &two, Some(&three));
        let next = Ok((vec![Some(0), Some(1)], Some(vec![Some(0), Some(1), Some(2)])));
        assert_eq!(fits(&[moving(A), moving(B), moving(C)]), next);
        assert_eq!(fits(&[says(A, &two, None), moving(B), moving(C)]), next, "the move is about to begin");
        assert_eq!(fits(&[says(A, &three, None), moving(B), moving(C)]), next, "it is about to end");
        assert_eq!(fits(&[moving(A), None, moving(C)]), next);
        assert_eq!(fits(&[moving(A), moving(B)]), Ok((vec![Some(0), Some(1)], Some(vec![Some(0), Some(1), None]))));
        refused(&[moving(A), moving(C), moving(B)], "b says that it is to become number 3 of 3 databases");
        refused(&[says(A, &[A, B, C], Some(&[A])), moving(B)], "b says");
    }

    #[test]
    fn a_gate_that_serves_follows_records_into_any_list_of_what_it_knows() {
        let found = |members: &[DatabaseId]| [says(A, members, None), None, says(C, members, None)];
        let routes = |members: &[DatabaseId]| follow(&[A, B, C], &found(members)).ok().map(|routes| routes.members);
        assert_eq!(routes(&[C, A]), Some(vec![Some(2), Some(0)]));
        assert_eq!(routes(&[A, [0xd; 16]]), Some(vec![Some(0), None]));
        assert!(matches!(follow(&[A], &[None]), Err(NotKnown::Unreached(_))));
        // It was removed before the move that the others know of.
        let removed = [says(C, &[A, B], None), says(A, &[A, B, [0xd; 16]], None)];
        let members = follow(&[C, A], &removed).ok().map(|routes| routes.members);
        assert_eq!(members, Some(vec![Some(1), None, None]));
    }

    /// One of them may have been restored from a backup of before the last move.
    #[test]
    fn a_gate_that_serves_follows_no_databases_that_contradict_each_other() {
        let (two, three) = ([A, B], [A, B, C]);
        let (ids, contradiction) = ([A, B, C], Err(NotKnown::Contradiction));
        assert_eq!(follow(&ids, &[says(A, &two, None), says(B, &three, None), says(C, &three, None)]), contradiction);
        assert_eq!(follow(&ids, &[says(B, &three, None), says(A, &two, None)]), contradiction);
        let moving = |id| says(id, &two, Some(&three));
        for found in [[says(A, &two, None), moving(B), moving(C)], [says(A, &three, None), moving(B), moving(C)]] {
            assert!(follow(&ids, &found).is_ok());
        }
        assert_eq!(follow(&ids, &[says(A, &[A, C], None), moving(B), moving(C)]), contradiction);
    }

    #[test]
    fn a_database_that_could_be_either_is_waited_for() {
        let moving = |id| says(id, &[A, B], Some(&[A, C]));
        refused(&[moving(A), None], "b cannot be reached");
        assert_eq!(fits(&[moving(A), moving(C)]), Ok((vec![Some(0), None], Some(vec![Some(0), Some(1)]))));
        assert_eq!(fits(&[moving(A), moving(B)]), Ok((vec![Some(0), Some(1)], Some(vec![Some(0), None]))));
    }
}
