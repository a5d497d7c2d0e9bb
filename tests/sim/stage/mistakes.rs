//! Known mistakes of a store. What is played in a usual run must show each.

use std::sync::Arc;
use std::time::Instant;

use super::mistake::{Mistake, Mistaken};
use super::postgres::{CROWDS, House, RUNS, Way};
use super::script::scripts;

/// Plays until a store that makes the mistake says something else than the one in memory.
fn caught(mistake: Mistake) {
    let Some(house) = House::open(Way::Direct) else { return };
    let house = house.with(|store, clock| Arc::new(Mistaken::around(store, mistake, clock)));
    let began = Instant::now();
    for script in scripts(0, CROWDS, RUNS) {
        if let Err(difference) = house.play(&script.lines()) {
            return println!("{mistake:?} is caught after {:.1?}\n{script}:\n{difference}", began.elapsed());
        }
    }
    panic!("{mistake:?} survives {CROWDS} crowds and {RUNS} runs");
}

macro_rules! mistakes {
    ($($test:ident: $mistake:ident;)*) => {$(
        #[test]
        fn $test() {
            caught(Mistake::$mistake);
        }
    )*};
}

mistakes! {
    claim_over_a_record_that_stands: InsertsOverExisting;
    claim_that_does_not_know_itself: ForgetsOwnClaim;
    claim_answered_from_memory: RemembersClaims;
    claim_lost_in_a_batch: LosesOneOfABatch;
    claims_of_a_batch_crossed: CrossesAnswers;
    takeover_without_looking: TakesOverUnseen;
    takeover_that_looks_at_the_attempt_only: TakesOverByAttempt;
    ending_of_any_attempt: SettlesAnyAttempt;
    ending_of_what_is_in_flight_only: SettlesInFlightOnly;
    release_on_hold: ReleasesOnHold;
    hold_on_release: HoldsOnRelease;
    ttl_counted_from_the_end: CountsFromTheEnd;
    answer_cut_short: CutsAnswers;
    renewal_lost: LosesRenewals;
    renewal_of_the_first_only: RenewsTheFirst;
    renewal_said_of_what_is_lost: SaysThatAllAreRenewed;
    renewal_of_any_attempt: RenewsAnyAttempt;
    leases_that_end_early: EndsLeasesEarly;
    leases_that_end_late: EndsLeasesLate;
    sweeping_early: SweepsEarly;
    sweeping_late: SweepsLate;
    look_answered_from_memory: RemembersLooks;
    page_cut_short: LosesTheLastOfAChunk;
    unknown_records_not_counted: CountsNoUnknown;
    removal_of_what_has_ended_only: RemovesWhatHasEnded;
    removal_by_any_attempt: RemovesAnothers;
    rules_adopted_whatever_lives: AdoptsAnything;
}
